"""Answers are read as they are, however they are cut; requests are changed no more than they have to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent_gateway.answer import Answer, Events, is_usage_alone
from smoothagent_gateway.asgi import Event, RefusedError, read_body
from smoothagent_gateway.body import Begun
from smoothagent_gateway.body import Body as RequestBody
from smoothagent_gateway.completions import _planned  # pyright: ignore[reportPrivateUsage]

ENDS = ("\n\n", "\r\n\r\n", "\r\r")
EVENTS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), st.sampled_from(ENDS)
    ),
    max_size=8,
)


@given(EVENTS, st.lists(st.integers(0, 60), max_size=20))
def test_events_are_whole_however_they_are_cut(events: list[tuple[str, str]], cuts: list[int]) -> None:
    whole = [f"data: {text}{end}".encode() for text, end in events]
    stream = b"".join(whole)
    cutter, found, at = Events(), list[bytes](), 0
    for cut in [*cuts, len(stream)]:
        found += cutter.feed(stream[at : at + cut])
        at += cut
    found += cutter.feed(stream[at:])
    assert b"".join(found) + cutter.rest == stream
    assert len(found) == len(whole) or any("\r\r" in end for _, end in events)
    if len(found) == len(whole):
        assert found == whole


CALLS = st.lists(st.tuples(st.text(max_size=8), st.text(max_size=30)), max_size=3)


@given(st.text(max_size=60), CALLS, st.integers(1, 9))
def test_a_stream_and_a_whole_answer_say_the_same(text: str, calls: list[tuple[str, str]], size: int) -> None:
    made: list[dict[str, Any]] = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    whole = Answer()
    whole.body(json.dumps({"choices": [{"index": 0, "message": {**message, "tool_calls": made}}]}).encode())
    streamed = Answer()

    def delta(told: dict[str, Any], finish: str | None = None) -> None:
        chunk = {"choices": [{"index": 0, "delta": told, "finish_reason": finish}]}
        streamed.event(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    delta({"role": "assistant", "content": ""})
    for at in range(0, len(text), size):
        delta({"content": text[at : at + size]})
    for i, call in enumerate(made):
        delta({"tool_calls": [{**call, "index": i, "function": {**call["function"], "arguments": ""}}]})
        arguments = str(call["function"]["arguments"])
        for at in range(0, len(arguments), size):
            delta({"tool_calls": [{"index": i, "function": {"arguments": arguments[at : at + size]}}]})
    assert streamed.message() is None, "it has not ended"
    delta({}, "stop")
    streamed.event(b"data: [DONE]\n\n")
    assert streamed.message() == whole.message()
    if text or calls:
        assert whole.message() == {**message, **({"tool_calls": made} if made else {})}


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [{"index": 1, "delta": {"content": "x"}}]},
        {"choices": [{"index": 0, "delta": {"content": ["x"]}}]},
        {"choices": [{"index": 0, "delta": {"function_call": {"name": "f"}}}]},
        {"choices": ["x"]},
        [],
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": "x"}]}}]},
    ],
)
def test_what_is_not_understood_is_no_message(chunk: Any) -> None:
    answer = Answer()
    answer.event(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
    assert answer.message() is not None
    answer.event(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert answer.message() is None


def test_usage_alone() -> None:
    assert is_usage_alone(b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n')
    for other in (
        b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[]}\n\n',
        b'data: "usage"\n\n',
        b'data: {"usage"\n\n',
        b": usage\n\n",
        b"data: [DONE]\n\n",
    ):
        assert not is_usage_alone(other)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_a_changed_request_is_changed_there_alone(
    fields: dict[str, Any], stream: bool, view: bool, extra: bool
) -> None:
    call = {
        **fields,
        "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        "stream": stream,
    }
    body = RequestBody(json.dumps(call).encode())
    given_: list[Any] = body.call["messages"]
    extras = {"extra_body": {"id_slot": 1}} if extra else {}
    planned = _planned(body, given_, given_[1:] if view else list(given_), extras, ask=True)
    sent = json.loads(planned.body)
    expected = dict(call)
    if extra:
        expected.setdefault("id_slot", 1)
    if view:
        expected["messages"] = given_[1:]
    if stream:
        expected["stream_options"] = {"include_usage": True}
    assert sent == expected
    assert (planned.body == body.data) == (sent == call) or not (view or extra or stream)
    assert (planned.unasked is not None) == stream
    if planned.unasked is not None:
        expected.pop("stream_options")
        assert json.loads(planned.unasked()) == {**expected, **{k: v for k, v in call.items() if k == "stream_options"}}


MESSAGES: st.SearchStrategy[list[Any]] = st.lists(
    st.text(max_size=5).map(lambda text: {"role": "user", "content": text}) | JSON, max_size=5
)
WRITINGS: list[dict[str, Any]] = [{"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}, {}]


@given(
    st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    MESSAGES,
    MESSAGES,
    st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    st.sampled_from(WRITINGS),
    st.integers(0, 3),
    st.integers(0, 200),
)
def test_what_is_read_from_where_another_ended_is_the_same(
    ahead: dict[str, Any],
    first: list[Any],
    more: list[Any],
    after: dict[str, Any],
    written: dict[str, Any],
    dropped: int,
    cut: int,
) -> None:
    """However the two differ: a longer history, another last message, another head, or one that is broken off."""
    one = json.dumps({**ahead, "messages": first, **after}, **written).encode("utf-8", "surrogatepass")
    given_ = [*first[: max(0, len(first) - dropped)], *more]
    other = json.dumps({**ahead, "messages": given_}, **written).encode("utf-8", "surrogatepass")
    for data in (other, other[:-cut] if cut else one, other + b" ", other.replace(b"]", b",]", 1)):
        before = _read(one)
        kept = before.kept() if before is not None else None
        shared = kept.shared(data) if kept is not None else 0
        earlier = kept.begins(shared) if kept is not None and shared else None
        again, fresh = _read(data, earlier), _read(data)
        assert (again is None) == (fresh is None)
        if again is not None and fresh is not None:
            assert json.dumps(again.call) == json.dumps(fresh.call)
            assert again.items == fresh.items
            assert again.kept() == fresh.kept()
            assert again.changed(["x"], [], {"new": 1}) == fresh.changed(["x"], [], {"new": 1})
            assert earlier is None or again.items is None or again.call["messages"][0] is earlier.values[0]


def _read(data: bytes, earlier: Begun | None = None) -> RequestBody | None:
    try:
        return RequestBody(data, earlier)
    except RefusedError:
        return None


SPACES = st.sampled_from(["", " ", "\n", "\t\r\n "])
ODD = st.sampled_from(
    ["1e400", "-0", "1E5", "12345678901234567890.0", "NaN", '"\\u0041"', '"é\\ud800"', "1.0", '{"a":1,"a":2}', "[ ]"]
)


@given(
    st.lists(st.tuples(st.text(max_size=4), ODD), max_size=4, unique_by=lambda pair: pair[0]),
    st.lists(ODD, min_size=1, max_size=5),
    st.lists(SPACES, min_size=12, max_size=12),
    st.integers(0, 4),
    st.data(),
)
def test_what_is_not_changed_stays_to_the_byte(
    fields: list[tuple[str, str]], odd: list[str], spaces: list[str], at: int, data: st.DataObject
) -> None:
    """Numbers, escapes, spaces, repeated names within: whatever a client has written."""
    texts = [f'{{"role": "user",{spaces[i % 12]}"content": "{i}", "x":{one}}}' for i, one in enumerate(odd)]
    fields = [(name, value) for name, value in fields if name not in ("messages", "id_slot", "stream_options")]
    listed = "[" + f"{spaces[0]},{spaces[1]}".join(texts) + f"{spaces[2]}]"
    pairs = [f"{json.dumps(name)}{spaces[3]}:{spaces[4]}{value}" for name, value in fields]
    pairs.insert(min(at, len(pairs)), f'"messages"{spaces[5]}:{spaces[6]}{listed}')
    text = f"{spaces[7]}{{{spaces[8]}" + f"{spaces[9]},{spaces[10]}".join(pairs) + f"{spaces[11]}}}"
    body = RequestBody(text.encode("utf-8", "surrogatepass"))
    given_: list[Any] = body.call["messages"]
    assert [body._text[s.begin : s.end] for s in body.items or ()] == texts  # pyright: ignore[reportPrivateUsage]
    kept = data.draw(st.integers(0, len(given_)))
    summary = {"role": "user", "content": "SUMMARY"}
    changed = body.changed([summary, *given_[kept:]], given_, {"id_slot": 3}).decode()
    new = ",".join([json.dumps(summary, separators=(",", ":")), *texts[kept:]])
    assert (
        changed
        == text[: text.index(listed)]
        + f"[{new}]"
        + text[text.index(listed) + len(listed) :].rstrip(" \t\r\n").removesuffix("}")
        + f',"id_slot":3}}{spaces[7] * 0}'
        + text[len(text.rstrip(" \t\r\n")) :]
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"messages":[1,]}',
        '{"messages":[1 2]}',
        '{"a":1,}',
        '{"a" 1}',
        '{"a":1 "b":2}',
        "{1:2}",
        '{"a":1} x',
        "{",
        "[]",
        "",
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(RefusedError):
        RequestBody(text.encode())


def test_what_cannot_be_placed_is_written_anew() -> None:
    for data in (
        '{"messages":[{"a":1}],"id_slot":1}'.encode("utf-16"),
        b'\xef\xbb\xbf{"messages":[{"a":1}],"id_slot":1}',
    ):
        body = RequestBody(data)
        assert body.items is None
        assert json.loads(body.changed(None, (), {"id_slot": 2})) == {"messages": [{"a": 1}], "id_slot": 2}
    repeated = RequestBody(b'{"messages":[1],"messages":[2],"n":1,"n":2}')
    assert repeated.items is None
    assert json.loads(repeated.changed(None, (), {"n": 3})) == {"messages": [2], "n": 3}


def test_a_number_that_is_too_long_is_read_all_the_same() -> None:
    body = RequestBody(b'{"n":' + b"9" * 5000 + b',"messages":[{"role":"user"}]}')
    assert (
        body.changed(body.call["messages"][:0], body.call["messages"], {})
        == b'{"n":' + b"9" * 5000 + b',"messages":[]}'
    )


def test_events_are_cut_in_time_that_grows_with_their_bytes() -> None:
    """A bound on work, not on time: what has been searched is not searched again."""
    events = Events()
    chunk = b'data: {"choices":[]}\n\n' * 4000
    assert len(events.feed(chunk)) == 4000
    for _ in range(2000):
        assert events.feed(b"x" * 1000) == []
    assert len(events.rest) == 2_000_000
    (event,) = events.feed(b"\r\n\r\n")
    assert len(event) == 2_000_004


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 120), st.booleans())
def test_a_body_is_read_up_to_its_limit(parts: list[bytes], limit: int, declares: bool) -> None:
    size = sum(map(len, parts))
    pieces = [*parts, b""]
    events: list[Event] = [
        {"type": "http.request", "body": part, "more_body": i < len(pieces) - 1} for i, part in enumerate(pieces)
    ]

    async def receive() -> Event:
        return events.pop(0)

    headers = [(b"content-length", str(size).encode())] if declares else []
    reading = read_body({"headers": headers}, receive, limit)
    if size > limit:
        with pytest.raises(RefusedError) as refused:
            reading.send(None)
        assert refused.value.status == 413
        return
    with pytest.raises(StopIteration) as done:
        reading.send(None)
    assert done.value.value == b"".join(parts)
