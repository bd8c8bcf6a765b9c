"""How long a batch takes (paper, section 4, Eq. 1).

``Est(B) = T_GEMM(M) + α_d · Σ L_j + α_p · Σ A_j``: M forward tokens go through the dense layers, whose time is a
table (flat while weights are read, then linear); each decode reads its L_j tokens of KV cache; each prefill chunk of
q tokens behind a prefix of p attends to ``A = q·p + q·(q+1)/2`` pairs. A model of M alone, the baseline, is the same
without the two attention terms.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from smoothagent_sglang.errors import ProfileError


class Load(NamedTuple):
    """What a batch's time depends on. Loads add up: ``plus``.

    Attributes:
        tokens: forward tokens M, of decodes and chunks.
        context: KV tokens that its decodes read, Σ L_j.
        pairs: query-key pairs that its chunks attend to, Σ A_j.
    """

    tokens: int = 0
    context: int = 0
    pairs: int = 0

    def plus(self, other: Load) -> Load:
        """Both in one batch."""
        return Load(self.tokens + other.tokens, self.context + other.context, self.pairs + other.pairs)


def decode(length: int) -> Load:
    """One decode of a request that has ``length`` tokens."""
    return Load(1, length, 0)


def chunk(tokens: int, prefix: int) -> Load:
    """A prefill chunk of so many tokens behind a cached prefix."""
    return Load(tokens, 0, tokens * prefix + tokens * (tokens + 1) // 2)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors of a fit: measured over estimated, less 1, of the batches it was fitted to or tried on.

    Attributes:
        p50: the median's size.
        p95: the size that 95% are not above.
        largest: the largest one's.
        upper: measured over estimated, as (share of batches, factor that so many are not above).
        batches: how many.
    """

    p50: float = 0.0
    p95: float = 0.0
    largest: float = 0.0
    upper: tuple[tuple[float, float], ...] = ()
    batches: int = 0


@dataclass(frozen=True, slots=True)
class BatchLatency:
    """Eq. 1 with its profiled table and coefficients.

    Args:
        table: (forward tokens, seconds) with rising tokens: T_GEMM. Between two entries and beyond the last it goes
            on in a straight line; below the first it is as that one, since weights are read in any case.
        decode: α_d, seconds for each token of KV cache that a decode reads.
        prefill: α_p, seconds for each query-key pair.
        residuals: how well it fits.

    Raises:
        ProfileError: the table is empty or not rising, a time is not above 0, or a coefficient is negative.
    """

    table: tuple[tuple[int, float], ...]
    decode: float = 0.0
    prefill: float = 0.0
    residuals: Residuals = field(default_factory=Residuals)
    _dense: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.table, self.decode, self.prefill)
        # The policy asks hundreds of times a step: looking up is quicker than searching.
        object.__setattr__(self, "_dense", [self._between(m) for m in range(self.table[-1][0] + 1)])

    def gemm(self, tokens: int) -> float:
        """T_GEMM in seconds; 0 for no tokens at all."""
        dense = self._dense
        if tokens < len(dense):
            return dense[tokens] if tokens else 0.0
        return self._between(tokens)

    def estimate(self, load: Load) -> float:
        """Seconds that a batch is expected to take."""
        tokens, context, pairs = load
        return self.gemm(tokens) + self.decode * context + self.prefill * pairs

    def whole(self, tokens: int, prefix: int, step: int) -> float:
        """Seconds for the prefill of ``tokens`` behind ``prefix``, ``step`` of them at a time, nothing beside them."""
        steps, rest = divmod(tokens, step)
        # What the chunks of a prompt attend to adds up to what the prompt does at once.
        return steps * self.gemm(step) + self.gemm(rest) + self.prefill * chunk(tokens, prefix).pairs

    def upper(self, share: float) -> float:
        """The factor on an estimate that this share of measured batches is not above; 1 where none were measured.

        Args:
            share: in 0–1, as 0.95.
        """
        known = self.residuals.upper
        if not known:
            return 1.0
        shares = [s for s, _ in known]
        return known[min(bisect.bisect_left(shares, share), len(known) - 1)][1]

    def scaled(self, factor: float) -> BatchLatency:
        """The same, every time multiplied."""
        table = tuple((m, t * factor) for m, t in self.table)
        return replace(self, table=table, decode=self.decode * factor, prefill=self.prefill * factor)

    def tokens_alone(self) -> BatchLatency:
        """The baseline: a batch takes what its tokens take, whatever they attend to."""
        return replace(self, decode=0.0, prefill=0.0)

    def _between(self, tokens: int) -> float:
        table = self.table
        if tokens <= table[0][0] or len(table) == 1:
            return table[0][1] if tokens <= table[0][0] else table[0][1] * tokens / table[0][0]
        i = min(bisect.bisect_left(table, (tokens,)), len(table) - 1)
        (m0, t0), (m1, t1) = table[i - 1], table[i]
        return t0 + (t1 - t0) * (tokens - m0) / (m1 - m0)


def _check(table: Sequence[tuple[int, float]], decode: float, prefill: float) -> None:
    if not table:
        raise ProfileError("a latency table has no entries: profile the server again")
    for tokens, seconds in table:
        if tokens < 1 or not 0 < seconds < float("inf"):
            raise ProfileError(f"entry ({tokens} tokens, {seconds} s) of a latency table is impossible: profile again")
    for (m0, t0), (m1, t1) in pairwise(table):
        if m1 <= m0 or t1 < t0:
            raise ProfileError(
                f"entries ({m0} tokens, {t0} s) and ({m1} tokens, {t1} s) of a latency table: tokens must rise, and "
                "more of them take no less time"
            )
    for name, value in (("decode", decode), ("prefill", prefill)):
        if not 0 <= value < float("inf"):
            raise ProfileError(f"the coefficient {name!r} of a latency profile is {value}: it must be 0 or more")
