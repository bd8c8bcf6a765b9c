"""What differed first between the warmed and the sent request, and when that is worth a warning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent import BackendRefusedError
from smoothagent.fidelity import (
    Difference,
    Fidelity,
    Request,
    _where,  # pyright: ignore[reportPrivateUsage]
    first_difference,
)
from smoothagent.prompt import Prompt
from smoothagent.quoting import quote_again, quote_nothing
from smoothagent.serving.connection import refusal

Wires = list[dict[str, Any]]
TEXT = st.sampled_from(["", "a", "ab", "ab\n\u202ec", "漢字"])


def call(id: str, name: str, arguments: str) -> dict[str, Any]:  # noqa: A002
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


HISTORY: Wires = [
    {"role": "system", "content": "You are careful."},
    {"role": "user", "content": "read it"},
    {"role": "assistant", "content": None, "tool_calls": [call("c1", "read", '{"path": "a"}')]},
    {"role": "tool", "content": "line one\nline two", "tool_call_id": "c1"},
]

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(["user", "assistant", "tool"]),
    "content": TEXT | st.none(),
}
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "tool_calls": st.lists(st.builds(call, TEXT, TEXT, TEXT), max_size=2),
    "tool_call_id": TEXT,
    "reasoning_content": TEXT,
}
MESSAGES: st.SearchStrategy[Wires] = st.lists(st.fixed_dictionaries(FIELDS, optional=OPTIONAL), max_size=5)


def changed(index: int, **fields: Any) -> Wires:
    messages = copy.deepcopy(HISTORY)
    messages[index] |= fields
    return messages


def difference(actual: Wires, warmed: Wires = HISTORY) -> str:
    found = first_difference(Request(warmed), Request(actual))
    assert found is not None
    return str(found)


@given(MESSAGES, MESSAGES)
def test_an_extension_is_no_difference(head: Wires, tail: Wires) -> None:
    assert first_difference(Request(head), Request(copy.deepcopy(head) + tail)) is None


def rendered(message: dict[str, Any]) -> dict[str, Any]:
    """The message without fields that are empty, which is the same as absent; None and "" are told apart in content."""
    return {k: v for k, v in message.items() if k == "content" or v}


@given(MESSAGES, MESSAGES)
def test_none_exactly_when_it_is_a_prefix(warmed: Wires, actual: Wires) -> None:
    found = first_difference(Request(warmed), Request(actual))
    before, after = list(map(rendered, warmed)), list(map(rendered, actual))
    assert (found is None) == (after[: len(before)] == before)
    if found is not None:
        assert found.message is not None
        assert after[: found.message] == before[: found.message] or found.kind == "message"
        assert found.sentence.isprintable()


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_quotes_little_and_nothing_unprintable(a: str, b: str) -> None:
    found = first_difference(Request([{"role": "user", "content": a}]), Request([{"role": "user", "content": b}]))
    if found is not None:
        assert found.sentence.isprintable()
        assert len(found.sentence) < 100 + 40 * len("\\U00000000")


def test_content() -> None:
    assert difference(changed(3, content="line one\nline 2")) == (
        "message 3 (tool): content differs at character 14: '…\\nline two' was warmed, '…\\nline 2' is sent"
    )
    long = "x" * 120 + "SECRET" + "y" * 100
    sentence = difference([{"role": "tool", "content": long}], [{"role": "tool", "content": "x" * 300}])
    assert "at character 120" in sentence
    assert "y" * 15 not in sentence


@pytest.mark.parametrize(
    ("actual", "says"),
    [
        (changed(1, role="developer"), "message 1 (user): role differs: 'user' was warmed, 'developer' is sent"),
        (changed(1, content=[{"type": "text", "text": "read it"}]), "content was text, now it is a list of parts"),
        (changed(2, tool_calls=[]), "1 tool calls were warmed, 0 are sent"),
        (changed(2, tool_calls=[call("c1", "write", "{}")]), "tool call 0 was 'read', now it is 'write'"),
        (
            changed(2, tool_calls=[call("c1", "read", '{"path":"a"}')]),
            "message 2 (assistant): arguments of tool call 0 ('read') differ at character 8",
        ),
        (changed(2, reasoning_content="hm"), "'reasoning_content' differs at character 0: '' was warmed, 'hm' is sent"),
        (HISTORY[:2], "message 2 (assistant): the request ends before it, 2 more were warmed"),
        (changed(2, tool_calls=[call("new", "read", '{"path": "a"}')]), "tool call id 'c1' became 'new'"),
        (changed(2, content=""), "content is empty text in one and null in the other"),
    ],
)
def test_messages(actual: Wires, says: str) -> None:
    assert says in difference(actual)


def test_parts() -> None:
    was, now = [{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}]
    assert "as JSON, at character 27" in difference(changed(1, content=now), changed(1, content=was))
    assert "now it is text" in difference(changed(1, content="a"), changed(1, content=was))


def test_a_detail_never_hides_a_cause() -> None:
    actual = changed(2, tool_calls=[call("new", "read", '{"path": "a"}')])
    found = first_difference(Request(HISTORY), Request(actual))
    assert found is not None
    assert found.kind == "detail"
    actual[3]["content"] = "other"
    found = first_difference(Request(HISTORY), Request(actual))
    assert found is not None
    assert (found.kind, found.message) == ("message", 3)


def test_a_growing_last_message() -> None:
    warmed = Request([{"role": "user", "content": "Look at the"}], partial=True)
    assert first_difference(warmed, Request([{"role": "user", "content": "Look at the file"}])) is None
    assert first_difference(warmed, Request([{"role": "user", "content": "Look elsewhere"}])) is not None
    assert first_difference(Request(warmed.messages), Request([{"role": "user", "content": "Look at the file"}]))


@pytest.mark.parametrize(
    ("warmed", "actual", "says"),
    [
        (Prompt(model="a"), Prompt(model="b"), "model differs: 'a' was warmed, 'b' is sent"),
        (Prompt(model="a"), Prompt(), "model differs: 'a' was warmed, none is sent"),
        (Prompt(system="one"), Prompt(system="ona"), "system text differs at character 2: 'one' was"),
        (Prompt(params={"x": 1, "key": "hidden"}), Prompt(params={"x": 1}), "params differ: 'key'"),
        (Prompt(tools=[tool("a")]), Prompt(tools=[tool("b")]), "tools differ: tool 0 was 'a', now it is 'b'"),
        (Prompt(tools=[tool("a")]), Prompt(), "tools differ: tool 0 was 'a', now it is nothing"),
        (Prompt(), Prompt(tools=[tool("a")]), "tools differ: tool 0 was nothing, now it is 'a'"),
        (Prompt(tools=[tool("a", p=1)]), Prompt(tools=[tool("a", p=2)]), "tools differ: tool 0 ('a') at character"),
        (Prompt(tools=[tool("a", p=1, q=2)]), Prompt(tools=[tool("a", q=2, p=1)]), "tool 0 ('a') at character"),
    ],
)
def test_prompts(warmed: Prompt, actual: Prompt, says: str) -> None:
    found = first_difference(Request(HISTORY, warmed), Request(changed(0, content="other"), actual))
    assert found is not None
    assert says in found.sentence
    assert "hidden" not in found.sentence


def test_equal_prompts_are_no_difference() -> None:
    one, two = Prompt("m", "", [tool("a")], {"x": {}}), Prompt("m", None, [tool("a")], {"x": {}}, volatile_tail=1)
    assert first_difference(Request(HISTORY, one), Request(HISTORY, two)) is None


# -- the tracker -----------------------------------------------------------------------------------------------------


def test_warns_once_after_two_cold_commits_naming_the_difference() -> None:
    fidelity = Fidelity()
    found = Difference("model", "model differs: 'a' was warmed, 'b' is sent")
    assert fidelity.observe_commit(1000, 499, found) is None
    warning = fidelity.observe_commit(1000, 20, found)
    assert warning is not None
    assert "20 of 1000" in warning
    assert found.sentence in warning
    assert fidelity.observe_commit(1000, 1000, None) is None
    assert [fidelity.observe_commit(1000, 0, found) for _ in range(3)] == [None] * 3
    assert (fidelity.commits, fidelity.cold, fidelity.cold_run, fidelity.last_ratio) == (6, 5, 3, 0.0)


def test_a_warm_commit_between_is_no_row() -> None:
    fidelity = Fidelity()
    for cached in (0, 500, 0, 990, 0):
        assert fidelity.observe_commit(1000, cached, None) is None
    assert fidelity.warming_pays


def test_equal_requests_point_at_the_server() -> None:
    fidelity = Fidelity()
    fidelity.observe_commit(1000, 0, None)
    warning = fidelity.observe_commit(1000, 0, None)
    assert warning is not None
    assert "evicted" in warning
    assert "chat template" in warning


def test_a_detail_is_named_beside_the_server() -> None:
    fidelity = Fidelity()
    detail = Difference("detail", "message 2 (assistant): tool call id 'a' became 'b'", 2)
    fidelity.observe_commit(1000, 0, detail)
    warning = fidelity.observe_commit(1000, 0, detail)
    assert warning is not None
    assert detail.sentence in warning
    assert "evicted" in warning


def test_switches_warming_off_after_four() -> None:
    """vllm#54360: prefix hits silently off."""
    fidelity = Fidelity()
    said = [fidelity.observe_commit(1000, 0, None) for _ in range(6)]
    assert [s is not None for s in said] == [False, True, False, True, False, False]
    assert "warming is off" in (said[3] or "")
    assert not fidelity.warming_pays


