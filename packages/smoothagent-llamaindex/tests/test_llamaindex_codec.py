"""Messages go out as the LLM itself writes them, and come back as they were."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms import MockLLM
from llama_index.llms.openai_like import OpenAILike

from examples import examples
from smoothagent import HistoryError, Message, ToolCall
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike, is_summary, summary_message
from smoothagent_llamaindex.models import prompt_for, same_model, server_of, speaks_chat, to_wire_of

CODEC = LlamaIndexCodec()
MAKE: Any = OpenAILike
LLM = MAKE(model="m", api_base="http://127.0.0.1:9/v1", api_key="k", is_chat_model=True)
TEXT = st.text(max_size=20)
CALL = st.builds(ToolCallBlock, tool_call_id=TEXT, tool_name=TEXT, tool_kwargs=st.just("{}"))


@given(st.lists(TEXT, max_size=3), st.lists(CALL, max_size=2), st.sampled_from(["user", "assistant", "system"]))
@examples(60)
def test_what_the_llm_writes_is_what_is_digested(texts: list[str], calls: list[ToolCallBlock], role: str) -> None:
    blocks: list[Any] = [TextBlock(text=t) for t in texts]
    native = ChatMessage(role=role, blocks=[*blocks, *(calls if role == "assistant" else [])])
    wire, message = to_wire_of(LLM)(native), CODEC.decode(native)
    assert (wire["content"] or "") == (message.content or "")
    assert [c["function"]["name"] for c in wire.get("tool_calls", ())] == [c.name for c in message.tool_calls]
    assert LlamaIndexCodec(to_wire_of(LLM)).wire(native) == wire


@given(TEXT, st.lists(st.builds(ToolCall, TEXT, TEXT, st.just("{}")), max_size=2))
@examples(60)
def test_a_neutral_message_comes_back(text: str, calls: list[ToolCall]) -> None:
    message = Message("assistant", text, tuple(calls))
    again = CODEC.decode(CODEC.encode(message))
    assert (again.role, again.content, again.tool_calls) == ("assistant", text, tuple(calls))


def test_a_rewritten_message_keeps_its_calls_and_its_marks() -> None:
    native = ChatMessage(
        role="assistant",
        blocks=[TextBlock(text="a"), ToolCallBlock(tool_call_id="1", tool_name="t", tool_kwargs="{}")],
        additional_kwargs={"mine": 1},
    )
    other = CODEC.rewrite(native, "b")
    assert other.content == "b"
    assert other.additional_kwargs == {"mine": 1}
    assert CODEC.decode(other).tool_calls == CODEC.decode(native).tool_calls
    assert native.content == "a"


def test_calls_of_the_openai_client_are_read() -> None:
    from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction

    call = ChoiceDeltaToolCall(
        index=0, id="1", type="function", function=ChoiceDeltaToolCallFunction(name="t", arguments='{"a": 1}')
    )
    native = ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]})
    assert CODEC.decode(native).tool_calls == (ToolCall("1", "t", '{"a": 1}'),)
    answer = ChatMessage(role="tool", content="r", additional_kwargs={"tool_call_id": "1"})
    assert CODEC.decode(answer).tool_call_id == "1"


def test_a_summary_is_no_part_of_the_system_text() -> None:
    summary = summary_message("s")
    assert is_summary(summary)
    assert summary.role == MessageRole.SYSTEM
    assert CODEC.decode(summary).role == "user", "to the core, or it would never be summarized again"
    assert to_wire_of(LLM)(summary) == {"role": "system", "content": "s"}
    assert to_wire_of(MockLLM())(summary) == {"role": "system", "content": "s"}


def test_images_are_kept() -> None:
    native = ChatMessage(role="user", blocks=[TextBlock(text="look"), ImageBlock(url="http://127.0.0.1/x.png")])
    message = CODEC.decode(native)
    assert isinstance(message.content, tuple)
    assert message.content[1]["type"] == "image"
    assert alike(native, native.model_copy(deep=True))
    with pytest.raises(HistoryError, match="type 'image' cannot be made a block"):
        CODEC.encode(message)


def test_thoughts_are_no_content() -> None:
    native = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), TextBlock(text="a")])
    assert CODEC.decode(native).content == "a"


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(HistoryError, match="type 'dict': expected a ChatMessage"):
        CODEC.decode({"role": "user"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(HistoryError, match="no role 'critic'"):
        CODEC.new("critic", "x")


def test_servers_that_are_not_ours_to_reach() -> None:
    import httpx
    from openai import AsyncOpenAI

    given_: dict[str, Any] = {"model": "m", "api_base": "http://127.0.0.1:9/v1", "api_key": "k", "is_chat_model": True}
    assert server_of(MAKE(**given_)) == ("http://127.0.0.1:9/v1", "k", {})
    assert server_of(MAKE(**{**given_, "default_headers": {"a": "b"}})) == (given_["api_base"], "k", {"a": "b"})
    with httpx.Client() as http:
        assert server_of(MAKE(**given_, http_client=http)) is None
    theirs = AsyncOpenAI(base_url="http://127.0.0.1:10/v1", api_key="k")
    assert server_of(MAKE(**given_, async_openai_client=theirs)) is None
    assert server_of(MAKE(**{**given_, "is_chat_model": False})) is None
    assert server_of(MockLLM()) is None

    class Other(OpenAILike):
        async def _achat(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    assert not speaks_chat(Other(**given_))
    assert same_model(MAKE(**given_), MAKE(**given_))
    assert not same_model(MAKE(**given_), MAKE(**{**given_, "model": "n"}))
    assert not same_model(MockLLM(), MockLLM())


def test_what_shapes_the_tokens_is_taken_from_the_llms_own_parameters() -> None:
    llm = OpenAILike(
        model="m",
        api_base="http://127.0.0.1:9/v1",
        api_key="k",
        is_chat_model=True,
        temperature=0.5,
        additional_kwargs={"extra_body": {"chat_template_kwargs": {"a": 1}}, "user": "me"},
    )
    tools = [{"type": "function", "function": {"name": "t"}}]
    prompt = prompt_for(llm, {"tools": tools, "tool_choice": "auto"})
    assert (prompt.model, list(prompt.tools)) == ("m", tools)
    assert prompt.params == {
        "extra_body": {"chat_template_kwargs": {"a": 1}},
        "temperature": 0.5,
    }
