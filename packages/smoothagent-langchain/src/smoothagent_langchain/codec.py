"""LangChain messages in and out of the core, and onto the wire as the chat model would write them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from smoothagent import HistoryError, Message, ToolCall
from smoothagent.message import Content

ToWire = Callable[[BaseMessage], dict[str, Any]]
"""How a chat model writes one message."""
Make = Callable[[str], BaseMessage]
"""Makes the framework's message of a text."""


class Wired(dict[str, Any]):
    """A wire mapping that knows which LangChain message it was made of."""

    def __init__(self, native: BaseMessage, wire: Mapping[str, Any]) -> None:
        super().__init__(wire)
        self.native = native


class LangChainCodec:
    """`BaseMessage` objects; new ones get an id at once, so that state reducers know them.

    Attributes:
        to_wire: how the agent's chat model writes a message; the OpenAI form until a model is known.
        written: how a text of the strategy's own (a summary) becomes a message.
    """

    def __init__(self, to_wire: ToWire | None = None, written: Make | None = None) -> None:
        self.to_wire: ToWire = to_wire or openai_form
        self.written: Make = written or _human

    def decode(self, native: BaseMessage) -> Message:
        """Read a message. Raises HistoryError where it is none a model could be sent."""
        if not isinstance(native, BaseMessage):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise HistoryError(f"cannot read a message of type {type(native).__qualname__!r}: expected a BaseMessage")
        role = role_of(native)
        calls = _calls(native) if isinstance(native, AIMessage) else ()
        answers = native.tool_call_id if isinstance(native, ToolMessage) else None
        return Message(role, _content(native), calls, answers, native.name or None)

    def encode(self, message: Message) -> BaseMessage:
        """A LangChain message of a neutral one."""
        content = _plain(message.content)
        match message.role:
            case "user":
                return HumanMessage(content, name=message.name, id=_id())
            case "system":
                return SystemMessage(content, name=message.name, id=_id())
            case "developer":
                return SystemMessage(content, id=_id(), additional_kwargs={"__openai_role__": "developer"})
            case "tool":
                return ToolMessage(content, tool_call_id=message.tool_call_id or "", name=message.name, id=_id())
            case "assistant":
                calls = [_parsed(c) for c in message.tool_calls]
                return AIMessage(content, tool_calls=calls, name=message.name, id=_id())
            case role:
                return ChatMessage(content=content, role=role, id=_id())

    def rewrite(self, native: BaseMessage, content: Content) -> BaseMessage:
        """A copy with other content; id and metadata stay."""
        return native.model_copy(update={"content": _plain(content)})

    def new(self, role: str, content: str) -> BaseMessage:
        """A message of the strategy's own."""
        return self.written(content) if role == "user" else self.encode(Message(role, content))

    def wire(self, native: BaseMessage) -> dict[str, Any]:
        """The message as the chat model sends it."""
        return Wired(native, self.to_wire(native))


def role_of(message: BaseMessage) -> str:
    """Its role on an OpenAI-compatible wire. Raises HistoryError for what is no message to a model."""
    match message:
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case SystemMessage():
            return str(message.additional_kwargs.get("__openai_role__", "system"))
        case ToolMessage():
            return "tool"
        case FunctionMessage():
            return "function"
        case ChatMessage():
            return message.role
        case _:
            raise HistoryError(
                f"a {type(message).__qualname__} is no message that a model is sent: it must not be in the history"
            )


def alike(a: BaseMessage, b: BaseMessage) -> bool:
    """Whether two messages are the same to a model."""
    if a is b:
        return True
    same = a.type == b.type and a.content == b.content and a.name == b.name
    return same and getattr(a, "tool_calls", None) == getattr(b, "tool_calls", None)


def openai_form(message: BaseMessage) -> dict[str, Any]:
    """The OpenAI form of a message, for chat models that do not tell their own."""
    return LangChainCodec().decode(message).wire()


def _human(text: str) -> BaseMessage:
    return HumanMessage(text, id=_id())


def _id() -> str:
    return str(uuid.uuid4())


def _content(native: BaseMessage) -> Content:
    content = native.content
    if isinstance(content, str):
        return content
    return tuple(
        cast("Mapping[str, Any]", p) if isinstance(p, dict) else {"type": "text", "text": str(p)} for p in content
    )


def _plain(content: Content) -> Any:
    return list(content) if isinstance(content, tuple) else content or ""


def _calls(native: AIMessage) -> tuple[ToolCall, ...]:
    # As every OpenAI-compatible chat model of LangChain sends them back: parsed calls first, then invalid ones.
    parsed = [ToolCall(c["id"] or "", c["name"], json.dumps(c["args"], ensure_ascii=False)) for c in native.tool_calls]
    broken = [ToolCall(c["id"] or "", c["name"] or "", c["args"] or "") for c in native.invalid_tool_calls]
    return (*parsed, *broken)


def _parsed(call: ToolCall) -> Any:
    try:
        args: Any = json.loads(call.arguments or "{}")
    except ValueError:
        args = None
    parsed = cast("dict[str, Any]", args) if isinstance(args, dict) else {}
    return {"id": call.id, "name": call.name, "args": parsed, "type": "tool_call"}
