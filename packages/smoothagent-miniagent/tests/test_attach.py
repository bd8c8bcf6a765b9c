"""``attach``: what goes to the server, what is warm there, and what stays as it was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_server import AgentServer, serving
from anthropic_server import AnthropicServer, serving_anthropic
from mini import OUTPUT, WORLDS, Look, World, home, run, settled
from smoothagent import ConfigurationError, KeepRecent, LookaheadStrategy, Offload, OffloadStore, Pipeline, Summarize
from smoothagent.serving.shared import _shared  # pyright: ignore[reportPrivateUsage]
from smoothagent_miniagent import Attachment, ReadOffloadedTool, attach


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    home(monkeypatch, tmp_path)
    return request.param()


def keep_recent() -> LookaheadStrategy:
    return KeepRecent(3, at_turns=6)


def played(
    world: World,
    strategy: Callable[[], LookaheadStrategy] | None = keep_recent,
    *,
    server: AgentServer | None = None,
    turns: int = 12,
    tasks: int = 1,
    output: str = OUTPUT,
    limit: int = 80_000,
    **more: Any,
) -> tuple[AgentServer, Any, Attachment]:
    """An attached agent's runs; the server with what it was asked."""

    async def main() -> tuple[AgentServer, Any, Attachment]:
        with serving(server or AgentServer(turns=turns)) as asked:
            look = Look(world, output=output)
            agent = world.make(world.openai(asked.url), [look], token_limit=limit)
            attachment = attach(agent, strategy, **more)
            look.wait = lambda: settled(attachment)
            for number in range(tasks):
                await run(agent, f"the task {number}")
                await settled(attachment)
            attachment.detach()
            return asked, agent, attachment

    return asyncio.run(main())


def shared(a: list[Any], b: list[Any]) -> int:
    """How many messages two requests have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def wires(agent: Any) -> list[dict[str, Any]]:
    """An agent's history as its client sends it."""
    return agent.llm._client._convert_messages(agent.messages)[1]


def test_turns_that_leave_are_those_of_the_strategy_and_what_stays_is_sent_as_it_is(world: World) -> None:
    server, agent, attachment = played(world)
    history, main = wires(agent), server.main
    assert len(main) == 13
    assert len(history) == 2 + 2 * 12 + 1  # all of it is still there
    assert attachment.ledger.snapshot().commits >= 2
    short = 0
    for number, body in enumerate(main):
        sent, whole = body["messages"], history[: 2 + 2 * number]
        kept = len(sent) - 2
        assert sent[:2] == whole[:2]  # what the agent is, and its task
        assert sent[2:] == whole[len(whole) - kept :]  # in order, and verbatim
        short += len(sent) < len(whole)
    assert short >= 6


def test_what_is_warmed_is_what_is_sent(world: World) -> None:
    server, _, attachment = played(world)
    assert attachment.ledger.snapshot().late_commits == 0
    fields = ("model", "tools", "reasoning_split")
    commits = 0
    for before, body in zip(server.main, server.main[1:], strict=False):
        if len(body["messages"]) > len(before["messages"]):
            continue
        commits += 1
        at = next(i for i, b in enumerate(server.bodies) if b is body)
        warm = [b for b in server.bodies[:at] if b in server.prefills]
        best = max(warm, key=lambda b: shared(b["messages"], body["messages"]))
        # All but the result that came last, which nobody could know.
        assert shared(best["messages"], body["messages"]) >= len(body["messages"]) - 1
        assert {f: best.get(f) for f in fields} == {f: body.get(f) for f in fields}
        assert body["reasoning_split"] is True
    assert commits >= 2


def test_the_default_is_summaries_at_the_agents_own_limit_and_its_own_summarizer_stands_down(world: World) -> None:
    server, agent, attachment = played(world, None, turns=14, limit=1500)
    assert attachment.last_commit is not None
    assert server.summaries
    assert not any("Agent execution processes" in str(b["messages"][0]) for b in server.bodies)
    assert len(agent.messages) == 2 + 2 * 14 + 1
    assert any("SUMMARY" in str(body["messages"]) for body in server.main)
    for body in server.main:
        assert body["messages"][0] == server.main[0]["messages"][0]
        results = [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]
        calls = [c["id"] for m in body["messages"] for c in m.get("tool_calls", ())]
        assert results == calls


