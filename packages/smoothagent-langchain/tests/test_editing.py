"""The drop-in for LangChain's `ContextEditingMiddleware`: the built-in's requests, and they are warm."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain.agents.middleware import ContextEditingMiddleware as BuiltIn
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

from agent_server import AgentServer, serving
from examples import examples
from smoothagent_langchain import ClearToolUsesEdit, ContextEditingMiddleware
from test_summarization import CONFIG, model_of, played, tool_of, watched
from test_views import warmed_before

TURNS = 14


@dataclass
class Shorten:
    """An edit of a user's own, which changes messages in place, as an edit may."""

    longest: int = 60

    def apply(self, messages: list[AnyMessage], *, count_tokens: Callable[[Sequence[Any]], int]) -> None:
        for message in messages[:-2]:
            if isinstance(message, ToolMessage) and count_tokens(messages) > 600:
                message.content = str(message.content)[: self.longest]


@dataclass
class DropFirst:
    """One that removes messages."""

    def apply(self, messages: list[AnyMessage], *, count_tokens: Callable[[Sequence[Any]], int]) -> None:
        if count_tokens(messages) > 600:
            del messages[0]


EDITS: dict[str, Callable[[], list[Any]]] = {
    "one output stays": lambda: [ClearToolUsesEdit(trigger=600, keep=1)],
    "three stay": lambda: [ClearToolUsesEdit(trigger=900)],
    "none stays": lambda: [ClearToolUsesEdit(trigger=600, keep=0)],
    "inputs go too": lambda: [ClearToolUsesEdit(trigger=600, keep=2, clear_tool_inputs=True, placeholder="gone")],
    "a few at a time": lambda: [ClearToolUsesEdit(trigger=600, keep=1, clear_at_least=300)],
    "two edits": lambda: [
        ClearToolUsesEdit(trigger=600, keep=4),
        ClearToolUsesEdit(trigger=900, keep=2, placeholder=""),
    ],
    "an edit of the user's": lambda: [Shorten()],
}

CHANGES = {"none stays": 1, "a few at a time": 1}
"""Requests that do not begin with the one before them, where those are few: what has come is cleared at once, or the
oldest outputs are enough."""


@pytest.mark.parametrize(("name", "asynchronous"), [*((name, False) for name in EDITS), ("three stay", True)])
def test_every_request_is_the_built_ins_and_nothing_but_the_newest_result_is_cold(
    name: str, asynchronous: bool
) -> None:
    mine, state = played(
        lambda model: [ContextEditingMiddleware(edits=EDITS[name]())], turns=TURNS, asynchronous=asynchronous
    )
    theirs, expected = played(lambda model: [BuiltIn(edits=EDITS[name]())], turns=TURNS, asynchronous=asynchronous)
    assert mine.main == theirs.main
    assert [m.content for m in state] == [m.content for m in expected], "the state keeps all"
    changed = [i for i in range(2, len(mine.main)) if not is_extended(mine.main[i - 1], mine.main[i])]
    assert len(changed) >= CHANGES.get(name, 4)
    cold = [i for i in changed[1:] if warmed_before(mine, mine.main[i]) < len(mine.main[i]["messages"]) - 1]
    # When a second edit begins is estimated by what the first one leaves.
    assert len(cold) <= (name == "two edits"), cold


