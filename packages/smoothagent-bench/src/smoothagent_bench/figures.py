"""From rows to the figures that docs/benchmark.md explains ("What the figures mean"). Pure: no clock, no I/O.

A *transform turn* is the slowest turn from reaching the trigger to the commit, so that a lookahead that is
late cannot hide in the turns before. ``ord`` is what that turn costs without any transformation: the same turn
of the same agent and run in mode ``none`` (for a sub-agent, which has no counterpart there, its own second
turn in mode ``sync``). ``sync`` and ``la`` are transform turns of the same commit, counted from the run's
start, in the two modes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smoothagent_bench.record import MODES, Row, by_run

WORTH_HIDING = 3.0
"""excess_reduction is only given where a synchronous transform turn costs this many ordinary turns."""

ENOUGH_FOR_P99 = 30
"""Below this many samples a 99th percentile is the maximum by another name, and is not given."""


class Episode(NamedTuple):
    """From reaching the trigger to the commit.

    Attributes:
        first: turn at which the trigger was reached.
        commit: the row of the commit.
        slowest: the row of the transform turn.
    """

    first: int
    commit: Row
    slowest: Row


@dataclass(frozen=True, slots=True)
class Pair:
    """One commit in both modes, with the ordinary turns at the same places. Seconds.

    Attributes:
        la: transform turn with lookahead.
        sync: transform turn without.
        la_ord: ordinary turn in the place of ``la``.
        sync_ord: ordinary turn in the place of ``sync``.
    """

    la: float
    sync: float
    la_ord: float
    sync_ord: float

    @property
    def r(self) -> float:
        """R: a transform turn with lookahead over an ordinary one."""
        return self.la / self.la_ord

    @property
    def sync_over_ord(self) -> float:
        """What a synchronous transformation costs, in ordinary turns."""
        return self.sync / self.sync_ord

    @property
    def speedup(self) -> float:
        """Synchronous over lookahead."""
        return self.sync / self.la

    @property
    def reduction(self) -> float:
        """The share of the synchronous turn that is saved."""
        return 1 - self.la / self.sync

    @property
    def excess_reduction(self) -> float | None:
        """The share of what a transformation adds to a turn that is saved; None where it adds little."""
        if self.sync < WORTH_HIDING * self.sync_ord:
            return None
        return 1 - max(0.0, self.la - self.la_ord) / (self.sync - self.sync_ord)


def episodes(run: Sequence[Row]) -> list[Episode]:
    """The transformations of one run, whose rows are in order of turns.

    A run that ends before its commit has no episode for it: `uncommitted` counts those.
    """
    out: list[Episode] = []
    since: list[Row] = []
    for row in run:
        if row.reached_hard or row.commit:
            since.append(row)
        if row.commit:
            out.append(Episode(since[0].turn, row, max(since, key=lambda r: r.turn_s)))
            since = []
    return out


def uncommitted(run: Sequence[Row]) -> int:
    """Turns at the end of a run that had reached the trigger, without a commit."""
    count = 0
    for row in reversed(run):
        if row.commit or not row.reached_hard:
            break
        count += 1
    return count


class Runs:
    """The rows of one strategy, by mode, run and agent."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._runs = {(r[0].mode, r[0].run, r[0].agent): r for r in by_run(list(rows))}

    def compared(self) -> list[tuple[int, int]]:
        """(run, agent) of all that were run with lookahead, in order."""
        return sorted((run, agent) for mode, run, agent in self._runs if mode == "lookahead")

    def of(self, mode: str, key: tuple[int, int]) -> list[Row]:
        """One run's rows; none where it is missing."""
        return self._runs.get((mode, *key), [])

    def all(self, mode: str) -> list[Row]:
        """All rows of a mode."""
        return [row for (m, _, _), run in self._runs.items() if m == mode for row in run]

    def each(self, mode: str) -> list[list[Row]]:
        """All runs of a mode."""
        return [run for (m, _, _), run in self._runs.items() if m == mode]