def test_outputs_are_offloaded_and_read_back(world: World, tmp_path: Path) -> None:
    store = OffloadStore(tmp_path / "store")
    server, agent, attachment = played(world, lambda: Offload(1200, keep=2, store=store), output="long " * 120)
    names = [t["function"]["name"] for t in server.main[0]["tools"]]
    assert names == ["look", "read_offloaded"]
    assert attachment.ledger.snapshot().commits >= 1
    last = server.main[-1]["messages"]
    moved = [m["content"] for m in last if m["role"] == "tool" and "offloaded" in m["content"]]
    assert moved
    read = asyncio.run(ReadOffloadedTool(store).execute(moved[0]))
    assert "1 " + "long " * 120 in read.content
    assert list(agent.tools) == ["look"]  # taken out again
    assert all("offloaded" not in str(m.content) for m in agent.messages)


def test_a_pipeline_brings_the_tool_too(world: World, tmp_path: Path) -> None:
    store = OffloadStore(tmp_path / "store")
    server, _, _ = played(world, lambda: Pipeline(Offload(900, keep=1, store=store), Summarize(2500)), turns=3)
    assert [t["function"]["name"] for t in server.main[0]["tools"]] == ["look", "read_offloaded"]


def test_detaching_puts_everything_back(world: World) -> None:
    with serving(AgentServer()) as server:
        llm = world.openai(server.url)
        agent = world.make(llm, [])
        before = _own(agent)
        with attach(agent, keep_recent) as attachment:
            assert agent.llm is not llm
            assert agent.llm.model == "m"
        assert _own(agent) == before
        assert agent.llm is llm
        assert attachment.runtime.closed
        attachment.detach()  # twice is once


def test_what_cannot_be_attached_is_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match="it has no llm, messages, tools"):
        attach(object())
    with serving(AgentServer()) as server:
        agent = world.make(world.openai(server.url))
        with attach(agent, keep_recent), pytest.raises(ConfigurationError, match="attached already"):
            attach(agent, keep_recent)
        attach(agent, keep_recent).detach()
        with pytest.raises(ConfigurationError):
            attach(agent, KeepRecent(0))
        assert agent.llm.__class__.__name__ == "LLMClient"


def test_attributes_of_the_client_are_reached_through_its_stand_in(world: World) -> None:
    with serving(AgentServer()) as server:
        agent = world.make(world.openai(server.url))
        with attach(agent, keep_recent):
            told: list[int] = []
            agent.llm.retry_callback = _noting(told)
        agent.llm.retry_callback(ValueError(), 3)
        assert told == [3]


@pytest.mark.parametrize("streamed", [True, False, None])
def test_a_request_that_fails_is_tried_again_as_the_client_does(world: World, streamed: bool | None) -> None:
    class Failing(AgentServer):
        left = 2

    server = Failing(turns=2)
    made = server.answer

    def answer(body: dict[str, Any]) -> Any:
        if body in server.main and server.left:
            server.left -= 1
            server.bodies.remove(body)
            raise ConnectionError
        return made(body)

    server.answer = answer

    async def main() -> str:
        with serving(server):
            agent = world.make(world.openai(server.url, retries=3), [Look(world)])
            attempts: list[int] = []
            with attach(agent, keep_recent, streamed=streamed):
                agent.llm.retry_callback = _noting(attempts)
                said = await run(agent, "go")
            assert attempts == [1, 2]
            return said

    assert asyncio.run(main()) == "done"


@pytest.mark.parametrize(
    ("streamed", "vllm", "expected"), [(None, True, True), (None, False, False), (True, False, True)]
)
def test_streams_are_asked_for_where_the_server_is_ones_own(
    world: World, streamed: bool | None, vllm: bool, expected: bool
) -> None:
    server, agent, _ = played(world, server=AgentServer(turns=3, vllm=vllm), streamed=streamed)
    assert [bool(b.get("stream")) for b in server.main] == [expected] * 4
    assert [m.content for m in agent.messages if m.role == "assistant"] == ["turn 1", "turn 2", "turn 3", "done"]
    assert agent.api_total_tokens > 0


