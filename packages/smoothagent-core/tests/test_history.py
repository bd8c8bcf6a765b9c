"""The chain digests exactly what counts, at the cost of what is new."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent import HistoryError, Message, OpenAICodec
from smoothagent.history import EMPTY, History

Native = dict[str, Any]


class Counter:
    """Counts characters, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, message: Message) -> int:
        self.asked += 1
        return len(message.text)


def history_of(natives: list[Any]) -> History[Any]:
    history: History[Any] = History(OpenAICodec(), Counter())
    history.update(natives)
    return history


def digest(natives: list[Any]) -> str:
    return history_of(natives).last_digest


def call(name: str, arguments: str, id: str) -> Native:  # noqa: A002 - the wire's own word
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TEXT = st.sampled_from(["", "a", "b", "ab", "\0", "\ud800"])


@st.composite
def histories(draw: st.DrawFn) -> list[Native]:
    natives: list[Native] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["user", "assistant", "calls"]))
        if kind != "calls":
            natives.append({"role": kind, "content": draw(TEXT)})
            continue
        count = draw(st.integers(1, 2))
        made = [
            call(draw(st.sampled_from("fg")), draw(st.sampled_from(["", "{}"])), f"i{len(natives)}.{k}")
            for k in range(count)
        ]
        natives.append({"role": "assistant", "content": None, "tool_calls": made})
        order = draw(st.permutations(made))
        natives += [{"role": "tool", "tool_call_id": c["id"], "content": draw(TEXT)} for c in order]
    return natives


def renamed(natives: list[Native]) -> list[Native]:
    """The same with other ids and metadata, as a framework mints them anew."""
    out = copy.deepcopy(natives)
    for i, native in enumerate(out):
        native["id"] = f"msg-{i}"
        native["usage"] = {"prompt_tokens": i}
        for c in native.get("tool_calls", []):
            c["id"] = "new-" + c["id"]
        if "tool_call_id" in native:
            native["tool_call_id"] = "new-" + native["tool_call_id"]
    return out


def content(natives: list[Native]) -> list[Any]:
    """What counts, naively: positions of calls instead of their ids."""
    where: dict[str, tuple[int, int]] = {}
    out: list[Any] = []
    for i, native in enumerate(natives):
        for k, c in enumerate(native.get("tool_calls", [])):
            where[c["id"]] = (i, k)
        functions = [c["function"] for c in native.get("tool_calls", [])]
        out.append([native["role"], native["content"], functions, where.get(native.get("tool_call_id", ""))])
    return out


@given(histories(), histories())
def test_digests_are_equal_exactly_where_the_content_is(left: list[Native], right: list[Native]) -> None:
    a, b = history_of(left), history_of(right)
    for n in range(max(len(left), len(right)) + 1):
        if n > min(len(left), len(right)):
            assert (a if len(left) < n else b).digest(n) is None
            continue
        assert (a.digest(n) == b.digest(n)) == (content(left[:n]) == content(right[:n]))


@given(histories())
def test_ids_and_metadata_do_not_count(natives: list[Native]) -> None:
    assert history_of(natives).digests() == history_of(renamed(natives)).digests()


def test_which_call_a_result_answers_counts() -> None:
    def answered(first: str, second: str) -> list[Native]:
        return [
            {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "a"), call("f", "{}", "b")]},
            {"role": "tool", "tool_call_id": first, "content": "same"},
            {"role": "tool", "tool_call_id": second, "content": "same"},
        ]

    assert digest(answered("a", "b")) != digest(answered("b", "a"))


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": None},
        {"role": "user", "content": "x", "name": "ann"},
    ],
)
def test_role_content_and_name_count(other: Native) -> None:
    assert digest([{"role": "user", "content": "x"}]) != digest([other])


def test_one_long_message_is_not_two_short_ones() -> None:
    assert digest([{"role": "user", "content": "ab"}]) != digest(
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )


@given(histories(), histories(), st.integers(0, 8))
def test_following_any_history_ends_where_a_fresh_one_does(
    first: list[Native], second: list[Native], keep: int
) -> None:
    """Extended, truncated, forked: the shared beginning is kept by identity, the rest is new."""
    keep = min(keep, len(first))
    while any(m["role"] == "tool" for m in first[keep : keep + 1]):
        keep += 1
    other = [*first[:keep], *renamed(second)]
    history = history_of(first)
    known = history.update(other)
    fresh = history_of(other)
    assert known >= keep
    assert history.digests() == fresh.digests()
    assert history.messages == fresh.messages
    assert (history.sizes, history.total, history.assistants) == (fresh.sizes, fresh.total, fresh.assistants)
    assert all(a is b for a, b in zip(history.natives, other, strict=True))
    # What comes next is linked to the right call.
    more = [{"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "z")]}]
    more.append({"role": "tool", "tool_call_id": "z", "content": "r"})
    history.update([*other, *more])
    assert history.last_digest == digest([*other, *more])


def test_each_message_is_counted_once() -> None:
    """deepagents#1530."""
    counter = Counter()
    history: History[Any] = History(OpenAICodec(), counter)
    natives: list[Native] = []
    for i in range(50):
        natives.append({"role": "user", "content": str(i)})
        assert history.update(natives) == i
        history.update(list(natives))
    assert counter.asked == 50


def test_an_object_changed_in_place_is_seen_by_verified_only() -> None:
    natives = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "ok"}]
    history = history_of(natives)
    old = history.last_digest
    natives[0]["content"] = "after"
    history.update(natives)
    assert history.last_digest == old
    fresh = history.verified(natives, Counter())
    assert fresh.last_digest == digest(natives) != old
    assert fresh.messages[0].content == "after"
    assert history.messages[0].content == "before"


def test_a_result_without_its_call_is_refused_with_a_remedy() -> None:
    with pytest.raises(HistoryError, match=r"message 1 is a tool result for call 'x'.*add the assistant message"):
        history_of([{"role": "user", "content": "u"}, {"role": "tool", "tool_call_id": "x", "content": "r"}])


def test_a_call_answered_twice_is_refused() -> None:
    natives = [{"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "x")]}]
    natives += [{"role": "tool", "tool_call_id": "x", "content": "r"}] * 2
    with pytest.raises(HistoryError, match="answered already"):
        history_of(natives)


def test_a_refused_history_leaves_what_was_before_it() -> None:
    good: list[Native] = [{"role": "user", "content": "u"}]
    history = history_of(good)
    with pytest.raises(HistoryError):
        history.update([*good, {"role": "tool", "tool_call_id": "x", "content": "r"}])
    history.update([*good, {"role": "user", "content": "v"}])
    assert history.last_digest == digest([*good, {"role": "user", "content": "v"}])


def test_the_empty_history() -> None:
    history = history_of([])
    assert (len(history), history.total, history.lead, history.digest(0), history.last_digest) == (
        0,
        0,
        0,
        EMPTY,
        EMPTY,
    )
    assert history.digest(1) is None


def test_recounting_follows_the_counter() -> None:
    history = history_of([{"role": "user", "content": "abc"}])
    assert history.total == 3
    history.recount()
    assert (history.sizes, history.total) == ([3], 3)