def is_extended(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a request begins with all of the one before it."""
    return after["messages"][: len(before["messages"])] == before["messages"]


def test_edits_that_remove_messages_are_made_and_nothing_is_prepared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mine, _ = played(lambda model: [ContextEditingMiddleware(edits=[DropFirst()])], turns=TURNS)
    theirs, _ = played(lambda model: [BuiltIn(edits=[DropFirst()])], turns=TURNS)
    assert mine.main == theirs.main
    assert not mine.prefills
    assert "DropFirst" in caplog.text


def test_below_the_trigger_nothing_is_changed_and_nothing_is_done() -> None:
    server, _ = played(lambda model: [ContextEditingMiddleware()], turns=6)
    assert all(is_extended(a, b) for a, b in zip(server.main, server.main[1:], strict=False))
    assert not server.prefills


def test_an_empty_history_is_passed_on() -> None:
    request: Any = ModelRequest(model=None, messages=[])  # pyright: ignore[reportArgumentType]
    assert ContextEditingMiddleware().wrap_model_call(request, lambda r: r) is request  # pyright: ignore[reportArgumentType]


@dataclass
class Sticky:
    """An edit with a memory: what it has cleared once stays cleared."""

    cleared: set[str] = field(default_factory=set[str])
    calls: int = 0

    def apply(self, messages: list[AnyMessage], *, count_tokens: Callable[[Sequence[Any]], int]) -> None:
        self.calls += 1
        results = [m for m in messages if isinstance(m, ToolMessage)]
        if count_tokens(messages) > 700:
            self.cleared |= {m.tool_call_id for m in results[:-3]}
        for i, message in enumerate(messages):
            if isinstance(message, ToolMessage) and message.tool_call_id in self.cleared:
                messages[i] = message.model_copy(update={"content": "cleared"})


def test_an_edit_with_a_memory_is_asked_as_often_and_of_the_same_as_by_the_built_in() -> None:
    mine, theirs = Sticky(), Sticky()
    ours, _ = played(lambda model: [ContextEditingMiddleware(edits=[mine])], turns=TURNS)
    expected, _ = played(lambda model: [BuiltIn(edits=[theirs])], turns=TURNS)
    assert ours.main == expected.main
    assert mine == theirs


class Reminds(AgentMiddleware[Any, Any, Any]):
    """Writes into the messages it is given, and adds a system prompt."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        request.messages[-1].content += " (be brief)"
        return handler(request.override(system_message=SystemMessage("You are careful.")))


@pytest.mark.parametrize("leading", [[], [SystemMessage("One."), SystemMessage("Two.")]])
def test_system_text_anywhere_and_middleware_that_writes_into_messages(leading: list[Any]) -> None:
    edits = [ClearToolUsesEdit(trigger=600, keep=2)]
    mine, theirs = (started([make(edits=edits), Reminds()], leading) for make in (ContextEditingMiddleware, BuiltIn))
    assert mine[0].main == theirs[0].main
    assert [m.content for m in mine[1]] == [m.content for m in theirs[1]], "the state is not written into"
    cleared = [sum(m["content"] == "[cleared]" for m in b["messages"]) for b in mine[0].main]
    changed = [i for i in range(1, len(cleared)) if cleared[i] > cleared[i - 1]]
    assert len(changed) >= 4
    first = next(i for i, b in enumerate(mine[0].bodies) if any(b is p for p in mine[0].prefills))
    assert first >= 3, "nothing is warmed far from the trigger"
    for i in changed:
        # The last message is rewritten on each call.
        assert warmed_before(mine[0], mine[0].main[i]) >= len(mine[0].main[i]["messages"]) - 1, i


def started(middleware: list[Any], leading: list[Any]) -> tuple[AgentServer, list[AnyMessage]]:
    """An agent without a system prompt of its own, run once."""
    with serving(AgentServer(turns=TURNS)) as server:
        agent: Any = create_agent(
            model_of(server), [tool_of(server)], middleware=watched(server, middleware), checkpointer=InMemorySaver()
        )
        out = agent.invoke({"messages": [*leading, HumanMessage("the task")]}, CONFIG)
        server.idle()
        return server, out["messages"]


TEXT = st.text("ab \n", max_size=12)


@st.composite
def histories(draw: st.DrawFn) -> list[AnyMessage]:
    """Calls, parallel ones too, results of calls and of none, in any order; contents of text and of parts."""
    out: list[AnyMessage] = [SystemMessage("s", id=f"s{i}") for i in range(draw(st.integers(0, 2)))]
    for i in range(draw(st.integers(1, 10))):
        content: Any = draw(st.one_of(TEXT, st.builds(lambda t: [{"type": "text", "text": t}], TEXT)))
        match draw(st.integers(0, 3)):
            case 0:
                out.append(HumanMessage(content, id=f"h{i}"))
            case 1:
                names = draw(st.lists(st.sampled_from("fg"), max_size=3))
                calls: list[Any] = [{"id": f"c{k}", "name": n, "args": {"x": i}} for k, n in enumerate(names)]
                out.append(AIMessage(content, tool_calls=calls, id=f"a{i}"))
            case _:
                made = ToolMessage(content, tool_call_id=f"c{draw(st.integers(0, 3))}", id=f"t{i}", artifact={"a": 1})
                out.append(made)
    return out


@examples(60)
@given(
    history=histories(),
    trigger=st.integers(0, 40),
    keep=st.integers(0, 3),
    at_least=st.sampled_from([0, 5]),
    inputs=st.booleans(),
)
def test_whatever_the_history_the_request_is_the_built_ins(
    history: list[AnyMessage], trigger: int, keep: int, at_least: int, inputs: bool
) -> None:
    edits = [
        ClearToolUsesEdit(trigger, clear_at_least=at_least, keep=keep, clear_tool_inputs=inputs, exclude_tools=["g"])
    ]
    before = [m.model_copy(deep=True) for m in history]
    mine, theirs = ContextEditingMiddleware(edits=edits, warm=False), BuiltIn(edits=edits)
    sent: list[list[Any]] = []

    def handler(request: Any) -> Any:
        sent.append(list(request.messages))
        return ModelResponse(result=[AIMessage("ok", id="answer")])

    model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("x"), max_retries=0)
    for middleware in (mine, theirs):
        request: Any = ModelRequest(model=model, messages=list(history), state={"messages": list(history)})
        middleware.wrap_model_call(request, handler)
    assert sent[0] == sent[1]
    assert history == before
    mine.threads.pool.close()
