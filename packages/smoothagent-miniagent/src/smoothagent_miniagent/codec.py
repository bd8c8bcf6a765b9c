"""Mini-Agent's messages in and out of the core, and onto the wire as its own client would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from smoothagent import HistoryError, Message, ToolCall
from smoothagent.message import Content

ToWire = Callable[[Any], dict[str, Any]]
"""How an LLM client writes one message."""


class Wired(dict[str, Any]):
    """A wire mapping that knows which message it was made of."""

    def __init__(self, native: Any, wire: Mapping[str, Any]) -> None:
        super().__init__(wire)
        self.native = native


class MiniAgentCodec:
    """Mini-Agent's ``Message`` objects (``mini_agent/schema/schema.py``), known by their shape.

    Args:
        message: the class of the agent's messages.
        to_wire: how the agent's LLM client writes one; the OpenAI form where it does not tell.
    """

    def __init__(self, message: Callable[..., Any], to_wire: ToWire | None = None) -> None:
        self._message = message
        self._to_wire: ToWire = to_wire or (lambda native: self.decode(native).wire())

    def decode(self, native: Any) -> Message:
        """Read a message. Raises HistoryError where it is none."""
        role, content = getattr(native, "role", None), getattr(native, "content", None)
        if not isinstance(role, str):
            raise HistoryError(
                f"cannot read a message of type {type(native).__qualname__!r}: expected Mini-Agent's Message"
            )
        if isinstance(content, list):
            content = tuple(cast("list[Mapping[str, Any]]", content))
        elif not isinstance(content, str):
            raise HistoryError(f"a {role} message has content of type {type(content).__qualname__!r}")
        thinking = getattr(native, "thinking", None)
        calls: list[Any] = getattr(native, "tool_calls", None) or []
        # The name of a result's tool goes into no request.
        return Message(
            role,
            content,
            tuple(ToolCall(c.id, c.function.name, json.dumps(c.function.arguments)) for c in calls),
            getattr(native, "tool_call_id", None),
            extra={"reasoning": thinking} if thinking else {},
        )

    def encode(self, message: Message) -> Any:
        """A Mini-Agent message of a neutral one. Raises HistoryError for calls that are no JSON objects."""
        given: dict[str, Any] = {"role": message.role, "content": _plain(message.content)}
        if message.tool_calls:
            given["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _object(c.arguments)}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
        return self._message(**given)

    def answer(self, response: Any) -> Any:
        """The message that Mini-Agent's loops make of an answer."""
        return self._message(
            role="assistant",
            content=response.content,
            thinking=response.thinking,
            tool_calls=response.tool_calls,
        )

    def rewrite(self, native: Any, content: Content) -> Any:
        """A copy with other content; calls, thoughts and ids stay."""
        return native.model_copy(update={"content": _plain(content)})

    def new(self, role: str, content: str) -> Any:
        """A message of the strategy's own."""
        return self._message(role=role, content=content)

    def wire(self, native: Any) -> dict[str, Any]:
        """The message as the LLM client sends it."""
        return Wired(native, self._to_wire(native))


def _plain(content: Content) -> str | list[Mapping[str, Any]]:
    return list(content) if isinstance(content, tuple) else content or ""


def _object(arguments: str) -> dict[str, Any]:
    try:
        read = json.loads(arguments)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise HistoryError("a call has arguments that are no JSON object, which Mini-Agent's messages cannot hold")
    return cast("dict[str, Any]", read)
