"""A view frozen at a boundary, and the framework's objects for what a strategy makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from smoothagent.codec import Codec
from smoothagent.message import Message

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[M]):
    """The view at a boundary, frozen, without what is rewritten on every call.

    Attributes:
        messages: decoded.
        natives: the framework's objects, same length.
        facts: the strategy's ``main.strategy_data``.
        digest: digest of the first n messages.
    """

    messages: list[Message]
    natives: list[M]
    facts: dict[str, Any]
    digests: list[str]


class Natives(Generic[M]):
    """Framework messages for neutral ones, each made once, so that what it mints stays the same."""

    def __init__(self, codec: Codec[M]) -> None:
        self._codec = codec
        self._known: dict[int, tuple[Message, M]] = {}

    def learn(self, messages: Sequence[Message], natives: Sequence[M]) -> None:
        """These messages came from these objects."""
        for message, native in zip(messages, natives, strict=True):
            self._known.setdefault(id(message), (message, native))

    def of(self, message: Message) -> M:
        """The object of an untouched message; a rewritten or new one otherwise."""
        found = self._known.get(id(message))
        if found is not None:
            return found[1]
        origin = self._known.get(id(message.origin)) if message.origin is not None else None
        if origin is not None and message.tool_calls == origin[0].tool_calls:
            native = self._codec.rewrite(origin[1], message.content)
        elif isinstance(message.content, str) and not message.tool_calls and message.role != "tool":
            native = self._codec.new(message.role, message.content)
        else:
            native = self._codec.encode(message)
        self._known[id(message)] = (message, native)
        return native

    def wire(self, message: Message) -> dict[str, Any]:
        """The message exactly as the main stream sends it."""
        return self._codec.wire(self.of(message))
