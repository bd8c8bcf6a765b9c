"""Sub-agents that a tool starts find their prompt, and the task as it was written, in the cache."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from autogen_agentchat import tools as built_in
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.memory import ListMemory

from ag import OUTPUT, client_of
from agent_server import AgentServer, kind_of, serving
from smoothagent import KeepRecent, OpenAIBackend, Stream
from smoothagent_autogen import AgentTool, BufferedChatCompletionContext, LookaheadChatCompletionContext, TeamTool

TASK = 'Find out what the function does, "all" of it, and say so in détail. ' * 6


class Boss(AgentServer):
    """An agent that hands two tasks to another, which uses a tool and answers."""

    def __init__(self) -> None:
        super().__init__(pieces=lambda text: re.findall(r".{1,40}", text, re.DOTALL))

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        message, why = super().answer(body)
        if "tool_calls" not in message:
            return message, why
        message["content"] = None
        texts = [m["content"] or "" for m in body["messages"]]
        done = sum(m["role"] == "tool" for m in body["messages"])
        if texts[0] == "BOSS":
            if done >= 2:
                return {"role": "assistant", "content": "done"}, "stop"
            name = body["tools"][0]["function"]["name"]
            arguments = json.dumps({"task": f"{done} {TASK}"})
            message["tool_calls"][0]["function"] = {"name": name, "arguments": arguments}
            return message, why
        asked = sum(f" {TASK}" in text for text in texts)
        return (message, why) if done < asked else ({"role": "assistant", "content": "found"}, "stop")


def delegated(
    *,
    streams: bool,
    module: Any = None,
    team: bool = False,
    helper: dict[str, Any] | Callable[[AgentServer], dict[str, Any]] | None = None,
    backend: Any = None,
) -> tuple[AgentServer, Any]:
    """The boss's run; the server, and its tool."""

    async def main() -> tuple[AgentServer, Any]:
        with serving(Boss()) as server:

            def look(number: int) -> str:
                """Look at something."""
                return f"{number} {OUTPUT}"

            sub = AssistantAgent(
                "helper",
                client_of(server),
                tools=[look],
                system_message="HELPER " * 40,
                description="Helps.",
                max_tool_iterations=10,
                **((helper(server) if callable(helper) else helper) or {}),
            )
            if team:
                chat = RoundRobinGroupChat([sub], termination_condition=MaxMessageTermination(2))
                tool: Any = (module or TeamTool)(chat, "helpers", "They help.", True)
            else:
                more = {} if backend is None else {"backend": backend(server.url, "m")}
                tool = (module or AgentTool)(sub, True, **more)
            waited = _waiting(tool, streams=streams) if module is None else tool
            boss = AssistantAgent(
                "boss",
                client_of(server, parallel_tool_calls=False),
                tools=[waited],
                system_message="BOSS",
                max_tool_iterations=10,
                model_client_stream=streams,
            )
            await boss.run(task="the task")
            return server, tool

    return asyncio.run(main())