def pairs(runs: Runs) -> list[Pair]:
    """All commits that were made in both modes and have an ordinary turn to compare with."""
    out: list[Pair] = []
    for key in runs.compared():
        both = zip(episodes(runs.of("lookahead", key)), episodes(runs.of("sync", key)), strict=False)
        for ahead, plain in both:
            la_ord, sync_ord = (_ordinary(runs, key, e) for e in (ahead, plain))
            if la_ord and sync_ord:
                out.append(Pair(ahead.slowest.turn_s, plain.slowest.turn_s, la_ord, sync_ord))
    return out


def _ordinary(runs: Runs, key: tuple[int, int], episode: Episode) -> float | None:
    turn = episode.slowest.turn
    if episode.commit.delegated:
        return _turn_s(runs.of("sync", key), turn + 1)
    return _turn_s(runs.of("none", key), turn)


def _turn_s(run: Sequence[Row], turn: int) -> float | None:
    return next((r.turn_s for r in run if r.turn == turn), None)


class Twin(NamedTuple):
    """An ordinary turn with lookahead, and the same turn without."""

    ahead: Row
    plain: Row


def ordinary_twins(runs: Runs) -> list[Twin]:
    """Ordinary turns of the lookahead mode beside their counterparts.

    Before the first commit those of ``none``; after it those of ``sync``, whose context is as short, so that
    a shorter context does not flatter lookahead. Turns of an episode, in either mode, are not ordinary.
    """
    out: list[Twin] = []
    for key in runs.compared():
        ahead = runs.of("lookahead", key)
        first = min((e.first for e in episodes(ahead)), default=len(ahead))
        none = {r.turn: r for r in runs.of("none", key)}
        sync = {r.turn: r for r in runs.of("sync", key) if not _in_episode(r)}
        for row in ahead:
            plain = none if row.turn < first else sync
            if not _in_episode(row) and row.turn in plain:
                out.append(Twin(row, plain[row.turn]))
    return out


def control_twins(runs: Runs) -> list[Twin]:
    """Turns before the first commit in ``sync``, beside the same in ``none``: nothing was done differently there.

    How far their ratios are from 1 is what the machine's own noise does to any ratio measured on it.
    """
    out: list[Twin] = []
    for key in runs.compared():
        none = {r.turn: r for r in runs.of("none", key)}
        for row in runs.of("sync", key):
            if _in_episode(row):
                break
            if row.turn in none:
                out.append(Twin(row, none[row.turn]))
    return out


def _in_episode(row: Row) -> bool:
    return row.commit or row.reached_hard


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of ``summary.json``."""
    labels = dict.fromkeys(row.strategy for row in rows)
    return {"strategies": {label: strategy_figures([r for r in rows if r.strategy == label]) for label in labels}}


def strategy_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of one strategy; None where there is nothing to compute one from."""
    runs = Runs(rows)
    ahead = runs.all("lookahead")
    compared = pairs(runs)
    excess = [e for e in (p.excess_reduction for p in compared) if e is not None]
    return {
        "commits": sum(r.commit for r in ahead),
        "compared_commits": len(compared),
        "sync_over_ord_p50": _median([p.sync_over_ord for p in compared]),
        "speedup_p50": _median([p.speedup for p in compared]),
        "reduction_mean": _mean([p.reduction for p in compared]),
        "excess_reduction_mean": _mean(excess),
        "excess_commits": len(excess),
        "R_p50": _median([p.r for p in compared]),
        "R_max": max((p.r for p in compared), default=None),
        **_ordinary_figures(ordinary_twins(runs)),
        "control": _ordinary_figures(control_twins(runs)),
        "late_commits": sum(r.late_commits for r in ahead),
        "deferred_commits": sum(e.first < e.commit.turn for run in runs.each("lookahead") for e in episodes(run)),
        "missed_commits": sum(r.lookahead == "miss" for r in ahead),
        "uncommitted_turns": sum(uncommitted(run) for run in runs.each("lookahead")),
        "mispredictions": sum(r.mispredictions for r in ahead),
        "failures": sum(r.failures for r in ahead),
        "worst_turn_s": {m: max((r.turn_s for r in runs.all(m)), default=None) for m in MODES},
        "wall_s": {m: _mean([run[-1].elapsed_s for run in runs.each(m)]) for m in MODES},
        "warm_hit_ratio_min": warm_hit_ratio_min(ahead),
        "prefilled_tokens": {m: prefilled_tokens(runs.all(m)) for m in MODES},
        "wasted_token_ratio": wasted_token_ratio(ahead),
    }


