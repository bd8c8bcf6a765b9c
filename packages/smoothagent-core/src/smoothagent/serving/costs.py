"""What a piece of work of n tokens costs in seconds, learnt while running."""

from __future__ import annotations

FORGET = 0.9
"""Weight an observation keeps when the next one comes: about ten pieces are remembered."""


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
    def balanced(self) -> int:
        """Tokens that cost as much as the fixed part; fewer mostly pay for the latter."""
        fixed, per_token = self._fit()
        return int(fixed / per_token) if per_token > 0 else 0

    def _fit(self) -> tuple[float, float]:
        if not self.known:
            return 0.0, 0.0
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        ratio = mean_s / mean_n
        variance = self._nn / self._weight - mean_n * mean_n
        if variance < 0.01 * mean_n * mean_n:
            # Pieces of one size say nothing about the fixed part.
            return 0.0, ratio
        slope = (self._ns / self._weight - mean_n * mean_s) / variance
        # Neither part may be negative; noise must not make tokens free.
        slope = min(max(slope, 0.2 * ratio), ratio)
        return max(0.0, mean_s - slope * mean_n), slope
