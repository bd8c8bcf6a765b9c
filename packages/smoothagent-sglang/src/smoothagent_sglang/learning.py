"""The batch latency of a running server, learned from its own batches.

Without a profile T_GEMM is a straight line, which four sums hold; with one, the profile's times are multiplied by what
the server turns out to take. Either way a new batch counts as much as the last few hundred do, so that it follows a
server whose neighbours come and go.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smoothagent_sglang.fitting import nonnegative
from smoothagent_sglang.latency import BatchLatency, Load

_FORGET = 1 - 1 / 300
_ENOUGH = 6
"""Batches before anything is said."""
_EVERY = 16
"""Batches after which what is known is worked out anew."""
_ODD = 4.0
"""Times what was expected, beyond which a batch was held up by something else, and counts as that much: a server that
has become so much slower is followed all the same."""
_Floats = NDArray[np.float64]
_SCALE = np.array([1.0, 1e2, 1e4, 1e6])
"""Orders of size of the features, so that their sums can be solved."""


class Learner:
    """Takes in measured batches, and says how long others take.

    Args:
        profile: what was profiled before; None to learn it all.

    Attributes:
        latency: the model as known now; None before it is.
        batches: how many were taken in.
    """

    def __init__(self, profile: BatchLatency | None = None) -> None:
        self._profile = profile
        self.latency = profile
        self.batches = 0
        self._products: _Floats = np.zeros((4, 4))
        self._sums: _Floats = np.zeros(4)
        self._factor, self._weight = 0.0, 0.0
        self._since = 0

    def observe(self, load: Load, seconds: float) -> None:
        """A batch took so long."""
        if load.tokens < 1 or seconds <= 0:
            return
        known = self.latency
        if known is not None and self.batches > 4 * _ENOUGH:
            seconds = min(seconds, _ODD * known.estimate(load))
        self.batches += 1
        if self._profile is not None:
            self._scale(self._profile, load, seconds)
            return
        # Relative errors: a long batch counts no more than a short one.
        row = np.array([1.0, load.tokens, load.context, load.pairs]) / _SCALE / seconds
        self._products = self._products * _FORGET + np.outer(row, row)
        self._sums = self._sums * _FORGET + row
        self._since += 1
        if self.batches >= _ENOUGH and (known is None or self._since >= _EVERY):
            self._since = 0
            self._work_out()

    def _scale(self, profile: BatchLatency, load: Load, seconds: float) -> None:
        self._factor = self._factor * _FORGET + seconds / profile.estimate(load)
        self._weight = self._weight * _FORGET + 1
        self._since += 1
        if self._since >= _EVERY:
            self._since = 0
            self.latency = profile.scaled(self._factor / self._weight)

    def _work_out(self) -> None:
        # A little of each, so that what was never seen (no decodes yet) is no free direction.
        products = self._products + np.eye(4) * 1e-9 * float(np.trace(self._products))
        root = np.linalg.cholesky(products)
        solved = nonnegative(root.T, np.linalg.solve(root, self._sums)) / _SCALE
        first, token, decode, prefill = (float(v) for v in solved)
        if first + token > 0:
            # Two entries make a line; it goes on beyond them.
            self.latency = BatchLatency(((1, first + token), (2, first + 2 * token)), decode, prefill)
