"""The ceiling: tokens that an uncommitted request never reaches while a lookahead is late (the law, 3)."""

from __future__ import annotations

from smoothagent.limits import Limits


class Ceiling:
    """Follows the user's ceiling, the trigger and the server's window, whichever are known.

    A strategy that names no token trigger has a ceiling all the same: a quarter above where it first was due.

    Args:
        ceiling: the user's own, which nothing overrides.
        hard: the strategy's trigger in tokens, None where it has another.
    """

    def __init__(self, ceiling: int | None, hard: int | None) -> None:
        self._given = ceiling
        self._hard = hard
        self._default = Limits(hard).default_ceiling() if hard else None
        self._due_at: int | None = None

    def window(self, tokens: int) -> None:
        """The server's context window; a sixteenth of it is left to the reply."""
        reserve = tokens // 16
        hard = self._hard
        self._default = Limits(hard).default_ceiling(tokens, reserve) if hard is not None else tokens - reserve

    def due(self, tokens: int) -> None:
        """The trigger is reached, at ``tokens``; only the first time since the last commit counts."""
        if self._due_at is None:
            self._due_at = tokens

    def committed(self) -> None:
        """The trigger is met."""
        self._due_at = None

    def reached(self, tokens: int) -> bool:
        """Whether a request of ``tokens`` would reach it."""
        if self._given is not None:
            return tokens >= self._given
        if self._default is not None and tokens >= self._default:
            return True
        return self._hard is None and self._due_at is not None and tokens >= self._due_at + self._due_at // 4
