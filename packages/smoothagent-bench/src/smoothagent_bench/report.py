"""The report: one HTML file that needs nothing else, and the table a terminal shows."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from smoothagent_bench.figures import summarize
from smoothagent_bench.plots import captions, draw_all
from smoothagent_bench.record import Row

COLUMNS = (
    ("commits", "commits", "{:d}"),
    ("sync/ord", "sync_over_ord_p50", "{:.1f}×"),
    ("speedup", "speedup_p50", "{:.1f}×"),
    ("R", "R_p50", "{:.2f}"),
    ("removed", "excess_reduction_mean", "{:.0%}"),
    ("ttft", "ordinary_ratio_p50", "{:.2f}×"),
    ("tbt", "tbt_ratio_p50", "{:.2f}×"),
    ("warm", "warm_hit_ratio_min", "{:.0%}"),
    ("late", "late_commits", "{:d}"),
)
"""What the short table shows: heading, field of ``summary.json``, format."""

LEGEND = (
    ("sync/ord", "a synchronous transform turn, in ordinary turns: the pause (median)"),
    ("speedup", "synchronous transform turn over the one with lookahead (median)"),
    ("R", "transform turn with lookahead, in ordinary turns: 1 and below means no pause is left (median)"),
    ("removed", "how much of the pause lookahead removed (mean); given where it is at least 3 ordinary turns"),
    ("ttft", "wait for the first token in ordinary turns, with lookahead over without (median)"),
    ("tbt", "time between tokens in ordinary turns, with lookahead over without (median)"),
    ("warm", "cached share of the first request after a commit (worst commit)"),
    ("late", "commits that were made before all of their view was warm"),
)


def write_reports(
    rows: Sequence[Row],
    folder: Path,
    *,
    tool_seconds: float,
    title: str,
    environment: Mapping[str, str],
    broken: Mapping[str, Mapping[str, int]] | None = None,
) -> Path:
    """Write ``summary.json``, the plots and ``report.html``; returns the last.

    ``broken`` says how many runs of each strategy and mode broke and were redone.
    """
    summary = {**summarize(rows), "broken_runs": broken or {}}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    pictures = draw_all(rows, folder, tool_seconds=tool_seconds)
    report = folder / "report.html"
    report.write_text(render(summary, pictures, title=title, environment=environment), encoding="utf-8")
    return report


def table(summary: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the short table, its headings first."""
    out = [["strategy", *(heading for heading, _, _ in COLUMNS)]]
    for label, figures in summary["strategies"].items():
        out.append([label, *(_cell(figures[name], form) for _, name, form in COLUMNS)])
    return out


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def render(summary: Mapping[str, Any], pictures: Sequence[Path], *, title: str, environment: Mapping[str, str]) -> str:
    """The HTML page, pictures embedded."""
    described = captions(pictures)
    figures = "".join(
        f'<figure><img src="{_data_uri(path)}" alt="{escape(path.stem)}">'
        f"<figcaption>{escape(described[path])}</figcaption></figure>"
        for path in pictures
    )
    heads, *body = table(summary)
    legend = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in LEGEND)
    facts = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in environment.items())
    page = Template(files("smoothagent_bench").joinpath("report_page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(title),
        lead=escape(_lead(summary)),
        head="".join(f"<th>{escape(h)}</th>" for h in heads),
        body="".join(
            f"<tr><th>{escape(row[0])}</th>" + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>"
            for row in body
        ),
        legend=legend,
        figures=figures,
        facts=facts,
        all=escape(json.dumps(summary, indent=2)),
    )


def _lead(summary: Mapping[str, Any]) -> str:
    """The finding, in a sentence a strategy."""
    sentences: list[str] = []
    for label, figures in summary["strategies"].items():
        sync, r = figures["sync_over_ord_p50"], figures["R_p50"]
        if sync is None or r is None:
            sentences.append(f"{label}: no commit could be compared.")
        else:
            sentences.append(
                f"{label}: a synchronous transform turn costs {sync:.1f} ordinary turns, with lookahead {r:.2f}."
            )
    return " ".join(sentences)


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