def _waiting(tool: Any, *, streams: bool) -> Any:
    """A tool that takes long enough for what was written to be warmed, on whatever machine this is."""
    run = tool.run_json_stream

    async def late(args: Any, *more: Any, **given: Any) -> Any:
        opened = [one for one in tool._work.opened if one.waits]
        for _ in range(3000):
            warm = [one.delegation.warmed_text if streams else one.delegation.prefilled_tokens for one in opened]
            if all(found > (len(TASK) // 2 if streams else 0) for found in warm):
                break
            await asyncio.sleep(0.01)
        async for event in run(args, *more, **given):
            yield event

    tool.run_json_stream = late
    return tool


def firsts(server: AgentServer) -> list[dict[str, Any]]:
    """The sub-agent's first calls."""
    return [
        b
        for b in server.main
        if b["messages"][0]["content"].startswith("HELPER") and b["messages"][-1]["role"] == "user"
    ]


def warm_text(server: AgentServer, body: dict[str, Any]) -> int:
    """How many characters of the task were prefilled, with all before it, when the sub-agent started; -1: nothing."""
    before = server.bodies[: next(i for i, b in enumerate(server.bodies) if b is body)]
    found = -1
    for one in before:
        if kind_of(one) != "prefill" or one.get("tools") != body.get("tools"):
            continue
        head, last = body["messages"][:-1], body["messages"][-1]["content"]
        if one["messages"][: len(head)] != head:
            continue
        # Where no message of the user's is known a full stop stands in for it.
        rest = [m for m in one["messages"][len(head) :] if m["content"] != "."]
        if not rest or (len(rest) == 1 and last.startswith(rest[0]["content"])):
            found = max(found, len(rest[0]["content"]) if rest else 0)
    return found


@pytest.mark.parametrize("team", [False, True])
def test_the_task_is_warm_as_it_is_written(team: bool) -> None:
    server, tool = delegated(streams=True, team=team)
    started = firsts(server)
    assert len(started) == 2
    # The end is not there before the call is; of a team that has run nobody knows who speaks first.
    assert warm_text(server, started[0]) >= len(TASK) // 2
    assert team or warm_text(server, started[1]) >= len(TASK) // 2
    assert tool.ledger.snapshot().commits >= 1
    assert tool.ledger.snapshot().mispredictions == 0


def test_without_a_stream_all_but_the_task_is_warm() -> None:
    server, tool = delegated(streams=False)
    started = firsts(server)
    assert [warm_text(server, body) for body in started] == [0, 0]
    # What it remembers of the first task is warm for the second.
    assert len(started[1]["messages"]) > 4
    assert tool.ledger.snapshot().mispredictions == 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("team", [False, True])
def test_the_requests_are_the_built_ins(streams: bool, team: bool) -> None:
    mine, _ = delegated(streams=streams, team=team)
    theirs, _ = delegated(streams=streams, team=team, module=built_in.TeamTool if team else built_in.AgentTool)
    assert mine.main == theirs.main
    assert theirs.prefills == []


@pytest.mark.parametrize("streams", [False, True])
def test_a_sub_agent_with_a_context_of_ours_goes_on(streams: bool) -> None:
    server, _ = delegated(streams=streams, helper={"model_context": BufferedChatCompletionContext(3)})
    assert warm_text(server, firsts(server)[0]) >= 0
    assert len(firsts(server)) == 2


class Marked(OpenAIBackend):
    """Marks each call with its conversation."""

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        super().route(conversation, stream)
        return {"extra_body": {"user": conversation}}


@pytest.mark.parametrize("kind", ["window", "strategy"])
def test_a_sub_agents_later_calls_go_to_where_the_first_went(kind: str) -> None:
    """On a server with slots that is where its prompt is."""

    backends: list[OpenAIBackend] = []

    def marked(*given: Any) -> OpenAIBackend:
        backends.append(Marked(*given))
        return backends[-1]

    def make(server: AgentServer) -> dict[str, Any]:
        backend = marked(server.url, "m")
        context: Any = (
            BufferedChatCompletionContext(30, backend=backend)
            if kind == "window"
            else LookaheadChatCompletionContext(lambda: KeepRecent(10, at_turns=20), backend=backend)
        )
        return {"model_context": context}

    server, _ = delegated(streams=True, helper=make, backend=marked)
    for backend in backends:
        asyncio.run(backend.aclose())
    own = [b for b in server.main if b["messages"][0]["content"].startswith("HELPER")]
    # The second task finds what the first left, where the first was.
    assert len(own) == 4
    assert len({b["user"] for b in own[:2]}) == 1
    assert all(b["user"] for b in own)


def test_a_sub_agent_whose_first_call_only_its_run_can_tell_starts_cold() -> None:
    server, tool = delegated(streams=True, helper={"memory": [ListMemory()]})
    assert server.prefills == []
    assert tool.ledger.snapshot().mispredictions == 0


def test_a_tools_schema_is_plain_data() -> None:
    """It goes through whatever writes data."""
    agent = AssistantAgent("helper", client_of(AgentServer(url="http://127.0.0.1:9/v1")))
    mine, theirs = AgentTool(agent), built_in.AgentTool(agent)
    assert mine.schema == theirs.schema
    assert type(mine.schema["parameters"]) is dict  # type: ignore[typeddict-item]


def test_dumped_tools_are_ours_again() -> None:
    server = AgentServer(url="http://127.0.0.1:9/v1")
    agent = AssistantAgent("helper", client_of(server))
    team = RoundRobinGroupChat([AssistantAgent("other", client_of(server))])
    made: list[tuple[Any, Any]] = [
        (AgentTool(agent, warm=False), AgentTool),
        (TeamTool(team, "t", "d", True, warm=False), TeamTool),
    ]
    for tool, kind in made:
        dumped = tool.dump_component()
        loaded: Any = kind.load_component(json.loads(dumped.model_dump_json()))
        assert type(loaded) is kind
        assert loaded.dump_component().model_dump_json() == dumped.model_dump_json()
        assert loaded.schema == tool.schema
