"""What each slot holds, as far as this process knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smoothagent.serving.dialects.base import whole

SLACK = 16
"""Tokens a cache may fall short of what is expected (a reply tokenised anew) before the prefix counts as lost."""


class LostError(Exception):
    """The slot no longer holds what was warmed; raised before much is computed again."""

    def __init__(self, cached: int) -> None:
        super().__init__(cached)
        self.cached = cached


class Holdings:
    """Token ids by slot: what was put there, what the server says is there.

    Args:
        lost: told of a slot that no longer held what was put there.
    """

    def __init__(self, lost: Callable[[int], None]) -> None:
        self._tell_lost = lost
        self._warm: dict[int, list[int]] = {}
        self._seen: dict[int, int | None] = {}
        self._guessed: set[int] = set()

    def see(self, slots: Sequence[Mapping[str, Any]]) -> None:
        """The server lists its slots."""
        self._seen = {s["id"]: whole(s.get("n_prompt_tokens")) for s in slots if isinstance(s.get("id"), int)}

    def seen(self, slot: int) -> int | None:
        """Tokens in the slot when the server was last asked, or since."""
        return self._seen.get(slot)

    def have(self, slot: int, ids: Sequence[int]) -> int:
        """How many of ``ids`` need not be computed on the slot."""
        warm = self._warm.get(slot, [])
        seen = self._seen.get(slot)
        if warm and seen is not None and seen < len(warm) - SLACK:
            self.lose(slot, [])
            warm = []
        return common(warm, ids)

    def begin(self, slot: int, ids: list[int]) -> None:
        """Work begins that keeps ``ids`` at most: what does not match is dropped, whether or not it ends well."""
        self._warm[slot] = ids

    def put(self, slot: int, ids: list[int]) -> None:
        """The slot holds ``ids``; how many tokens the server counts there is not known."""
        self._guessed.discard(slot)
        self._warm[slot] = ids
        self._seen.pop(slot, None)

    def fill(self, slot: int, ids: list[int]) -> None:
        """The slot holds exactly ``ids``."""
        self.put(slot, ids)
        self._seen[slot] = len(ids)

    def guess(self, slot: int, ids: list[int]) -> None:
        """The slot may hold ``ids``: the server's first answer tells, and if not nothing was lost."""
        self.put(slot, ids)
        self._guessed.add(slot)

    def lose(self, slot: int, kept: list[int]) -> None:
        """The server says that only ``kept`` is there."""
        self._warm[slot] = kept
        self._seen.pop(slot, None)
        if slot in self._guessed:
            self._guessed.discard(slot)
        else:
            self._tell_lost(slot)

    def forget(self, *slots: int) -> None:
        """What they hold is not known."""
        for slot in slots:
            self._warm.pop(slot, None)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
