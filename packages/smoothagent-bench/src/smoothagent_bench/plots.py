"""The pictures of a benchmark, as PNG files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from smoothagent_bench.figures import Pair, Runs, WindowFit, pairs, window_fits
from smoothagent_bench.record import MODES, Row

COLORS = {"none": "#8d96a3", "sync": "#d1495b", "lookahead": "#1f7a8c"}
NAMES = {"none": "no transformation", "sync": "synchronous", "lookahead": "lookahead"}
WIDTHS = {"none": 2.0, "sync": 3.4, "lookahead": 1.7}
"""Where lines coincide, as context lengths do, the later and thinner one must not hide the other."""

_INK, _GRID = "#2b2f36", "#e3e6ea"


def draw_all(rows: Sequence[Row], folder: Path, *, tool_seconds: float) -> list[Path]:
    """Draw everything there is data for.

    Args:
        rows: all results.
        folder: where the PNG files go.
        tool_seconds: how long a tool took.

    Returns:
        the files, the overview first.
    """
    labels = list(dict.fromkeys(r.strategy for r in rows))
    out: list[Path] = []
    compared = {label: pairs(Runs([r for r in rows if r.strategy == label])) for label in labels}
    if any(compared.values()):
        out.append(_save(bars({k: v for k, v in compared.items() if v}), folder / "transform-turns.png"))
    for label in labels:
        figure = turns(label, [r for r in rows if r.strategy == label])
        out.append(_save(figure, folder / f"turns-{label}.png"))
    fits = window_fits(rows, tool_seconds)
    if len(fits) > 1:
        out.append(_save(windows(fits), folder / "sliding-window-fit.png"))
    return out


def turns(label: str, rows: Sequence[Row]) -> Figure:
    """Context length above, turn time below, over the turns (the paper's Figure 12).

    Lines are medians over runs and agents, thin lines the single runs, dots the commits.
    """
    figure: Any = Figure(figsize=(8.6, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.35))
    runs = Runs(rows)
    for mode in MODES:
        each = runs.each(mode)
        if not each:
            continue
        _lines(above, mode, each, lambda r: r.prompt_tokens)
        _lines(below, mode, each, lambda r: r.turn_s)
    above.set_ylabel("context (tokens)")
    below.set_ylabel("turn time (s)\ncommit + first token")
    below.set_xlabel("turn")
    above.set_title(label, loc="left", fontsize=13, fontweight="bold", color=_INK)
    above.legend(loc="upper left", frameon=False, fontsize=9)
    for axes in (above, below):
        _dress(axes)
        axes.set_ylim(bottom=0)
    below.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _lines(axes: Any, mode: str, runs: Sequence[Sequence[Row]], value: Callable[[Row], float]) -> None:
    by_turn: dict[int, list[float]] = {}
    for run in runs:
        if len(runs) > 1:
            axes.plot([r.turn + 1 for r in run], [value(r) for r in run], color=COLORS[mode], lw=0.6, alpha=0.3)
        for row in run:
            by_turn.setdefault(row.turn + 1, []).append(value(row))
    middle = {turn: statistics.median(values) for turn, values in sorted(by_turn.items())}
    axes.plot(list(middle), list(middle.values()), color=COLORS[mode], lw=WIDTHS[mode], label=NAMES[mode])
    # Commits lie on their own run: at the median line they would float where runs commit at different turns.
    commits = [r for run in runs for r in run if r.commit]
    axes.scatter(
        [r.turn + 1 for r in commits],
        [value(r) for r in commits],
        color=COLORS[mode],
        edgecolor="white",
        linewidth=0.8,
        s=34,
        zorder=3,
    )


def bars(compared: dict[str, list[Pair]]) -> Figure:
    """Transform turns of each strategy in the three modes (the paper's Figure 10); dots are single commits."""
    figure: Any = Figure(figsize=(max(6.5, 1.7 * len(compared) + 1.5), 4.4), layout="constrained")
    axes = figure.subplots()
    pick: dict[str, Callable[[Pair], float]] = {
        "none": lambda p: p.la_ord,
        "sync": lambda p: p.sync,
        "lookahead": lambda p: p.la,
    }
    width = 0.26
    for offset, mode in enumerate(MODES):
        places = [i + (offset - 1) * width for i in range(len(compared))]
        values = [[pick[mode](p) for p in compared[label]] for label in compared]
        heights = [statistics.median(v) for v in values]
        axes.bar(places, heights, width * 0.92, color=COLORS[mode], label=NAMES[mode])
        for place, height, single in zip(places, heights, values, strict=True):
            if len(single) > 1:
                spread = [place + width * 0.5 * (i / (len(single) - 1) - 0.5) for i in range(len(single))]
                axes.scatter(spread, single, s=7, color=_INK, alpha=0.4, linewidth=0, zorder=3)
            axes.annotate(
                f"{height:.2f}",
                (place, max(height, *single)),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=_INK,
            )
    axes.set_xticks(range(len(compared)), list(compared))
    axes.set_xlim(-0.6, len(compared) - 0.4)
    axes.set_ylabel("transform turn (s)")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_title("The turn that pays for a transformation", loc="left", fontsize=13, fontweight="bold", color=_INK)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, frameon=False, fontsize=9)
    _dress(axes)
    axes.tick_params(axis="x", length=0)
    return figure


def windows(fits: Sequence[WindowFit]) -> Figure:
    """Where prefill(window) stops fitting into decode + tool time, and what that does to R."""
    figure: Any = Figure(figsize=(8.6, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    sizes = [f.window_tokens for f in fits]
    above.plot(sizes, [f.prefill_s for f in fits], "o-", color=COLORS["sync"], lw=2, label="prefill of the window")
    above.plot(sizes, [f.hiding_s for f in fits], "s--", color=COLORS["lookahead"], lw=2, label="decode + tool time")
    above.set_ylabel("seconds a turn")
    above.legend(frameon=False, fontsize=9)
    above.set_title("Sliding window: where it stops fitting", loc="left", fontsize=13, fontweight="bold", color=_INK)
    below.plot(sizes, [f.r for f in fits], "o-", color=COLORS["lookahead"], lw=2)
    below.axhline(1, color=COLORS["none"], lw=1, ls="--")
    below.set_ylabel("R = lookahead / ordinary")
    below.set_xlabel("window (tokens)")
    for axes in (above, below):
        _dress(axes)
        axes.set_ylim(bottom=0)
    return figure


def _dress(axes: Any) -> None:
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b9bfc7")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.yaxis.label.set_color(_INK)
    axes.xaxis.label.set_color(_INK)


def _save(figure: Figure, path: Path) -> Path:
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))
    return path


def captions(paths: Iterable[Path]) -> dict[Path, str]:
    """A sentence under each picture."""
    out: dict[Path, str] = {}
    for path in paths:
        if path.stem == "transform-turns":
            out[path] = (
                "Median transform turn of each strategy; dots are single commits. “No transformation” is the same "
                "turn without one (for isolate, the sub-agent's second turn)."
            )
        elif path.stem == "sliding-window-fit":
            out[path] = "Lookahead can hide a window's prefill only while it fits into a turn's decoding and tool time."
        else:
            out[path] = "Context length and turn time; bold lines are medians over runs and agents, dots are commits."
    return out
