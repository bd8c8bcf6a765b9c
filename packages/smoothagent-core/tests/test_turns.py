"""Safe cuts: no call is split from its results, whatever the order, the ids and what waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent import Message, ToolCall
from smoothagent.message import leading_system
from smoothagent.turns import answers, last_safe_cut, pending, safe_cuts, turn_starts

SYSTEM, USER = Message("system", "s"), Message("user", "u")


def asks(*ids: str) -> Message:
    return Message("assistant", None, tuple(ToolCall(i, "f", "{}") for i in ids))


def result(call: str) -> Message:
    return Message("tool", "r", tool_call_id=call)


def says(text: str = "a") -> Message:
    return Message("assistant", text)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Calls whose results come in any order, between other messages, with ids that repeat, some never."""
    history = [SYSTEM] * draw(st.integers(0, 2))
    waiting: list[str] = []
    for _ in range(draw(st.integers(0, 14))):
        match draw(st.integers(0, 5)):
            case 0:
                history.append(USER)
            case 1:
                history.append(says())
            case 2:
                ids = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
                history.append(asks(*ids))
                waiting += ids
            case 3:
                history.append(SYSTEM)
            case _ if waiting:
                call = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
                history.append(result(call))
            case _:
                pass
    return history


def separated(history: list[Message], cut: int) -> bool:
    """Naively: something before the cut and something after it belong together."""
    for i, link in enumerate(answers(history)):
        if link is not None and link[0] < cut <= i:
            return True
    answered = {link for link in answers(history) if link is not None}
    calls = {(i, k) for i in range(cut) for k in range(len(history[i].tool_calls))}
    return bool(calls - answered)


@given(histories())
def test_safe_cuts_are_exactly_those_that_separate_nothing(history: list[Message]) -> None:
    lead = leading_system(history)
    expected = [c for c in range(lead, len(history) + 1) if not separated(history, c)]
    assert safe_cuts(history) == expected


@given(histories())
def test_every_result_answers_the_nearest_open_call_with_its_id(history: list[Message]) -> None:
    links = answers(history)
    taken = [link for link in links if link is not None]
    assert len(taken) == len(set(taken))
    for i, link in enumerate(links):
        if history[i].role != "tool":
            assert link is None
        elif link is not None:
            assert link[0] < i
            assert history[link[0]].tool_calls[link[1]].id == history[i].tool_call_id
    calls = sum(len(m.tool_calls) for m in history)
    assert pending(history) == calls - len(taken)


@given(histories(), st.integers(0, 20))
def test_the_last_safe_cut_is_at_or_before_the_limit(history: list[Message], limit: int) -> None:
    cuts = safe_cuts(history)
    below = [c for c in cuts if c <= limit]
    assert last_safe_cut(cuts, limit) == (below[-1] if below else None)


def test_parallel_calls_and_all_their_results_move_together() -> None:
    """langmem#126."""
    history = [SYSTEM, USER, asks("a", "b", "c"), result("c"), result("a"), result("b"), says()]
    assert safe_cuts(history) == [1, 2, 6, 7]


def test_a_pending_call_keeps_every_later_cut_unsafe() -> None:
    """adk-python#4740: a call that waits for a human is left alone."""
    history = [USER, asks("a", "b"), result("a"), USER, says(), USER]
    assert safe_cuts(history) == [0, 1]
    assert pending(history) == 1


def test_an_id_used_again_answers_the_newer_call() -> None:
    history = [USER, asks("c1"), result("c1"), asks("c1"), result("c1")]
    assert answers(history) == [None, None, (1, 0), None, (3, 0)]
    assert safe_cuts(history) == [0, 1, 3, 5]


def test_an_id_used_twice_in_one_message_has_two_results() -> None:
    history = [asks("c", "c"), result("c"), result("c")]
    assert {link for link in answers(history) if link} == {(0, 0), (0, 1)}
    assert safe_cuts(history) == [0, 3]


def test_a_result_that_comes_after_other_messages_is_still_its_calls() -> None:
    history = [USER, asks("a"), USER, says(), result("a"), says()]
    assert safe_cuts(history) == [0, 1, 5, 6]


@pytest.mark.parametrize("roles", [[], ["system"], ["system", "developer"], ["developer"] * 3])
def test_leading_system_messages_are_never_cut(roles: list[str]) -> None:
    history = [*(Message(r, "s") for r in roles), USER, says(), SYSTEM, USER]
    assert safe_cuts(history)[0] == len(roles)
    assert leading_system(history) == len(roles)


def test_a_turn_begins_with_what_its_model_call_answers() -> None:
    history = [SYSTEM, USER, asks("a"), result("a"), asks("b"), result("b"), says(), USER, SYSTEM, says(), USER]
    assert turn_starts(history) == [1, 4, 6, 7, 10]


def test_no_messages_no_turns() -> None:
    assert turn_starts([]) == []
    assert turn_starts([SYSTEM]) == []
    assert safe_cuts([]) == [0]
    assert safe_cuts([SYSTEM]) == [1]


@given(histories())
def test_turn_starts_ascend_and_cover_everything(history: list[Message]) -> None:
    starts = turn_starts(history)
    lead = leading_system(history)
    assert starts == sorted(set(starts))
    assert (starts[0] == lead) if starts else lead == len(history)
    assert len([m for m in history[lead:] if m.role == "assistant"]) in (len(starts), len(starts) - 1)
