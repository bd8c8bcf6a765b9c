"""Contexts with a strategy: what is sent is its view, what is kept is everything."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core import model_context as built_in
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import AssistantMessage, FunctionExecutionResultMessage, UserMessage
from autogen_core.tools import FunctionTool

import smoothagent_autogen as ours
from ag import (
    OUTPUT,
    calls,
    client_of,
    conversation,
    looking,
    played,
    results,
    settled,
    streamable,
    user,
    warmed_before,
)
from agent_server import AgentServer, serving
from smoothagent import ConfigurationError, KeepRecent, OffloadStore
from smoothagent.store import parse_reference


def orphans(body: dict[str, Any]) -> set[str]:
    asked = {c["id"] for m in body["messages"] for c in m.get("tool_calls") or ()}
    return asked ^ {m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_summary_takes_the_place_of_what_is_old(streams: bool) -> None:
    context = ours.SummarizingChatCompletionContext(900, keep=300)
    server, _ = played(context, turns=30, model_client_stream=streams)
    assert context.last_commit is not None
    assert context.last_commit.kind == "lookahead"
    summarized = [b for b in server.main if any("SUMMARY" in str(m["content"]) for m in b["messages"])]
    assert len(summarized) >= 10
    assert not any(orphans(b) for b in server.main)
    # Nothing is lost: whatever is not in the first summarized request's summary is in it as it was.
    first = summarized[0]
    before = server.main[server.main.index(first) - 1]
    kept = [m for m in first["messages"] if m["role"] == "tool"]
    assert kept[:-1] == [m for m in before["messages"] if m["role"] == "tool"][-len(kept[:-1]) :]
    # The turn it came with found all but the newest result in the cache.
    assert warmed_before(server, first) >= len(first["messages"]) - 1
    assert len(context._messages) >= 61  # pyright: ignore[reportPrivateUsage]


def test_a_summary_is_a_users_message_with_a_constant_source() -> None:
    context = ours.SummarizingChatCompletionContext(900, keep=300)

    async def main() -> None:
        with serving(streamable(AgentServer(turns=20))) as server:
            agent = AssistantAgent(
                "agent",
                client_of(server, include_name_in_message=True),
                tools=[looking(context)],
                model_context=context,
                max_tool_iterations=100,
            )
            await agent.run(task="the task")
            sent = [m for b in server.main for m in b["messages"] if "SUMMARY" in str(m["content"])]
            assert sent
            assert {(m["role"], m["name"]) for m in sent} == {("user", "summary")}
        view = await context.get_messages()
        stored = {id(m) for m in context._messages}  # pyright: ignore[reportPrivateUsage]
        news = [m for m in view if id(m) not in stored]
        assert [type(m) for m in news] == [UserMessage]

    asyncio.run(main())


def test_offloaded_results_are_read_back(tmp_path: Path) -> None:
    store = OffloadStore(tmp_path)
    context = ours.OffloadingChatCompletionContext(900, keep=2, store=store)
    server, _ = played(context, turns=20, tools=[context.read_tool()])
    assert context.last_commit is not None
    last = server.main[-1]["messages"]
    outputs = [m["content"] for m in last if m["role"] == "tool"]
    assert len(outputs) == 20
    assert sum(OUTPUT in text for text in outputs) < 20
    assert all(OUTPUT in text for text in outputs[-2:])

    async def read() -> str:
        reference = next(text for text in outputs if OUTPUT not in text)
        found = parse_reference(reference)
        assert found is not None
        tool: FunctionTool = context.read_tool()
        return str(await tool.run_json({"ref": found}, CancellationToken()))

    assert OUTPUT in asyncio.run(read())


def test_offloading_asks_for_the_tool(tmp_path: Path) -> None:
    context = ours.OffloadingChatCompletionContext(900, store=str(tmp_path))
    with pytest.raises(ConfigurationError, match="read_offloaded"):
        played(context, turns=20)


def test_parallel_results_stay_in_one_message() -> None:
    async def main() -> None:
        context = ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4))
        with serving(AgentServer()) as server:
            client = client_of(server)
            await context.add_message(user("the task"))
            for number in range(8):
                view = await context.get_messages()
                await client.create(view)
                ids = [f"{number}-{i}" for i in range(3)]
                await context.add_message(calls(*ids))
                await settled(context)
                await context.add_message(results(*ids))
            view = await context.get_messages()
            whole = [m for m in view if isinstance(m, FunctionExecutionResultMessage)]
            stored = {id(m) for m in context._messages}  # pyright: ignore[reportPrivateUsage]
            assert whole
            assert all(id(m) in stored and len(m.content) == 3 for m in whole)
            assert len(view) < len(context._messages)  # pyright: ignore[reportPrivateUsage]

    asyncio.run(main())


def test_calls_that_all_have_one_id_stay_apart() -> None:
    """As a client gives them that does not count."""

    async def main() -> None:
        context = ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4))
        with serving(AgentServer()) as server:
            client = client_of(server)
            await context.add_message(user("the task"))
            for number in range(9):
                await client.create(await context.get_messages())
                ids = ["0"] * (1 + number % 2)
                await context.add_message(calls(*ids))
                await settled(context)
                await context.add_message(results(*ids))
            view = await context.get_messages()
            stored = {id(m) for m in context._messages}  # pyright: ignore[reportPrivateUsage]
            assert all(id(m) in stored for m in view)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["summarizing", "offloading"])
def test_a_pickle_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    context: Any = (
        ours.SummarizingChatCompletionContext(900, keep=300)
        if kind == "summarizing"
        else ours.OffloadingChatCompletionContext(900, keep=2, store=str(tmp_path), allow_unreadable=True)
    )
    played(context, turns=20)
    again = pickle.loads(pickle.dumps(context))
    assert type(again) is type(context)
    assert asyncio.run(again.get_messages()) == asyncio.run(context.get_messages())
    with pytest.raises(TypeError, match="strategy"):
        pickle.dumps(ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4)))


def test_a_copy_goes_on_where_it_was() -> None:
    context = ours.SummarizingChatCompletionContext(900, keep=300)
    played(context, turns=20)
    copied = copy.deepcopy(context)
    assert asyncio.run(copied.get_messages()) == asyncio.run(context.get_messages())
    assert len(asyncio.run(copied.get_messages())) < 41


def test_a_reflection_does_not_commit() -> None:
    """What was prepared has tools; without them nothing of it is found."""
    context = ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4))
    server, _ = played(context, turns=100, tasks=12, max_tool_iterations=1, reflect_on_tool_use=True)
    shorter = [
        (bool(b.get("tools")), len(b["messages"]) < len(a["messages"]))
        for a, b in zip(server.main, server.main[1:], strict=False)
    ]
    assert any(shrunk for tools, shrunk in shorter if tools)
    assert not any(shrunk for tools, shrunk in shorter if not tools)
    assert not any(orphans(b) for b in server.main)


def test_a_failing_lookahead_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    context = ours.SummarizingChatCompletionContext(900, keep=300)

    async def main() -> None:
        with serving(streamable(AgentServer(turns=30, fail=[500, 503, 400, 500] * 200))) as server:
            agent = AssistantAgent(
                "agent", client_of(server), tools=[looking(context)], model_context=context, max_tool_iterations=100
            )
            result = await agent.run(task="the task")
            assert "done" in str(result.messages[-1])
            assert [len(b["messages"]) for b in server.main] == [2 * n + 2 for n in range(31)]

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())


def test_a_saved_state_goes_on_where_it_was_and_is_read_by_the_built_in() -> None:
    context = ours.SummarizingChatCompletionContext(900, keep=300)
    played(context, turns=20)

    async def main() -> None:
        saved = json.loads(json.dumps(await context.save_state()))
        view = await context.get_messages()
        other = ours.SummarizingChatCompletionContext(900, keep=300)
        await other.load_state(saved)
        again = await other.get_messages()
        assert again == view
        assert len(again) < len(other._messages)  # pyright: ignore[reportPrivateUsage]
        plain = built_in.UnboundedChatCompletionContext()
        await plain.load_state(saved)
        assert await plain.get_messages() == context._messages  # pyright: ignore[reportPrivateUsage]
        await other.load_state(await plain.save_state())
        assert await other.get_messages() == context._messages  # pyright: ignore[reportPrivateUsage]
        await other.clear()
        assert await other.get_messages() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "saved", [{"record": {"kind": "?"}}, {"record": {}}, {"record": {"covered": "x"}}, {"record": "what?"}, "what?", {}]
)
def test_a_spoilt_record_is_forgotten(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        context = ours.SummarizingChatCompletionContext(900, keep=300)
        plain = built_in.UnboundedChatCompletionContext(conversation(3))
        state = {**await plain.save_state(), "smoothagent": saved}
        await context.load_state(state)
        assert await context.get_messages() == conversation(3)

    asyncio.run(main())
    assert "forgotten" in caplog.text


def test_dumped_components_are_ours_again(tmp_path: Path) -> None:
    for context in (
        ours.SummarizingChatCompletionContext(900, keep=300, warm=False, question="What?"),
        ours.OffloadingChatCompletionContext(900, store=str(tmp_path), keep=4),
    ):
        dumped = context.dump_component()
        loaded: Any = ChatCompletionContext.load_component(json.loads(dumped.model_dump_json()))
        assert type(loaded) is type(context)
        assert loaded.dump_component() == dumped


def test_a_strategy_is_made_anew_for_each_history() -> None:
    with pytest.raises(ConfigurationError, match="factory"):
        ours.LookaheadChatCompletionContext(KeepRecent(2, at_turns=4))  # type: ignore[arg-type]


def test_without_lookahead_it_is_transformed_when_it_is_due() -> None:
    context = ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4), lookahead=False)
    server, _ = played(context)
    assert server.prefills == []
    assert context.last_commit is not None
    assert context.last_commit.kind == "sync"


def test_messages_added_while_a_summary_is_written_are_kept() -> None:
    async def main() -> None:
        context = ours.SummarizingChatCompletionContext(700, keep=200)
        with serving(streamable(AgentServer(hold_from=1))) as server:
            client = client_of(server)
            await context.add_message(user("the task"))
            for number in range(12):
                view = await context.get_messages()
                assert view[-1] is context._messages[-1]  # pyright: ignore[reportPrivateUsage]
                await client.create(view)
                await context.add_message(calls(f"c{number}"))
                await context.add_message(results(f"c{number}"))
                if number >= 6:
                    server.released.set()
                    await settled(context)
            view = await context.get_messages()
            stored = {id(m) for m in context._messages}  # pyright: ignore[reportPrivateUsage]
            kept = [m for m in view if id(m) in stored]
            # The task stays, and all that was not summarized.
            assert kept[0] is context._messages[0]  # pyright: ignore[reportPrivateUsage]
            assert isinstance(kept[1], AssistantMessage)
            assert kept[1:] == context._messages[1 - len(kept) :]  # pyright: ignore[reportPrivateUsage]
            assert context.last_commit is not None

    asyncio.run(main())
