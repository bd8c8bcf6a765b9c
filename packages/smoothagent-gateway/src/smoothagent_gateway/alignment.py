"""Which conversation a harness means by messages as it keeps them, and which of them are which."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from smoothagent import OpenAICodec
from smoothagent_gateway.sessions import Session, Wire

_END = 200
"""Characters at the end of a text by which it is known: harnesses put the time before it."""
_CODEC = OpenAICodec()


@dataclass(frozen=True, slots=True)
class Aligned:
    """A conversation, and which of its messages are given ones.

    Attributes:
        session: the conversation.
        seen: its messages.
        pairs: which of these is which of the given ones; both grow.
        strangers: given ones before the last pair that it does not have.
        rest: the first of the given ones after the last pair.
    """

    session: Session
    seen: Sequence[Wire]
    pairs: Sequence[tuple[int, int]]
    strangers: Sequence[int]
    rest: int

    @property
    def end(self) -> int:
        """How many of its messages there are up to the last pair, with the results that belong to it."""
        end = self.pairs[-1][0] + 1
        while end < len(self.seen) and self.seen[end].get("role") == "tool":
            end += 1
        return end

    def covered(self, length: int) -> int:
        """How many of the given messages its first ``length`` ones are; they are `strangers` or have a place there."""
        return max((given for mine, given in self.pairs if mine < length), default=-1) + 1


def aligned(conversations: Iterable[tuple[Session, Sequence[Wire]]], messages: Sequence[Wire]) -> Aligned | None:
    """The conversation that has most of these messages, the first of several; None where none has half of them.

    They are not quite as the harness sends them: times stand before a user's texts, ids of calls are written otherwise,
    and what it adds to a request is missing. A conversation whose answers and results between them are others is
    another branch.

    Args:
        conversations: each with its messages.
        messages: those to look for.
    """
    wanted = [_key(m) for m in messages]
    asked = set(wanted)
    best: Aligned | None = None
    for session, seen in conversations:
        keys = [_key(m) for m in seen]
        # Of most conversations nothing has to be compared.
        if 2 * sum(key in asked for key in keys) < len(asked) or not asked & set(keys):
            continue
        blocks = difflib.SequenceMatcher(None, keys, wanted, autojunk=False).get_matching_blocks()
        pairs = [(b.a + i, b.b + i) for b in blocks for i in range(b.size)]
        if 2 * len(pairs) < len(wanted) or (best is not None and len(pairs) <= len(best.pairs)):
            continue
        strangers = _strangers(seen, pairs)
        if strangers is not None:
            best = Aligned(session, seen, pairs, strangers, pairs[-1][1] + 1)
    return best


def _strangers(seen: Sequence[Wire], pairs: Sequence[tuple[int, int]]) -> list[int] | None:
    """Given messages between the pairs that are no other's; None where an answer or a result is between them instead.

    As many as there are on the other side are the same in other words.
    """
    found = list[int]()
    for (mine, given), (next_mine, next_given) in itertools.pairwise([(-1, -1), *pairs]):
        own, others = next_mine - mine - 1, next_given - given - 1
        if others > own:
            found += range(given + 1, next_given)
        elif own > others and mine >= 0 and any(m.get("role") != "user" for m in seen[mine + 1 : next_mine]):
            return None
    return found


def _key(message: Wire) -> tuple[str, ...]:
    """By what a message is known: a result and calls by their ids, else the end of its text."""
    role = str(message.get("role"))
    if role == "tool":
        return (role, _letters(message.get("tool_call_id")))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        ids = (cast("dict[str, Any]", c).get("id") for c in cast("list[Any]", calls) if isinstance(c, dict))
        return (role, *map(_letters, ids))
    return (role, "", " ".join(text_of(message).split())[-_END:])


def _letters(value: object) -> str:
    return "".join(c for c in str(value) if c.isalnum())


def text_of(message: Wire) -> str:
    """A message's text. Raises HistoryError, TypeError or the like where it is none."""
    return _CODEC.decode(message).text
