"""Fits the batch-latency model to measured batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from smoothagent_sglang.errors import ProfileError
from smoothagent_sglang.latency import BatchLatency, Load, Residuals

_SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_ENTRIES = 24
"""Most entries of the table."""
_OUTLIER = 6.0
"""Median absolute deviations beyond which a batch was held up by something else."""
_Floats = NDArray[np.float64]


class Measured(NamedTuple):
    """A batch, and the seconds that it took."""

    load: Load
    seconds: float


def fit(batches: Sequence[Measured], *, attention: bool = True) -> BatchLatency:
    """The model that fits best: least squares of relative errors, no time falling with more work.

    Repeats of one load count as their median. Batches that something else has held up are left out, twice over.

    Args:
        batches: measured ones of several sizes; to tell the coefficients apart, decodes of several lengths and chunks
            behind prefixes of several lengths.
        attention: False for the baseline, a model of tokens alone.

    Raises:
        ProfileError: there are too few different ones.
    """
    kept = _medians(b for b in batches if b.seconds > 0 and b.load.tokens > 0)
    sizes = sorted({b.load.tokens for b in kept})
    if len(kept) < 4 or len(sizes) < 2:
        raise ProfileError(
            f"{len(kept)} different batches of {len(sizes)} sizes are too few for a latency profile: record more"
        )
    model = _fitted(kept, attention=attention)
    for _ in range(2):
        errors = np.array([b.seconds / model.estimate(b.load) - 1 for b in kept])
        spread = max(float(np.median(np.abs(errors - np.median(errors)))), 0.005)
        near = [b for b, e in zip(kept, errors, strict=True) if abs(e - np.median(errors)) <= _OUTLIER * spread]
        if len(near) < max(4, len(kept) // 2):
            break
        model = _fitted(near, attention=attention)
    return BatchLatency(model.table, model.decode, model.prefill, residuals(model, batches))


def nonnegative(matrix: NDArray[np.floating[Any]], wanted: NDArray[np.floating[Any]]) -> _Floats:
    """The x >= 0 for which ``matrix @ x`` comes nearest to what is wanted, by least squares."""
    # scipy has no types.
    nnls = cast("Callable[..., tuple[_Floats, float]]", optimize.nnls)  # pyright: ignore[reportUnknownMemberType]
    return nnls(matrix, wanted, maxiter=100 * matrix.shape[1])[0]


def residuals(model: BatchLatency, batches: Iterable[Measured]) -> Residuals:
    """How far measured batches are from what the model says."""
    ratios = np.array([b.seconds / model.estimate(b.load) for b in batches if b.load.tokens > 0])
    if not len(ratios):
        return Residuals()
    errors = np.abs(ratios - 1)
    upper = tuple((share, float(np.quantile(ratios, share))) for share in _SHARES)
    p50, p95 = (float(np.quantile(errors, share)) for share in (0.5, 0.95))
    return Residuals(p50, p95, float(errors.max()), upper, len(ratios))


def _medians(batches: Iterable[Measured]) -> list[Measured]:
    times: dict[Load, list[float]] = {}
    for load, seconds in batches:
        times.setdefault(load, []).append(seconds)
    return [Measured(load, float(np.median(seconds))) for load, seconds in times.items()]


def _fitted(batches: Sequence[Measured], *, attention: bool) -> BatchLatency:
    entries = _entries([b.load.tokens for b in batches])
    seconds = np.array([b.seconds for b in batches])
    columns = [_shares_below(entries, b.load.tokens) for b in batches]
    work = [[b.load.context, b.load.pairs] if attention else [] for b in batches]
    matrix = np.array([c + [float(w) for w in ws] for c, ws in zip(columns, work, strict=True)])
    # Each column of the order of one, or the coefficients (1e-9 s a pair) drown in the table's rounding.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    weighted: _Floats = matrix / scale / seconds[:, None]
    solved = nonnegative(weighted, np.ones(len(batches))) / scale
    # The table is a first time and what each further entry adds to it.
    times = np.cumsum(solved[: len(entries)])
    floor = max(float(times.max()) * 1e-6, 1e-9)
    table = tuple((m, max(float(t), floor)) for m, t in zip(entries, times, strict=True))
    decode, prefill = (float(c) for c in solved[len(entries) :]) if attention else (0.0, 0.0)
    return BatchLatency(table, decode, prefill)


def _entries(tokens: Sequence[int]) -> list[int]:
    """Where the table has an entry: at sizes that were measured, evenly over their logarithms."""
    sizes = sorted(set(tokens))
    if len(sizes) <= _ENTRIES:
        return sizes
    marks = np.geomspace(sizes[0], sizes[-1], _ENTRIES)
    return sorted({min(sizes, key=lambda s: abs(s - mark)) for mark in marks})


def _shares_below(entries: Sequence[int], tokens: int) -> list[float]:
    """How much of each entry's addition a size has: all of those below it, a part of the one it lies in."""
    shares = [1.0]
    for low, high in pairwise(entries):
        last = high == entries[-1]
        share = (tokens - low) / (high - low)
        shares.append(max(0.0, share if last else min(1.0, share)))
    return shares
