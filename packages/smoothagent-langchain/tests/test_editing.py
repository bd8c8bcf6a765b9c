"""The drop-in for LangChain's `ContextEditingMiddleware`: the built-in's requests, and they are warm."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from langchain.agents.middleware import ContextEditingMiddleware as BuiltIn
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage

from smoothagent_langchain import ClearToolUsesEdit, ContextEditingMiddleware
from test_summarization import played
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


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", EDITS)
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
    for i in changed[1:]:
        assert warmed_before(mine, mine.main[i]) >= len(mine.main[i]["messages"]) - 1, i


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
    from langchain.agents.middleware.types import ModelRequest

    request: Any = ModelRequest(model=None, messages=[])  # pyright: ignore[reportArgumentType]
    assert ContextEditingMiddleware().wrap_model_call(request, lambda r: r) is request  # pyright: ignore[reportArgumentType]


def test_the_messages_given_are_not_touched() -> None:
    given: list[Any] = [HumanMessage("task")]
    edits = [Shorten(1)]
    server, state = played(lambda model: [ContextEditingMiddleware(edits=edits)], turns=TURNS)
    assert all(len(str(m.content)) > 400 for m in state if isinstance(m, ToolMessage))
    assert given[0].content == "task"
    assert server.main
