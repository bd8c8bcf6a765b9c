"""What pieces of lookahead work cost in seconds, learnt while running."""

from __future__ import annotations

from enum import StrEnum

FORGET = 0.9
"""Weight an observation keeps when the next one comes: about ten pieces are remembered."""
_ENOUGH = 0.01
"""Variance of the sizes, over the square of their mean, below which they count as one size."""


class Kind(StrEnum):
    """What a piece does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COPY = "copy"
    """KV from slot to slot."""


class LinearCost:
    """``seconds ≈ fixed + per_token · n``, by least squares over recent pieces.

    Two parameters, because a remote server's round trip would otherwise be taken for the cost of a
    token and shrink pieces to nothing.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._n = self._s = self._nn = self._ns = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was measured yet."""
        return self._weight > 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in one measured piece; impossible values are ignored."""
        if tokens <= 0 or not 0 < seconds < 3600:
            return
        self._weight = self._weight * FORGET + 1
        self._n = self._n * FORGET + tokens
        self._s = self._s * FORGET + seconds
        self._nn = self._nn * FORGET + tokens * tokens
        self._ns = self._ns * FORGET + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """Predicted cost of ``tokens``; 0 while nothing is known."""
        fixed, per_token = self._fit()
        return fixed + per_token * tokens

    def tokens(self, seconds: float) -> int | None:
        """The most tokens predicted to cost at most ``seconds``; None while nothing is known."""
        if not self.known:
            return None
        fixed, per_token = self._fit()
        return max(0, int((seconds - fixed) / per_token))

    @property
    def per_token(self) -> float:
        """Predicted seconds of one more token."""
        return self._fit()[1]

    @property
    def average(self) -> float:
        """Seconds a token over all pieces, their fixed part included; 0 while nothing is known."""
        return self._s / self._n if self.known else 0.0

    @property
    def told_apart(self) -> bool:
        """Whether the fixed part could be told from the cost of a token: pieces of different sizes were seen."""
        return self.known and self._variance() >= _ENOUGH * (self._n / self._weight) ** 2

    @property
    def balanced(self) -> int:
        """Tokens that cost as much as the fixed part; fewer mostly pay for the latter."""
        fixed, per_token = self._fit()
        return int(fixed / per_token) if per_token > 0 else 0

    def _fit(self) -> tuple[float, float]:
        if not self.known:
            return 0.0, 0.0
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        ratio = mean_s / mean_n
        if not self.told_apart:
            return 0.0, ratio
        slope = (self._ns / self._weight - mean_n * mean_s) / self._variance()
        # Neither part may be negative; noise must not make tokens free.
        slope = min(max(slope, 0.2 * ratio), ratio)
        return max(0.0, mean_s - slope * mean_n), slope

    def _variance(self) -> float:
        return self._nn / self._weight - (self._n / self._weight) ** 2


class PieceCosts:
    """Costs of the kinds of pieces, in tool time and beside a decoding main request."""

    def __init__(self) -> None:
        self._costs = {(kind, beside): LinearCost() for kind in Kind for beside in (False, True)}

    def observe(self, kind: Kind, beside: bool, tokens: int, seconds: float) -> None:
        """Take in one finished piece."""
        if kind is not Kind.COPY:
            self._costs[kind, beside].observe(tokens, seconds)

    def idle(self, kind: Kind) -> LinearCost:
        """A piece's own time, where nothing else runs."""
        return self._costs[kind, False]

    def added_token(self, kind: Kind) -> float:
        """Seconds that one token of a piece adds to a main request decoding beside it; 0 while nothing is known.

        Only what grows with the piece counts: its fixed part is the round trip and the wait for the step
        that is under way, during which the main request gets its tokens.
        """
        idle, beside = self._costs[kind, False], self._costs[kind, True]
        if kind is Kind.DECODE:
            # Both decode in the same steps, so a step's cost without the piece is not the piece's doing.
            alone = idle.per_token if idle.known else beside.per_token / 2
            return max(beside.per_token - alone, beside.per_token / 4) if beside.known else alone
        if not idle.known:
            return beside.per_token
        # The average: the pieces of tool time are large, so their fixed part is little of it, and noise cannot hide
        # the cost of a token in that part.
        return max(idle.average, beside.per_token) if beside.told_apart else idle.average
