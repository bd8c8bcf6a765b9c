"""Middleware that shortens what the model sees: offloading and windows, on a real HTTP server."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from agent_server import AgentServer, serving
from smoothagent import ConfigurationError, OffloadStore, OpenAIBackend, Stream
from smoothagent_langchain import KeepRecentMiddleware, OffloadMiddleware, SlidingWindowMiddleware
from test_summarization import CONFIG, OUTPUT, model_of, played, tool_of


def turns_of(body: dict[str, Any]) -> int:
    return sum(m["role"] == "assistant" for m in body["messages"])


def warmed_before(server: AgentServer, body: dict[str, Any]) -> int:
    """How many of a request's messages the last prefill before it had warmed."""
    before = server.bodies[: next(i for i, b in enumerate(server.bodies) if b is body)]
    prefills = [b for b in before if any(b is p for p in server.prefills)]
    sent, warmed = body["messages"], prefills[-1]["messages"] if prefills else []
    return next((i for i, (a, b) in enumerate(zip(sent, warmed, strict=False)) if a != b), min(len(sent), len(warmed)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_recent_sends_the_newest_turns_and_they_are_warm(asynchronous: bool) -> None:
    server, messages = played(lambda model: [KeepRecentMiddleware(3, at_turns=6)], turns=20, asynchronous=asynchronous)
    assert len(messages) == 2 + 2 * 20, "the state keeps all"
    counts = [turns_of(b) for b in server.main]
    cuts = [i for i in range(1, len(counts)) if counts[i] < counts[i - 1]]
    assert len(cuts) >= 4
    assert max(counts) <= 6
    for i in cuts[1:]:
        body = server.main[i]
        assert [m["role"] for m in body["messages"][:2]] == ["system", "user"]
        assert warmed_before(server, body) >= len(body["messages"]) - 1


def test_a_sliding_window_moves_on_every_turn_and_is_warm() -> None:
    server, _ = played(lambda model: [SlidingWindowMiddleware(4)], turns=16)
    assert [turns_of(b) for b in server.main][5:] == [4] * 12
    for body in server.main[8:]:
        assert warmed_before(server, body) >= len(body["messages"]) - 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_offloaded_outputs_come_back_byte_for_byte(tmp_path: Path, asynchronous: bool) -> None:
    store = OffloadStore(tmp_path)
    made = OffloadMiddleware(1200, keep=2, store=store, min_chars=100)
    server, messages = played(lambda model: [made], turns=16, asynchronous=asynchronous)
    results = [m for m in messages if isinstance(m, ToolMessage)]
    assert all(str(m.content).endswith(OUTPUT) for m in results), "the state keeps them"
    sent = [m for m in server.main[-1]["messages"] if m["role"] == "tool"]
    offloaded = [(m, r) for m, r in zip(sent, results, strict=True) if m["content"] != r.content]
    assert len(offloaded) >= 5
    [read] = made.tools
    for message, result in offloaded:
        page = read.invoke({"ref": message["content"]})
        assert page.partition("\n")[2] == result.content
    assert {t["function"]["name"] for t in server.main[0]["tools"]} == {"look", "read_offloaded"}


def test_impossible_limits_are_refused_where_they_are_given() -> None:
    with pytest.raises(ConfigurationError, match="at_turns must exceed turns"):
        KeepRecentMiddleware(5, at_turns=5)
    with pytest.raises(ConfigurationError, match="pass exactly one"):
        SlidingWindowMiddleware()
    with pytest.raises(ConfigurationError, match="hard must be positive"):
        OffloadMiddleware(0)


def test_another_process_goes_on_from_the_checkpoint() -> None:
    """It has the state and nothing else."""
    saver = InMemorySaver()
    with serving(AgentServer()) as server:

        def look(number: int) -> str:
            """Look at something."""
            return f"{number} {OUTPUT}"

        for run in range(3):
            agent = create_agent(
                model_of(server), [look], system_prompt="S", middleware=[SlidingWindowMiddleware(4)], checkpointer=saver
            )
            server.turns = len(server.main) + 7
            agent.invoke({"messages": [HumanMessage(f"task {run}")]}, CONFIG)
        late = server.main[-1]["messages"]
        assert turns_of(server.main[-1]) <= 4
        assert "task 2" in [m["content"] for m in late], "the latest user message stays"


def test_a_backend_of_ones_own_is_used_for_its_own_server_only() -> None:
    """An outer middleware may call another model: its server must not be told of slots that it does not have."""

    class Marked(OpenAIBackend):
        def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
            super().route(conversation, stream)
            return {"extra_body": {"id_slot": 7}}

    class Elsewhere(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            hard = sum(m.type == "ai" for m in request.messages) % 3 == 2
            return handler(request.override(model=other_model) if hard else request)

    with serving(AgentServer(turns=9)) as server, serving(AgentServer(turns=9)) as other:
        backend, other_model = Marked(server.url, "m"), model_of(other)
        middleware = KeepRecentMiddleware(2, at_turns=4, backend=backend)
        agent: Any = create_agent(
            model_of(server), [tool_of(server)], middleware=[Elsewhere(), middleware], checkpointer=InMemorySaver()
        )
        agent.invoke({"messages": [HumanMessage("the task")]}, CONFIG)
        middleware.threads.pool.close()
        asyncio.run(backend.aclose())
    assert server.main
    assert all(b["id_slot"] == 7 for b in server.main)
    assert other.main
    assert not any("id_slot" in b for b in other.main)
    with pytest.raises(ConfigurationError, match="warm=False with backend"):
        KeepRecentMiddleware(2, at_turns=4, backend=backend, warm=False)
