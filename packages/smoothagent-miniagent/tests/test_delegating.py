"""`SubAgentTool`: the sub-agent's first request finds warm what was known of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from agent_server import AgentServer, serving
from mini import WORLDS, Look, World, home, run, settled
from smoothagent import KeepRecent
from smoothagent.serving.shared import _shared  # pyright: ignore[reportPrivateUsage]
from smoothagent_miniagent import SubAgentTool, attach

TASK = 'Read "all" of it,\nand say what it does. ' * 6


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    home(monkeypatch, tmp_path)
    _shared._backends.clear()  # pyright: ignore[reportPrivateUsage]
    return request.param()


class Delegating(AgentServer):
    """The main agent's model looks, delegates at its third turn, and is done after that."""

    delegates = 3
    name = "delegate"

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        sub = str(body["messages"][0]["content"]).startswith("SUB")
        if body not in self.main or sub:
            if body in self.main:
                return {"role": "assistant", "content": "the sub-agent's answer"}, "stop"
            return super().answer(body)
        own = [b for b in self.main if not str(b["messages"][0]["content"]).startswith("SUB")]
        if len(own) != self.delegates:
            self.turns = len(self.main) if len(own) < self.delegates + 2 else 0
            return super().answer(body)
        call = {"name": self.name, "arguments": json.dumps({"task": TASK})}
        calls = [{"id": "d", "type": "function", "function": call}]
        return {"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls"

    @property
    def started(self) -> list[str]:
        """Beginnings of the task that were prefilled."""
        texts = [b["messages"][-1]["content"] for b in self.prefills if b["messages"][-1]["role"] == "user"]
        return [text for text in texts if text and TASK.startswith(text)]

    @property
    def subs(self) -> list[dict[str, Any]]:
        """The sub-agent's calls."""
        return [b for b in self.main if str(b["messages"][0]["content"]).startswith("SUB")]

    def warmed(self, body: dict[str, Any]) -> int:
        """How many of a request's messages were warmed before."""
        at = next(i for i, b in enumerate(self.bodies) if b is body)
        warm = [b["messages"] for b in self.bodies[:at] if b in self.prefills and b.get("tools") == body.get("tools")]
        return max((sum(x == y for x, y in zip(w, body["messages"], strict=False)) for w in warm), default=0)


def played(
    world: World,
    server: Delegating,
    *,
    streamed: bool = True,
    attached: bool = True,
    read: Callable[[str], Iterable[str]] | None = None,
) -> tuple[Delegating, SubAgentTool, Any]:
    async def main() -> tuple[Delegating, SubAgentTool, Any]:
        server.pieces = read
        with serving(server):
            made: list[Any] = []

            def make() -> Any:
                made.append(world.make(world.openai(server.url), [Look(world)], system_prompt="SUB " + "P" * 200))
                return made[-1]

            tool = SubAgentTool(make, name=server.name)
            look = Look(world)
            agent = world.make(world.openai(server.url), [look, tool])
            if not attached:
                await run(agent, "go")
                return server, tool, agent
            with attach(agent, lambda: KeepRecent(20, at_turns=40), streamed=streamed) as attachment:

                async def wait() -> None:
                    await settled(attachment)
                    deadline = time.monotonic() + 30
                    while True:
                        if streamed or tool.ledger.snapshot().prefilled_tokens:
                            return
                        assert time.monotonic() < deadline, "nothing is warmed"
                        await asyncio.sleep(0.002)

                look.wait = wait
                await run(agent, "go")
            return server, tool, agent

    return asyncio.run(main())


def played_slowly(world: World) -> tuple[Delegating, SubAgentTool, Any]:
    """Written so slowly that what was written first is prefilled before the last is there."""
    server = Delegating()

    def pieces(text: str) -> Iterable[str]:
        half = len(text) // 2 if "task" in text else len(text)
        yield text[:half]
        deadline = time.monotonic() + 30
        while half < len(text) and not server.started:
            assert time.monotonic() < deadline, "nothing is warmed"
            time.sleep(0.002)
        yield text[half:]

    return played(world, server, read=pieces)


def test_prompt_and_task_are_warmed_while_the_task_is_written(world: World) -> None:
    server, tool, agent = played_slowly(world)
    (sub,) = server.subs
    assert [m["role"] for m in sub["messages"]] == ["system", "user"]
    assert sub["messages"][1]["content"] == TASK
    assert server.warmed(sub) >= 1
    assert server.started
    assert tool.ledger.snapshot().prefilled_tokens > 0
    results = [m.content for m in agent.messages if m.role == "tool"]
    assert "the sub-agent's answer" in results


def test_without_streams_all_but_the_task_is_warm(world: World) -> None:
    server, _, agent = played(world, Delegating(), streamed=False)
    (sub,) = server.subs
    assert server.warmed(sub) == 1
    assert "the sub-agent's answer" in [m.content for m in agent.messages if m.role == "tool"]


def test_without_an_attached_agent_it_works_cold(world: World) -> None:
    server, _, agent = played(world, Delegating(), attached=False)
    assert len(server.subs) == 1
    assert "the sub-agent's answer" in [m.content for m in agent.messages if m.role == "tool"]


def test_what_nobody_calls_is_given_up(world: World) -> None:
    class Never(Delegating):
        delegates = -1

    server, tool, _ = played(world, Never(), streamed=False)
    assert not server.subs
    assert not tool._ready  # pyright: ignore[reportPrivateUsage]


def test_a_sub_agent_on_its_parents_client_is_an_agent_of_its_own(world: World) -> None:
    async def main() -> tuple[Delegating, Any]:
        server = Delegating()
        with serving(server):
            agent: Any = None

            def make() -> Any:
                return world.make(agent.llm, [], system_prompt="SUB " + "P" * 200)

            look = Look(world)
            agent = world.make(world.openai(server.url), [look, SubAgentTool(make)])
            with attach(agent, lambda: KeepRecent(20, at_turns=40)):
                await run(agent, "go")
            return server, agent

    server, agent = asyncio.run(main())
    assert [m["content"] for m in server.subs[0]["messages"]][1] == TASK
    assert "the sub-agent's answer" in [m.content for m in agent.messages if m.role == "tool"]


def test_cancelling_reaches_the_sub_agent(world: World) -> None:
    async def main() -> Any:
        server = Delegating()
        with serving(server):
            made: list[Any] = []

            def make() -> Any:
                made.append(world.make(world.openai(server.url), [], system_prompt="SUB " + "P" * 200))
                return made[-1]

            agent = world.make(world.openai(server.url), [Look(world), SubAgentTool(make)])
            agent.cancel_event = asyncio.Event()
            with attach(agent, lambda: KeepRecent(20, at_turns=40)):
                await run(agent, "go")
            return made[0].cancel_event is agent.cancel_event

    assert asyncio.run(main())