def test_a_server_that_refuses_streams_is_asked_without(world: World) -> None:
    server = AgentServer(turns=3)
    refused: list[Any] = []

    async def main() -> Any:
        with serving(server):
            agent = world.make(world.openai(server.url), [Look(world)])
            client = agent.llm._client.client
            real = client.chat.completions.create

            async def create(**params: Any) -> Any:
                if params.get("stream"):
                    refused.append(params)
                    raise _BadRequestError
                return await real(**params)

            client.chat.completions.create = create
            with attach(agent, keep_recent):
                await run(agent, "go")
            return agent

    agent = asyncio.run(main())
    assert len(refused) == 1  # and is not asked again
    assert [m.content for m in agent.messages if m.role == "assistant"] == ["turn 1", "turn 2", "turn 3", "done"]


def _own(agent: Any) -> dict[str, Any]:
    kept: dict[str, Any] = agent.__dict__.copy()
    del kept["messages"]
    return kept


def _noting(attempts: list[int]) -> Callable[[Exception, int], None]:
    def note(error: Exception, attempt: int) -> None:
        del error
        attempts.append(attempt)

    return note


class _BadRequestError(Exception):
    status_code = 400


def test_a_failing_server_ends_the_run_and_the_next_goes_on(world: World) -> None:
    class Down(AgentServer):
        down = False

    server = Down(turns=4)
    made = server.answer

    def answer(body: dict[str, Any]) -> Any:
        if server.down and body in server.main:
            server.bodies.remove(body)
            raise ConnectionError
        return made(body)

    server.answer = answer

    async def main() -> tuple[str, str, Any]:
        with serving(server):
            look = Look(world)
            agent = world.make(world.openai(server.url), [look])
            with attach(agent, keep_recent):

                async def fall() -> None:
                    server.down = look.calls == 2

                look.wait = fall
                first = await run(agent, "go")
                server.down = False
                return first, await run(agent, "again"), agent

    first, second, agent = asyncio.run(main())
    assert "failed" in first
    assert second == "done"
    assert [m.role for m in agent.messages if m.role == "user"] == ["user", "user"]


def test_a_cancelled_run_takes_its_step_back_and_the_next_goes_on(world: World) -> None:
    async def main() -> tuple[str, str, Any, AgentServer]:
        with serving(AgentServer(turns=9)) as server:
            look = Look(world)
            agent = world.make(world.openai(server.url), [look])
            agent.cancel_event = asyncio.Event()
            with attach(agent, keep_recent) as attachment:

                async def stop() -> None:
                    await settled(attachment)
                    if look.calls == 7:
                        agent.cancel_event.set()

                look.wait = stop
                first = await run(agent, "go")
                agent.cancel_event.clear()
                return first, await run(agent, "again"), agent, server

    first, second, agent, server = asyncio.run(main())
    assert "cancelled" in first.lower()
    assert second == "done"
    assert wires(agent)[-2:] == [server.main[-1]["messages"][-1], {"role": "assistant", "content": "done"}]
    for body in server.main:
        calls = [c["id"] for m in body["messages"] for c in m.get("tool_calls", ())]
        assert calls == [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]


def test_a_history_that_is_cleared_begins_anew(world: World) -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=8)) as server:
            look = Look(world)
            agent = world.make(world.openai(server.url), [look])
            with attach(agent, keep_recent) as attachment:
                look.wait = lambda: settled(attachment)
                await run(agent, "go")
                agent.messages = [agent.messages[0]]  # as its command line's /clear
                await run(agent, "another thing")
            return server

    server = asyncio.run(main())
    assert [m["content"] for m in server.main[-1]["messages"]][1:] == ["another thing"]


def test_other_calls_of_the_same_client_go_as_they_are(world: World) -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=3)) as server:
            agent = world.make(world.openai(server.url), [Look(world)])
            with attach(agent, keep_recent):
                await run(agent, "go")
                title = [world.message(role="user", content="a title for this")]
                assert (await agent.llm.generate(title)).content
            return server

    server = asyncio.run(main())
    assert server.main[-1]["messages"] == [{"role": "user", "content": "a title for this"}]
    assert not server.main[-1].get("stream")


