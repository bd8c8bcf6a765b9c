"""Messages go in and out unharmed: dicts, `Message`, and the openai client's own objects."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from smoothagent import HistoryError, Message, OpenAICodec, ToolCall
from smoothagent.codec import plain
from smoothagent.message import canonical

CODEC = OpenAICodec()
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
HARD = ["", "\0", "\ud800 half", "😀", "\r\n", "\x1b[0m"]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def a_call(name: str, tool: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}


IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
UNKNOWN: dict[str, Any] = {"type": "something_new", "payload": [1, {"x": None}]}
PARTS: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.one_of(st.builds(text_part, ANY_TEXT), st.just(IMAGE), st.just(UNKNOWN)), max_size=3
)
CALL = st.builds(a_call, ANY_TEXT, ANY_TEXT, ANY_TEXT)
EXTRA = st.dictionaries(
    st.sampled_from(["refusal", "audio", "reasoning_content", "cache_control", "metadata"]),
    st.one_of(st.none(), st.booleans(), st.integers(), ANY_TEXT, st.just({"nested": [1, 2]})),
    max_size=3,
)


@st.composite
def wires(draw: st.DrawFn) -> dict[str, Any]:
    role = draw(st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]))
    wire: dict[str, Any] = {"role": role, "content": draw(st.one_of(st.none(), ANY_TEXT, PARTS)), **draw(EXTRA)}
    if role == "assistant" and draw(st.booleans()):
        wire["tool_calls"] = draw(st.lists(CALL, min_size=1, max_size=3))
    if role == "tool":
        wire["tool_call_id"] = draw(ANY_TEXT)
    if draw(st.booleans()):
        wire["name"] = draw(ANY_TEXT)
    return wire


@given(wires())
def test_a_mapping_comes_back_with_every_field_it_had(wire: dict[str, Any]) -> None:
    before = copy.deepcopy(wire)
    message = CODEC.decode(wire)
    assert CODEC.encode(message) == wire
    assert CODEC.wire(wire) == wire
    assert CODEC.decode(CODEC.encode(message)) == message
    assert wire == before


def listed(content: Any) -> Any:
    return list(cast("tuple[Any, ...]", content)) if isinstance(content, tuple) else content


@given(wires(), st.one_of(ANY_TEXT, PARTS.map(tuple), st.none()))
def test_a_rewrite_changes_the_content_only_and_a_copy_only(wire: dict[str, Any], content: Any) -> None:
    before = copy.deepcopy(wire)
    rewritten = CODEC.rewrite(wire, content)
    assert wire == before
    assert rewritten is not wire
    assert rewritten == {**wire, "content": listed(content)}


@given(wires())
def test_every_text_can_be_digested(wire: dict[str, Any]) -> None:
    """Lone surrogates and NULs are content like any other."""
    digest = canonical(CODEC.decode(wire), None)
    assert digest == canonical(CODEC.decode(json.loads(json.dumps(wire))), None)


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_exactly(text: str) -> None:
    native = {"role": "tool", "tool_call_id": "c", "content": text}
    assert CODEC.decode(native).text == text
    assert CODEC.encode(CODEC.decode(native)) == native
    assert CODEC.rewrite(native, text + "!")["content"] == text + "!"


def test_a_message_is_its_own_decoding() -> None:
    message = Message("user", "hello", name="ann", extra={"k": 1})
    assert CODEC.decode(message) is message
    assert CODEC.wire(message) == {"role": "user", "content": "hello", "k": 1, "name": "ann"}
    rewritten = CODEC.rewrite(message, "bye")
    assert isinstance(rewritten, Message)
    assert (rewritten.content, rewritten.name, rewritten.origin) == ("bye", "ann", message)
    assert plain(rewritten).origin is None
    assert plain(message) is message


def openai_message(**changes: Any) -> ChatCompletionMessage:
    call = ChatCompletionMessageFunctionToolCall(
        id="call_1", type="function", function=Function(name="sed", arguments='{"x": 1}')
    )
    return ChatCompletionMessage(role="assistant", content=None, tool_calls=[call], **changes)


def test_the_openai_clients_own_objects_are_read_and_sent_as_the_client_would() -> None:
    native = openai_message(refusal=None)
    message = CODEC.decode(native)
    assert message.role == "assistant"
    assert message.content is None
    assert message.tool_calls == (ToolCall("call_1", "sed", '{"x": 1}'),)
    wire = CODEC.wire(native)
    # The API refuses fields that are null, such as ``audio``; content may be.
    assert wire == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "sed", "arguments": '{"x": 1}'}}],
    }


def test_fields_the_openai_client_does_not_know_are_kept() -> None:
    native = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": "hi", "reasoning_content": "because", "annotations": []}
    )
    assert CODEC.decode(native).extra == {"reasoning_content": "because", "annotations": []}
    assert CODEC.wire(native)["reasoning_content"] == "because"


def test_a_rewritten_openai_object_stays_one() -> None:
    native = ChatCompletionMessage(role="assistant", content="long")
    rewritten = CODEC.rewrite(native, "short")
    assert isinstance(rewritten, ChatCompletionMessage)
    assert (native.content, rewritten.content) == ("long", "short")


def test_objects_with_only_model_dump_are_accepted() -> None:
    class Dumps:
        def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
            return {"role": "user", "content": "hi"}

    assert CODEC.decode(Dumps()) == Message("user", "hi")
    assert CODEC.rewrite(Dumps(), "bye") == {"role": "user", "content": "bye"}


def test_any_mapping_is_accepted() -> None:
    native = MappingProxyType({"role": "user", "content": "hi", "id": "m1"})
    assert CODEC.decode(native) == Message("user", "hi", extra={"id": "m1"})
    assert CODEC.rewrite(native, "bye") == {"role": "user", "content": "bye", "id": "m1"}


def test_a_custom_tools_call_is_read() -> None:
    native = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}],
    }
    assert CODEC.decode(native).tool_calls == (ToolCall("c", "shell", "ls"),)


def test_a_custom_tools_call_keeps_its_shape_when_its_message_is_rewritten_or_encoded() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    native = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert CODEC.wire(native)["tool_calls"] == [call]
    assert CODEC.rewrite(native, "x")["tool_calls"] == [call]


def test_new_messages_are_plain_dicts() -> None:
    assert CODEC.new("user", "hi") == {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("native", "said"),
    [
        (7, "'int'"),
        ("hello", "'str'"),
        (None, "'NoneType'"),
        ({"content": "x"}, "role None"),
        ({"role": 3, "content": "x"}, "role 3"),
        ({"role": "user", "content": 12}, "'int'"),
        ({"role": "user", "content": {"type": "text"}}, "'dict'"),
    ],
)
def test_what_is_no_message_is_refused_by_name(native: Any, said: str) -> None:
    with pytest.raises(HistoryError, match=said):
        CODEC.decode(native)
