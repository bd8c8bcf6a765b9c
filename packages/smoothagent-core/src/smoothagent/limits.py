"""The three limits, and how they follow what is measured (docs/programming-model.md, "When it commits")."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smoothagent.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of one conversation.

    Attributes:
        hard: the user's trigger, in tokens of the next prompt.
        keep: tokens that stay verbatim after a summary.
        soft: where preparation begins; None follows ``hard - keep`` and measured growth.
        ceiling: never exceeded while waiting for a late lookahead; None is the smaller of
            window minus reply reserve and 1.25 x hard.
    """

    hard: int
    keep: int = 0
    soft: int | None = None
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.hard <= 0:
            raise ConfigurationError(f"hard limit is {self.hard} tokens: it must be positive")
        if self.keep < 0 or self.keep >= self.hard:
            raise ConfigurationError(
                f"keep is {self.keep} tokens and hard is {self.hard}: keep must be >= 0 and below hard, "
                "or the transformation could never bring the context under its trigger"
            )
        if self.soft is not None and not 0 < self.soft < self.hard:
            raise ConfigurationError(
                f"soft limit is {self.soft} tokens and hard is {self.hard}: soft must be positive and below hard "
                f"(leave it out for {max(1, self.hard - self.keep)})"
            )
        ceiling = self.ceiling or self.default_ceiling()
        if self.soft is not None and self.soft + self.keep > ceiling:
            raise ConfigurationError(
                f"soft limit is {self.soft} tokens and keep is {self.keep}: what comes after soft could not reach keep "
                f"below the ceiling of {ceiling}, so nothing prepared could ever be used (leave soft out for "
                f"{max(1, self.hard - self.keep)})"
            )
        if self.ceiling is not None and self.ceiling < self.hard:
            raise ConfigurationError(
                f"ceiling is {self.ceiling} tokens and hard is {self.hard}: the ceiling must be at least hard "
                f"(leave it out for {self.default_ceiling()})"
            )

    def default_ceiling(self, window: int | None = None, reserve: int = 0) -> int:
        """1.25 x hard, but not above ``window - reserve`` where the window is known."""
        ceiling = self.hard + self.hard // 4
        return ceiling if window is None else max(self.hard, min(ceiling, window - reserve))

    def start(self, growth: Growth) -> int:
        """Tokens at which to start preparing: soft, or a little earlier if it would else be late."""
        if self.soft is not None:
            return self.soft
        if not self.keep:
            return max(1, self.hard - self.hard // 4)
        # What comes from the start on stays verbatim, at most twice ``keep`` of it; a turn may overshoot the trigger.
        most = max(self.keep, 2 * self.keep - math.ceil(growth.per_turn))
        return max(1, self.hard - min(max(self.keep, growth.tokens_during_lookahead()), most))


@dataclass(slots=True)
class Growth:
    """How fast a context grows, and how long its lookahead takes; exponentially weighted.

    Attributes:
        per_turn: tokens a turn, 0 before the first two turns.
        turn_seconds: seconds a turn.
        lookahead_seconds: seconds from starting a lookahead until it was ready.
        tokens: tokens of the context when the last turn began.
        turns: completed turns in it then.
    """

    per_turn: float = 0.0
    turn_seconds: float = 0.0
    lookahead_seconds: float = 0.0
    tokens: int = 0
    turns: int = 0
    _then: float | None = None

    def turn(self, now: float, tokens: int, turns: int) -> None:
        """Note the context at a turn's beginning; a shrinking context starts anew."""
        if self._then is not None and tokens > self.tokens:
            self.per_turn = _ewma(self.per_turn, tokens - self.tokens)
            self.turn_seconds = _ewma(self.turn_seconds, now - self._then)
        self._then, self.tokens, self.turns = now, tokens, turns

    def moved(self, tokens: int, turns: int) -> None:
        """Note the context after a commit."""
        self.tokens, self.turns = tokens, turns

    def turns_until(self, tokens: int) -> int:
        """Turns from the last one's beginning until one begins with at least ``tokens``; at least 1."""
        if self.per_turn <= 0:
            return 1
        return max(1, math.ceil((tokens - self.tokens) / self.per_turn))

    def planned_turns(self, tokens: int) -> int | None:
        """`turns_until`, the later turn where it is uncertain by half a turn; None before growth is known.

        What is prepared for a turn that turns out to be one too late is still of use a turn later; what was
        prepared for one too early is not.
        """
        return self.turns_until(tokens + int(self.per_turn / 2)) if self.per_turn > 0 else None

    def still_to_come(self, tokens: int) -> int:
        """Tokens that the next turn will probably begin with, beyond the ``tokens`` known by now."""
        return max(0, int(self.tokens + self.per_turn) - tokens)

    def lookahead(self, seconds: float) -> None:
        """Note how long a lookahead took until it was ready."""
        self.lookahead_seconds = _ewma(self.lookahead_seconds, seconds)

    def tokens_during_lookahead(self) -> int:
        """Tokens the context will gain while a lookahead of the usual length runs."""
        if self.turn_seconds <= 0:
            return 0
        turns = self.lookahead_seconds / max(self.turn_seconds, _INSTANT)
        return int(self.per_turn * (turns + 1))


_INSTANT = 1e-6
"""Seconds below which a turn takes no time."""


def _ewma(old: float, new: float, weight: float = 0.3) -> float:
    return new if old == 0 else old + weight * (new - old)
