"""LangChain messages in and out."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from smoothagent import HistoryError, Message
from smoothagent_langchain.codec import LangChainCodec, Wired
from smoothagent_langchain.models import to_wire_of

texts = st.text(max_size=40)
parts = st.lists(st.one_of(st.builds(lambda t: {"type": "text", "text": t}, texts), texts), min_size=1, max_size=3)
contents: Any = st.one_of(texts, parts)
calls = st.lists(
    st.builds(
        lambda i, n, a: {"id": i, "name": n, "args": a, "type": "tool_call"},
        st.text(min_size=1, max_size=5),
        st.sampled_from(["sed", "head"]),
        st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), texts), max_size=3),
    ),
    max_size=3,
)
messages: Any = st.one_of(
    st.builds(HumanMessage, contents),
    st.builds(SystemMessage, contents),
    st.builds(lambda c, t: AIMessage(c, tool_calls=t), contents, calls),
    st.builds(lambda c, i: ToolMessage(c, tool_call_id=i), contents, st.text(min_size=1, max_size=5)),
    st.builds(lambda c, r: ChatMessage(content=c, role=r), texts, st.sampled_from(["user", "critic"])),
)
MODEL = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("x"))


@given(st.lists(messages, min_size=1, max_size=5))
def test_what_is_read_is_what_the_model_would_send(natives: list[BaseMessage]) -> None:
    """Of a whole request, message by message."""
    codec = LangChainCodec(to_wire_of(MODEL))
    body = MODEL._get_request_payload(natives)["messages"]  # pyright: ignore[reportPrivateUsage]
    for native, sent in zip(natives, body, strict=True):
        read, wire = codec.decode(native), codec.wire(native)
        assert wire == sent
        assert isinstance(wire, Wired)
        assert wire.native is native
        assert read.role == sent["role"]
        assert [c.arguments for c in read.tool_calls] == [
            c["function"]["arguments"] for c in sent.get("tool_calls", ())
        ]
        assert read.tool_call_id == sent.get("tool_call_id")


@given(messages)
def test_reading_changes_nothing_and_two_readings_are_equal(native: BaseMessage) -> None:
    before = native.model_copy(deep=True)
    codec = LangChainCodec()
    assert codec.decode(native) == codec.decode(native)
    assert native == before


@given(messages, texts)
def test_a_rewritten_message_keeps_its_id_and_its_calls(native: BaseMessage, text: str) -> None:
    codec = LangChainCodec()
    native.id = "an-id"
    made = codec.rewrite(native, text)
    assert made is not native
    assert (made.id, made.content, type(made)) == ("an-id", text, type(native))
    assert getattr(made, "tool_calls", None) == getattr(native, "tool_calls", None)


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer", "tool", "critic"])
def test_a_message_of_the_strategys_own_has_an_id_at_once(role: str) -> None:
    codec = LangChainCodec()
    made = codec.encode(Message(role, "text", tool_call_id="c" if role == "tool" else None))
    assert made.id
    assert codec.decode(made).role == role
    assert codec.decode(made).text == "text"


def test_what_is_no_message_to_a_model_is_refused_by_name() -> None:
    with pytest.raises(HistoryError, match="a RemoveMessage is no message"):
        LangChainCodec().decode(RemoveMessage(id="x"))
    with pytest.raises(HistoryError, match="type 'str'"):
        LangChainCodec().decode("text")  # type: ignore[arg-type]