@pytest.mark.parametrize(
    ("server", "flag"),
    [
        ("sglang", "--enable-cache-report"),
        ("vllm", "--enable-prompt-tokens-details"),
        ("llama.cpp", "newer"),
        ("unknown", "usage.prompt_tokens_details.cached_tokens"),
    ],
)
def test_names_the_missing_flag_once(server: str, flag: str) -> None:
    """gpustack#5189: no cached_tokens because the server lacks a flag."""
    fidelity = Fidelity(server)
    said = fidelity.observe_commit(1000, None, None)
    assert said is not None
    assert flag in said
    assert fidelity.observe_commit(1000, None, None) is None
    assert fidelity.commits == 0


def test_less_than_a_block_says_nothing() -> None:
    fidelity = Fidelity()
    assert [fidelity.observe_commit(63, 0, None) for _ in range(5)] == [None] * 5
    assert fidelity.observe_commit(0, None, None) is None
    assert fidelity.commits == 0


@given(st.lists(st.tuples(st.integers(0, 5000), st.none() | st.integers(0, 5000))))
def test_says_each_thing_once(commits: list[tuple[int, int | None]]) -> None:
    fidelity = Fidelity()
    said = [s for s in (fidelity.observe_commit(w, c, None) for w, c in commits) if s is not None]
    assert len(said) == len({s.split(":")[0].split("(")[0] for s in said}) <= 3


def test_where_nothing_may_be_quoted_a_refusal_is_understood_all_the_same() -> None:
    """A server's words tell what it can do; who serves others does not show them."""
    error = refusal("POST /slots", 400, {}, "Invalid filename: SECRET")
    assert "SECRET" in str(error)
    quote_nothing()
    try:
        assert isinstance(error, BackendRefusedError)
        assert str(error) == "POST /slots answered 400"
        assert "filename" in error.words
        difference = _where("SECRET one", "SECRET two")
        assert "SECRET" not in difference
    finally:
        quote_again()