def test_the_acp_servers_loop_which_calls_the_client_itself(world: World) -> None:
    """It gives tools in Anthropic's form and never summarizes."""

    async def main() -> tuple[AgentServer, Any]:
        with serving(AgentServer(turns=12)) as server:
            look = Look(world)
            agent = world.make(world.openai(server.url), [look])
            with attach(agent, keep_recent) as attachment:
                agent.messages.append(world.message(role="user", content="go"))
                for _ in range(20):
                    schemas = [tool.to_schema() for tool in agent.tools.values()]
                    said = await agent.llm.generate(messages=agent.messages, tools=schemas)
                    told = {"content": said.content, "thinking": said.thinking, "tool_calls": said.tool_calls}
                    agent.messages.append(world.message(role="assistant", **told))
                    if not said.tool_calls:
                        break
                    await settled(attachment)
                    for call in said.tool_calls:
                        made = {"content": f"[OK] {OUTPUT}", "tool_call_id": call.id, "name": call.function.name}
                        agent.messages.append(world.message(role="tool", **made))
            return server, agent

    server, agent = asyncio.run(main())
    assert len(agent.messages) == 2 + 2 * 12 + 1
    assert len(server.main[-1]["messages"]) < 16
    assert server.prefills
    assert server.prefills[-1]["tools"] == server.main[-1]["tools"]


@pytest.mark.parametrize("warm", [True, None])
def test_the_client_for_anthropics_api(world: World, warm: bool | None) -> None:
    async def main() -> tuple[AnthropicServer, Any]:
        with serving_anthropic(AnthropicServer(turns=10)) as server:
            look = Look(world)
            agent = world.make(world.anthropic(server.url), [look])
            with attach(agent, lambda: Summarize(500, keep=120), warm=warm) as attachment:
                look.wait = lambda: settled(attachment)
                await run(agent, "go")
                assert attachment.last_commit is not None
                assert attachment.last_commit.kind == "lookahead"
            return server, agent

    server, agent = asyncio.run(main())
    assert len(server.main) == 11
    assert server.summaries
    assert bool(server.prefills) is bool(warm)
    assert len(agent.messages) == 2 + 2 * 10 + 1
    last = server.main[-1]
    assert last["system"] == server.main[0]["system"]
    assert any("SUMMARY" in str(m["content"]) for m in last["messages"])
    assert len(last["messages"]) < len(agent.messages) - 1
    if warm:
        commits = [
            (a, b)
            for a, b in zip(server.main, server.main[1:], strict=False)
            if len(b["messages"]) <= len(a["messages"])
        ]
        for _, body in commits:
            best = max(shared(p["messages"], body["messages"]) for p in server.prefills)
            # The last call's result is missing, so that its call is not shown to a server either.
            assert best >= len(body["messages"]) - 2
            assert any(p["tools"] == body["tools"] and p["system"] == body["system"] for p in server.prefills)


def test_a_client_of_ones_own_gets_the_transformation_alone(world: World) -> None:
    class Own:
        model = "own"

        def __init__(self) -> None:
            self.asked: list[list[Any]] = []

        async def generate(self, messages: list[Any], tools: Any = None) -> Any:
            self.asked.append(list(messages))
            if "Summarize the conversation" in str(messages[-1].content):
                return _Response("SUMMARY", None)
            number = sum(m.role == "tool" for m in messages)
            if len([a for a in self.asked if "Summarize" not in str(a[-1].content)]) > 8:
                return _Response("done", None)
            function = type("F", (), {"name": "look", "arguments": {"number": number}})()
            return _Response("turn", [{"id": "c", "type": "function", "function": vars_of(function)}], world)

    def vars_of(function: Any) -> dict[str, Any]:
        return {"name": function.name, "arguments": function.arguments}

    class _Response:
        def __init__(self, content: str, calls: Any, made: World | None = None) -> None:
            self.content, self.thinking, self.finish_reason, self.usage = content, None, "stop", None
            self.tool_calls = None
            if made is not None:
                self.tool_calls = made.message(role="assistant", content="", tool_calls=calls).tool_calls

    async def main() -> tuple[Own, Any, Any]:
        llm = Own()
        look = Look(world)
        agent = world.make(llm, [look])
        with attach(agent, lambda: Summarize(900, keep=200)) as attachment:
            look.wait = lambda: settled(attachment)
            said = await run(agent, "go")
            return llm, said, attachment.last_commit

    llm, said, commit = asyncio.run(main())
    assert said == "done"
    assert commit is not None
    assert any("SUMMARY" in str(m.content) for m in llm.asked[-1])


def test_no_text_of_a_message_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="smoothagent"):
        played(world, output="SECRET" * 60)
    assert "SECRET" not in caplog.text


@pytest.fixture(autouse=True)
def fresh_backends() -> None:
    """Ports are used again, and what is known of a server is not to be known of the next."""
    _shared._backends.clear()  # pyright: ignore[reportPrivateUsage]
