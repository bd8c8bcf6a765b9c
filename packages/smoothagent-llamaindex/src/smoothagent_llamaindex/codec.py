"""LlamaIndex messages in and out of the core, and onto the wire as the LLM would write them."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from smoothagent import HistoryError, Message, ToolCall
from smoothagent.message import Content

ToWire = Callable[[ChatMessage], dict[str, Any]]
"""How an LLM writes one message."""

MARK = "smoothagent"
"""The key in a message's ``additional_kwargs`` that says what we wrote it as; no LLM of LlamaIndex sends it."""
SUMMARY = "summary"
"""What it says of a summary."""


class Wired(dict[str, Any]):
    """A wire mapping that knows which message it was made of."""

    def __init__(self, native: ChatMessage, wire: Mapping[str, Any]) -> None:
        super().__init__(wire)
        self.native = native


class LlamaIndexCodec:
    """`ChatMessage` objects.

    A summary that a memory wrote has the role ``system`` in LlamaIndex. To the core it is a user's: what stands first
    with that role would never be summarized again.

    Attributes:
        to_wire: how the agent's LLM writes a message; the OpenAI form until an LLM is known.
    """

    def __init__(self, to_wire: ToWire | None = None) -> None:
        self.to_wire: ToWire = to_wire or openai_form

    def decode(self, native: ChatMessage) -> Message:
        """Read a message. Raises HistoryError where it is none."""
        if not isinstance(native, ChatMessage):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise HistoryError(f"cannot read a message of type {type(native).__qualname__!r}: expected a ChatMessage")
        role = "user" if is_summary(native) else _ROLES.get(native.role, native.role.value)
        answers = native.additional_kwargs.get("tool_call_id") if role in ("tool", "function") else None
        calls = _calls(native) if role == "assistant" else ()
        return Message(role, _content(native), calls, None if answers is None else str(answers))

    def encode(self, message: Message) -> ChatMessage:
        """A LlamaIndex message of a neutral one."""
        blocks: list[ContentBlock] = list(_blocks(message.content))
        blocks += [
            ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=c.arguments) for c in message.tool_calls
        ]
        more: dict[str, Any] = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
        return ChatMessage(role=_role(message.role), blocks=blocks, additional_kwargs=more)

    def rewrite(self, native: ChatMessage, content: Content) -> ChatMessage:
        """A copy with other content; calls and everything else stay."""
        kept = [b for b in native.blocks if isinstance(b, ToolCallBlock)]
        return native.model_copy(update={"blocks": [*_blocks(content), *kept]})

    def new(self, role: str, content: str) -> ChatMessage:
        """A message of the strategy's own."""
        return ChatMessage(role=_role(role), blocks=[TextBlock(text=content)])

    def wire(self, native: ChatMessage) -> dict[str, Any]:
        """The message as the LLM sends it."""
        return Wired(native, self.to_wire(native))


_ROLES = {MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}
"""What other servers call the assistant."""


def is_summary(message: ChatMessage) -> bool:
    """Whether a memory of ours wrote it in the place of others."""
    return message.additional_kwargs.get(MARK) == SUMMARY


def summary_message(text: str) -> ChatMessage:
    """A summary as LlamaIndex's own memories write it: a system message."""
    return ChatMessage(role=MessageRole.SYSTEM, content=text, additional_kwargs={MARK: SUMMARY})


def alike(a: ChatMessage, b: ChatMessage) -> bool:
    """Whether two messages are the same to a model."""
    if a is b:
        return True
    if a.role != b.role or a.additional_kwargs.get("tool_call_id") != b.additional_kwargs.get("tool_call_id"):
        return False
    return _content(a) == _content(b) and [(c.name, c.arguments) for c in _calls(a)] == [
        (c.name, c.arguments) for c in _calls(b)
    ]


def openai_form(message: ChatMessage) -> dict[str, Any]:
    """The OpenAI form of a message, for LLMs that do not tell their own."""
    wire = LlamaIndexCodec().decode(message).wire()
    return {**wire, "role": "system"} if is_summary(message) else wire


def _role(role: str) -> MessageRole:
    try:
        return MessageRole(role)
    except ValueError:
        raise HistoryError(f"LlamaIndex has no role {role!r}: choose one of {[r.value for r in MessageRole]}") from None


def _content(native: ChatMessage) -> Content:
    # What a call is, and what the model thought, is no content: neither is written there on any wire.
    blocks = [b for b in native.blocks if not isinstance(b, (ToolCallBlock, ThinkingBlock))]
    if all(isinstance(b, TextBlock) for b in blocks):
        # As OpenAI's own LLM joins them, with nothing in between.
        return "".join(b.text for b in blocks if isinstance(b, TextBlock))
    return tuple(
        {"type": "text", "text": b.text} if isinstance(b, TextBlock) else _part(b.model_dump(mode="json"))
        for b in blocks
    )


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    kind = block.get("block_type")
    told = {k: v for k, v in block.items() if k != "block_type" and v is not None}
    # As the wire calls it; the core counts media by their kind, and not by the length of their data.
    return {"type": "file" if kind == "document" else kind, **told}


def _blocks(content: Content) -> list[ContentBlock]:
    if content is None:
        return []
    if isinstance(content, str):
        return [TextBlock(text=content)]
    blocks: list[ContentBlock] = []
    for part in content:
        if part.get("type") != "text":
            raise HistoryError(f"a content part of type {part.get('type')!r} cannot be made a block of LlamaIndex")
        blocks.append(TextBlock(text=str(part.get("text", ""))))
    return blocks


def _calls(native: ChatMessage) -> tuple[ToolCall, ...]:
    # Blocks first, as OpenAI's own LLM prefers them: with both, what `additional_kwargs` holds is not sent.
    blocks = [b for b in native.blocks if isinstance(b, ToolCallBlock)]
    if blocks:
        return tuple(ToolCall(b.tool_call_id or "", b.tool_name, _arguments(b.tool_kwargs)) for b in blocks)
    given = native.additional_kwargs.get("tool_calls")
    return tuple(_call(call) for call in cast("list[Any]", given)) if isinstance(given, list) else ()


def _call(raw: Any) -> ToolCall:
    call: Mapping[str, Any] = raw if isinstance(raw, Mapping) else raw.model_dump()
    function = cast("Mapping[str, Any]", call.get("function") or {})
    return ToolCall(
        str(call.get("id") or ""), str(function.get("name") or ""), _arguments(function.get("arguments") or "")
    )


def _arguments(given: object) -> str:
    return given if isinstance(given, str) else json.dumps(given)
