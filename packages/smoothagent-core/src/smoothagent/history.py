"""A conversation's history with its hash chain, kept up to date at the cost of what is new."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar, cast

from smoothagent.codec import Codec
from smoothagent.errors import HistoryError
from smoothagent.message import Message, canonical, leading_system, sent_back

M = TypeVar("M")

EMPTY = ""
"""Digest of the empty history."""


class History(Generic[M]):
    """Native messages, what they decode to, and a digest for every prefix.

    ``chain[i]`` digests messages 0..i, so two histories share their first n messages exactly when
    ``digest(n)`` is equal. Messages seen before are recognised by identity; of those changed in place
    only new content in the newest turn is noticed at once, all else by `verified`, which a commit always calls.

    Attributes:
        natives: the framework's own objects.
        messages: the same, decoded.
        sizes: tokens of each message.
        total: their sum.
        assistants: number of assistant messages.
    """

    def __init__(self, codec: Codec[M], count: Callable[[Message], int]) -> None:
        self._codec = codec
        self._count = count
        self.natives: list[M] = []
        self.messages: list[Message] = []
        self.sizes: list[int] = []
        self._chain: list[str] = []
        self._contents: list[object] = []
        self._open: dict[str, list[tuple[int, int]]] = {}
        self.total = 0
        self.assistants = 0

    def __len__(self) -> int:
        return len(self.natives)

    def digest(self, length: int) -> str | None:
        """Digest of the first ``length`` messages; None where there are fewer."""
        if length == 0:
            return EMPTY
        return self._chain[length - 1] if length <= len(self._chain) else None

    @property
    def last_digest(self) -> str:
        """Digest of the whole history."""
        return self._chain[-1] if self._chain else EMPTY

    def digests(self) -> list[str]:
        """Digest of the first 1, 2, … messages."""
        return list(self._chain)

    def update(self, natives: Sequence[M]) -> int:
        """Follow to ``natives``; returns how many leading messages were already known by identity."""
        known = self._unchanged(self._known(natives))
        counted = self._counted(known)
        if known < len(self.natives):
            self._truncate(known)
        for native in islice(natives, known, None):
            self._append(native, counted)
        return known

    def verified(self, natives: Sequence[M], count: Callable[[Message], int]) -> History[M]:
        """A history of ``natives`` decoded and digested anew, trusting no identity."""
        fresh: History[M] = History(self._codec, count)
        counted = self._counted(0)
        for native in natives:
            fresh._append(native, counted)
        return fresh

    def _counted(self, start: int) -> dict[tuple[str, str], int]:
        """Sizes by digest: what is parsed anew on every turn is not counted anew, which may cost a tokenizer's run.

        Reasoning that is sent back counts, and is no part of the digest.
        """
        keys = zip(self._chain[start:], map(_uncounted, self.messages[start:]), strict=True)
        return dict(zip(keys, self.sizes[start:], strict=True))

    def recount(self) -> None:
        """Count all messages again, after the counter was calibrated."""
        self.sizes = [self._count(m) for m in self.messages]
        self.total = sum(self.sizes)

    @property
    def lead(self) -> int:
        """|P|."""
        return leading_system(self.messages)

    def _known(self, natives: Sequence[M]) -> int:
        n = len(self.natives)
        if len(natives) >= n and all(map(operator.is_, self.natives, natives)):
            return n
        known = 0
        for mine, theirs in zip(self.natives, natives, strict=False):
            if mine is not theirs:
                break
            known += 1
        return known

    def _unchanged(self, known: int) -> int:
        """How many of the known ones hold the content they had: the newest turn's may still be filled in, in place."""
        for i in range(known - 1, -1, -1):
            now, then = _content_object(self.natives[i]), self._contents[i]
            if now is not then and now != then:
                known = i
            if self.messages[i].role == "assistant":
                break
        return known

    def _truncate(self, length: int) -> None:
        del self.natives[length:], self.messages[length:], self.sizes[length:], self._chain[length:]
        del self._contents[length:]
        self.total = sum(self.sizes)
        self.assistants = sum(m.role == "assistant" for m in self.messages)
        # Which calls are open depends on everything before, so it is found again by replaying.
        self._open = {}
        for i, message in enumerate(self.messages):
            self._link(i, message)

    def _append(self, native: M, counted: Mapping[tuple[str, str], int]) -> None:
        message = self._codec.decode(native)
        i = len(self.natives)
        link = self._answered(message)
        if link is None and message.role == "tool":
            raise HistoryError(
                f"message {i} is a tool result for call {message.tool_call_id!r}, which no earlier assistant message "
                "makes (or which is answered already): add the assistant message with that call, or drop the result"
            )
        answers = None if link is None else (i - link[0], link[1])
        previous = self._chain[-1] if self._chain else EMPTY
        digest = hashlib.sha256(previous.encode() + canonical(message, answers)).hexdigest()[:32]
        size = counted.get((digest, _uncounted(message))) or self._count(message)
        # Nothing was changed before this: a counter that fails leaves the history as it was.
        self._link(i, message)
        self.natives.append(native)
        self.messages.append(message)
        self.sizes.append(size)
        self._chain.append(digest)
        self._contents.append(_content_object(native))
        self.total += size
        self.assistants += message.role == "assistant"

    def _answered(self, message: Message) -> tuple[int, int] | None:
        """The open call that a tool result answers: (message, call in it)."""
        waiting = self._waiting(message)
        return waiting[-1] if waiting else None

    def _waiting(self, message: Message) -> list[tuple[int, int]] | None:
        """The open calls of a tool result's id, or else those without one (as `smoothagent.turns.answers` says)."""
        if message.role != "tool":
            return None
        return self._open.get(message.tool_call_id or "") or self._open.get("")

    def _link(self, i: int, message: Message) -> None:
        for k, call in enumerate(message.tool_calls):
            self._open.setdefault(call.id, []).append((i, k))
        waiting = self._waiting(message)
        if waiting:
            waiting.pop()


def _uncounted(message: Message) -> str:
    """What the size of a message depends on beyond its digest."""
    return repr(sent_back(message)) if message.extra else ""


def _content_object(native: object) -> object:
    """The object that holds a native message's content; None where there is no telling."""
    if isinstance(native, Mapping):
        return cast("Mapping[str, object]", native).get("content")
    return getattr(native, "content", None)
