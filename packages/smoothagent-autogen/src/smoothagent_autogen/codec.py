"""AutoGen messages in and out of the core, and onto the wire as the model client would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autogen_core import FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)

from smoothagent import HistoryError, Message, ToolCall
from smoothagent.message import Content

SOURCE = "summary"
"""The source of messages that a strategy writes; model clients send it as ``name``, so it never changes."""

ToWire = Callable[[LLMMessage], dict[str, Any]]
"""How a model client writes one message."""


class Wired(dict[str, Any]):
    """A wire mapping that knows which message it was made of."""

    def __init__(self, native: LLMMessage, wire: Mapping[str, Any]) -> None:
        super().__init__(wire)
        self.native = native


class AutoGenCodec:
    """`LLMMessage` objects; those with the results of several calls are taken apart before (`Flattening`).

    Attributes:
        to_wire: how the agent's model client writes a message; the OpenAI form until a client is known.
    """

    def __init__(self, to_wire: ToWire | None = None) -> None:
        self.to_wire: ToWire = to_wire or openai_form

    def decode(self, native: LLMMessage) -> Message:
        """Read a message. Raises HistoryError where it is none."""
        message: object = native
        match message:
            case SystemMessage():
                return Message("system", message.content)
            case UserMessage():
                return Message("user", _content(message.content), name=message.source)
            case AssistantMessage():
                if isinstance(message.content, str):
                    return Message("assistant", message.content)
                calls = tuple(ToolCall(c.id, c.name, c.arguments) for c in message.content)
                return Message("assistant", message.thought, calls)
            case FunctionExecutionResultMessage():
                if len(message.content) != 1:
                    raise HistoryError(f"a message with {len(message.content)} results: the core takes one at a time")
                return Message("tool", message.content[0].content, tool_call_id=message.content[0].call_id)
            case _:
                pass
        raise HistoryError(
            f"cannot read a message of type {type(message).__qualname__!r}: expected one of AutoGen's LLMMessage types"
        )

    def encode(self, message: Message) -> LLMMessage:
        """An AutoGen message of a neutral one. Raises HistoryError for a role that AutoGen does not have."""
        match message.role:
            case "system" | "developer":
                return SystemMessage(content=message.text)
            case "user":
                return UserMessage(content=_plain(message.content), source=message.name or SOURCE)
            case "assistant":
                if not message.tool_calls:
                    return AssistantMessage(content=message.text, source=SOURCE)
                calls = [FunctionCall(id=c.id, name=c.name, arguments=c.arguments) for c in message.tool_calls]
                return AssistantMessage(content=calls, thought=message.text or None, source=SOURCE)
            case "tool":
                result = FunctionExecutionResult(content=message.text, name="", call_id=message.tool_call_id or "")
                return FunctionExecutionResultMessage(content=[result])
            case _:
                pass
        raise HistoryError(f"AutoGen has no role {message.role!r}: expected system, user, assistant or tool")

    def rewrite(self, native: LLMMessage, content: Content) -> LLMMessage:
        """A copy with other content; calls, sources and call ids stay."""
        text = _plain(content)
        match native:
            case AssistantMessage() if not isinstance(native.content, str):
                return native.model_copy(update={"thought": text or None})
            case FunctionExecutionResultMessage():
                result = native.content[0].model_copy(update={"content": text})
                return native.model_copy(update={"content": [result]})
            case _:
                return native.model_copy(update={"content": text})

    def new(self, role: str, content: str) -> LLMMessage:
        """A message of the strategy's own."""
        return self.encode(Message(role, content))

    def wire(self, native: LLMMessage) -> dict[str, Any]:
        """The message as the model client sends it."""
        return Wired(native, self.to_wire(native))


def openai_form(message: LLMMessage) -> dict[str, Any]:
    """The OpenAI form of a message, for clients that do not tell their own."""
    return AutoGenCodec().decode(message).wire()


def merged(systems: Sequence[LLMMessage]) -> str | None:
    """The system text that AutoGen's clients make of leading system messages; None where there is none."""
    # As AutoGen's OpenAI client joins them, one included.
    return "".join(f"{m.content}\n" for m in systems if isinstance(m, SystemMessage)).rstrip() or None


def leading(messages: Sequence[LLMMessage]) -> int:
    """How many system messages come first."""
    return next((i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages))


def _content(content: str | Sequence[str | Image]) -> Content:
    if isinstance(content, str):
        return content
    return tuple({"type": "text", "text": p} if isinstance(p, str) else dict(p.to_openai_format()) for p in content)


def _plain(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    kinds = sorted({str(part.get("type")) for part in content} - {"text"})
    if kinds:
        raise HistoryError(f"content parts of type {', '.join(kinds)} cannot be made AutoGen's: a strategy wrote them")
    return "".join(str(part.get("text") or "") for part in content)
