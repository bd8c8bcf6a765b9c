"""How a framework's message goes in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from smoothagent.errors import HistoryError
from smoothagent.message import Content, Message, ToolCall

M = TypeVar("M")

_KNOWN = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})


@runtime_checkable
class Codec(Protocol[M]):
    """Translates one framework's messages.

    The runtime hands an untouched message back as the *same object*; only messages that a
    strategy wrote or rewrote go through ``encode``, ``rewrite`` or ``new``.
    """

    def decode(self, native: M) -> Message:
        """Read a framework message. Raises HistoryError where it is none."""
        ...

    def encode(self, message: Message) -> M:
        """Make a framework message of a neutral one that has no native counterpart."""
        ...

    def rewrite(self, native: M, content: Content) -> M:
        """A copy of ``native`` with other content; ids and metadata stay. Never mutates ``native``."""
        ...

    def new(self, role: str, content: str) -> M:
        """A fresh framework message."""
        ...

    def wire(self, native: M) -> dict[str, Any]:
        """The message as it is sent to an OpenAI-compatible server."""
        ...


class OpenAICodec:
    """Accepts mappings, `Message`, and anything with ``model_dump`` (the openai client's own objects).

    New and rewritten messages are plain dicts, except that a rewritten `Message` stays a `Message`
    and a rewritten pydantic object stays of its class (``model_copy``).
    """

    def decode(self, native: Any) -> Message:
        """Read a message; raises HistoryError naming the type where it is none."""
        if isinstance(native, Message):
            return native
        return _from_mapping(_mapping(native))

    def encode(self, message: Message) -> Any:
        """The wire mapping."""
        return message.wire()

    def rewrite(self, native: Any, content: Content) -> Any:
        """A copy with other content."""
        if isinstance(native, Message):
            return native.with_content(content)
        plain = list(content) if isinstance(content, tuple) else content
        if isinstance(native, Mapping):
            return {**cast("Mapping[str, Any]", native), "content": plain}
        if hasattr(native, "model_copy"):
            return native.model_copy(update={"content": plain})
        return {**_mapping(native), "content": plain}

    def new(self, role: str, content: str) -> Any:
        """A plain dict."""
        return {"role": role, "content": content}

    def wire(self, native: Any) -> dict[str, Any]:
        """The mapping that the openai client would send."""
        if isinstance(native, Message):
            return native.wire()
        return dict(_mapping(native))


def _mapping(native: Any) -> Mapping[str, Any]:
    if isinstance(native, Mapping):
        return cast("Mapping[str, Any]", native)
    dump = getattr(native, "model_dump", None)
    if callable(dump):
        # exclude_none mirrors what one may send back: the API refuses e.g. ``audio: null``.
        dumped = cast("dict[str, Any]", dump(exclude_none=True))
        dumped.setdefault("content", None)
        return dumped
    raise HistoryError(
        f"cannot read a message of type {type(native).__qualname__!r}: "
        "pass mappings with 'role' and 'content', smoothagent.Message, objects with model_dump(), or a codec="
    )


def _from_mapping(raw: Mapping[str, Any]) -> Message:
    role = raw.get("role")
    if not isinstance(role, str):
        raise HistoryError(f"a message has role {role!r}: expected a string such as 'user'; its keys are {sorted(raw)}")
    content = raw.get("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        content = tuple(
            cast("Mapping[str, Any]", p) if isinstance(p, Mapping) else {"type": "text", "text": str(p)} for p in parts
        )
    elif content is not None and not isinstance(content, (str, tuple)):
        raise HistoryError(
            f"a {role} message has content of type {type(content).__qualname__!r}: expected text or a list of parts"
        )
    calls = raw.get("tool_calls")
    extra = {k: v for k, v in raw.items() if k not in _KNOWN} if len(raw) > 2 else {}
    return Message(
        role,
        cast("Content", content),
        tuple(map(_call, cast("list[Any]", calls))) if calls else (),
        raw.get("tool_call_id"),
        raw.get("name"),
        extra,
    )


def _call(raw: Any) -> ToolCall:
    call = _mapping(raw)
    # A custom tool's call has ``custom`` with ``input`` where a function's has ``function`` with ``arguments``.
    function = _mapping(call.get("function") or call.get("custom") or {})
    arguments = function.get("arguments", function.get("input", ""))
    text = arguments if isinstance(arguments, str) else repr(arguments)
    return ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), text)


def plain(message: Message) -> Message:
    """The message without its origin, for equality and for storing."""
    return replace(message, origin=None) if message.origin is not None else message