def _ordinary_figures(twins: Sequence[Twin]) -> dict[str, Any]:
    waits = [t.ahead.turn_s / t.plain.turn_s for t in twins if t.plain.turn_s > 0]
    gaps = [t.ahead.tbt_mean_s / t.plain.tbt_mean_s for t in twins if t.plain.tbt_mean_s > 0]
    return {
        "ordinary_turns": len(twins),
        "ordinary_ratio_p50": _median(waits),
        "ordinary_ratio_p99": p99(waits),
        "ordinary_ratio_max": max(waits, default=None),
        "tbt_ratio_p50": _median(gaps),
        "tbt_ratio_max": max(gaps, default=None),
    }


def warm_hit_ratio_min(rows: Iterable[Row]) -> float | None:
    """The coldest commit: cached tokens over the tokens of its view known at the last boundary, at most 1."""
    rows = list(rows)
    if not reports_cached(rows):
        return None
    return min(
        (min(1.0, (r.cached_tokens or 0) / r.known_tokens) for r in rows if r.commit and r.known_tokens), default=None
    )


def reports_cached(rows: Sequence[Row]) -> bool:
    """Whether the server tells cached tokens; servers that do leave the field out where they found none."""
    return any(r.cached_tokens is not None for r in rows)


def prefilled_tokens(rows: Iterable[Row]) -> int | None:
    """Tokens that the server computed for prompts, the background's included; None where it does not say.

    The request of a synchronous summary is not the agent's own call and is not in it: with a prefix cache
    that is one question.
    """
    rows = list(rows)
    if not reports_cached(rows):
        return None
    return sum(r.prompt_tokens - (r.cached_tokens or 0) + r.background_prefilled for r in rows)


def wasted_token_ratio(rows: Iterable[Row]) -> float | None:
    """The share of the background's tokens that was given up; None where it had none."""
    background = wasted = 0
    for row in rows:
        background += row.background_prefilled + row.background_generated
        wasted += row.wasted
    return min(1.0, wasted / background) if background else None


class WindowFit(NamedTuple):
    """How a window of one size fares.

    Attributes:
        label: the strategy's label.
        window_tokens: median prompt after a commit.
        prefill_s: median synchronous transform turn: prefill of the window.
        hiding_s: median time to hide it in: the reply's decoding and the tool.
        r: median R.
    """

    label: str
    window_tokens: float
    prefill_s: float
    hiding_s: float
    r: float


def window_fits(rows: Sequence[Row], tool_seconds: float) -> list[WindowFit]:
    """The sliding windows of different sizes, smallest first: where prefill(window) stops fitting."""
    out: list[WindowFit] = []
    for label in dict.fromkeys(r.strategy for r in rows if r.strategy.startswith("sliding-window")):
        mine = [r for r in rows if r.strategy == label]
        runs = Runs(mine)
        compared = pairs(runs)
        commits = [r for r in runs.all("sync") if r.commit]
        if not compared or not commits:
            continue
        decode = [r.tbt_mean_s * r.completion_tokens for r in runs.all("none")]
        out.append(
            WindowFit(
                label,
                statistics.median(r.prompt_tokens for r in commits),
                statistics.median(r.turn_s for r in commits),
                statistics.median(decode) + tool_seconds,
                statistics.median(p.r for p in compared),
            )
        )
    return sorted(out, key=lambda f: f.window_tokens)


def p99(values: Sequence[float]) -> float | None:
    """99th percentile by nearest rank; None below `ENOUGH_FOR_P99` values."""
    if len(values) < ENOUGH_FOR_P99:
        return None
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
