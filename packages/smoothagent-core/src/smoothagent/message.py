"""One neutral message, and what of it counts as the same on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Parts = tuple[Mapping[str, Any], ...]
"""Multi-part content as the OpenAI API sends it; unknown parts are opaque and preserved."""

Content = str | Parts | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call an assistant message makes.

    Attributes:
        id: the framework's id; names the call its result answers, never part of the digest.
        name: the tool's name.
        arguments: JSON text exactly as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Message:
    """A chat message, independent of any framework.

    Attributes:
        role: ``system``, ``developer``, ``user``, ``assistant`` or ``tool``.
        content: text, parts, or None.
        tool_calls: calls made by an assistant message.
        tool_call_id: the call a ``tool`` message answers.
        name: the optional wire field ``name``.
        extra: wire fields we do not know, preserved on the way out.
        origin: the message this one was rewritten from, so that a codec can keep the
            framework's own fields (ids, metadata) on a rewritten message.
    """

    role: str
    content: Content = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: Message | None = field(default=None, compare=False, repr=False)

    def with_content(self, content: Content) -> Message:
        """Return this message with other content, remembering where it came from."""
        return replace(self, content=content, origin=self.origin or self)

    @property
    def text(self) -> str:
        """All text of the content; parts that are not text are skipped."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(p.get("text") or "") for p in self.content if p.get("type") == "text")

    def wire(self) -> dict[str, Any]:
        """The message as an OpenAI chat-completions mapping."""
        content = self.content if not isinstance(self.content, tuple) else list(self.content)
        out: dict[str, Any] = {"role": self.role, "content": content, **self.extra}
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out


def is_system(message: Message) -> bool:
    """Whether a message belongs to P when it leads the history."""
    return message.role in ("system", "developer")


def leading_system(history: Sequence[Message]) -> int:
    """|P|: the number of leading system messages."""
    n = 0
    for message in history:
        if not is_system(message):
            break
        n += 1
    return n


SENT_BACK = ("reasoning_content", "reasoning", "refusal", "function_call")
"""Fields besides content that a template prints where they are sent back."""


OTHER_CONTENT = ("function_call", "refusal", "audio")
"""Fields that are content, too, in messages that have them."""


def sent_back(message: Message) -> list[Any]:
    """The values of `SENT_BACK`; None where a field is missing."""
    return [message.extra.get(key) for key in SENT_BACK]


def rendered(content: Content) -> str | list[dict[str, Any]]:
    """Content as a template prints it: one text is the same in a part of its own, None is no text.

    ``cache_control`` marks, which some clients move from message to message, print nothing.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{k: v for k, v in part.items() if k != "cache_control"} for part in content]
    if len(parts) == 1 and parts[0].keys() == {"type", "text"} and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def alike(a: Message, b: Message, *, reasoning: bool = True) -> bool:
    """Whether two messages have the same content on the wire; ids do not count, as in `canonical`.

    Args:
        a: one.
        b: the other.
        reasoning: whether reasoning that is sent back (`SENT_BACK`) counts, as it does for a prompt's tokens.
    """
    if a is b:
        return True
    if a.role != b.role or a.name != b.name or len(a.tool_calls) != len(b.tool_calls):
        return False
    if a.content != b.content and rendered(a.content) != rendered(b.content):
        return False
    if a.extra or b.extra:
        keys = SENT_BACK if reasoning else OTHER_CONTENT
        if any((a.extra.get(key) or None) != (b.extra.get(key) or None) for key in keys):
            return False
    return all(x.name == y.name and x.arguments == y.arguments for x, y in zip(a.tool_calls, b.tool_calls, strict=True))


def shared(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Length of the longest common prefix, by content."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if not alike(x, y)), min(len(a), len(b)))


_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), sort_keys=True, default=repr).encode


def canonical(message: Message, answers: tuple[int, int] | None) -> bytes:
    """What of a message counts: role, content as rendered, tool names and arguments, and which call a result answers.

    What else is content (`OTHER_CONTENT`) counts where there is any.

    Id strings, usage, metadata and reasoning do not count: frameworks mint and rewrite those, or send them for a
    while. Lone surrogates and NULs are digested like any other text.

    Args:
        message: the message.
        answers: for a tool result, (messages back to its call, index of the call there);
            None where it answers no known call.
    """
    content = rendered(message.content)
    # Text is not escaped, which would cost most of a hook; lengths keep the encoding unambiguous.
    body = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else _encode(content).encode("ascii")
    kind = "text" if isinstance(content, str) else "parts"
    others = [(key, message.extra[key]) for key in OTHER_CONTENT if message.extra.get(key)] if message.extra else []
    rest = (
        _encode([[(c.name, c.arguments) for c in message.tool_calls], message.name, *others])
        if message.tool_calls or message.name or others
        else ""
    )
    return (
        f"{len(message.role)}:{message.role}{kind}{answers}{len(rest)}:{rest}{len(body)}:".encode(
            "utf-8", "surrogatepass"
        )
        + body
    )
