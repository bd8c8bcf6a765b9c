from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from bench_rows import run
from smoothagent_bench.environment import describe
from smoothagent_bench.record import Row
from smoothagent_bench.report import COLUMNS, table, write_reports

FIELDS = {
    *("commits", "sync_over_ord_p50", "speedup_p50", "reduction_mean", "excess_reduction_mean", "R_p50", "R_max"),
    *("ordinary_ratio_p50", "ordinary_ratio_p99", "tbt_ratio_p50", "tbt_ratio_max", "late_commits", "mispredictions"),
    *("worst_turn_s", "warm_hit_ratio_min", "prefilled_tokens", "wasted_token_ratio"),
}


def rows(strategy: str) -> list[Row]:
    return [
        *run("none", [0.5, 0.6, 0.7, 0.8], strategy=strategy),
        *run("sync", [0.5, 0.6, 4.0, 0.5], commits={2}, strategy=strategy),
        *run("lookahead", [0.5, 0.6, 0.4, 0.5], commits={2}, strategy=strategy),
    ]


def test_the_report_needs_no_other_file_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    report = write_reports(
        [*rows("summarize"), *rows("offload")],
        tmp_path,
        tool_seconds=2.0,
        title="A <benchmark>",
        environment={"command": "smoothagent bench --out 'a&b'"},
    )
    page = report.read_text(encoding="utf-8")
    assert "A &lt;benchmark&gt;" in page
    assert "a&amp;b" in page
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "$" not in re.sub(r"base64,[^\"]+", "", page)
    HTMLParser().feed(page)
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "transform-turns.png",
        "turns-summarize.png",
        "turns-offload.png",
    }


def test_summary_json_has_the_documented_fields(tmp_path: Path) -> None:
    write_reports(rows("summarize"), tmp_path, tool_seconds=2.0, title="t", environment={})
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    figures = summary["strategies"]["summarize"]
    assert set(figures) >= FIELDS
    assert set(figures["worst_turn_s"]) == set(figures["prefilled_tokens"]) == {"none", "sync", "lookahead"}
    assert {name for _, name, _ in COLUMNS} <= set(figures)
    heads, cells = table(summary)
    assert len(heads) == len(cells)
    assert cells[0] == "summarize"


def test_a_sweep_of_windows_gets_its_picture(tmp_path: Path) -> None:
    swept = [*rows("sliding-window-2"), *rows("sliding-window-8")]
    write_reports(swept, tmp_path, tool_seconds=2.0, title="t", environment={})
    assert (tmp_path / "sliding-window-fit.png").stat().st_size > 5_000


def test_rows_of_one_mode_alone_still_give_a_report(tmp_path: Path) -> None:
    report = write_reports(run("none", [0.5, 0.6]), tmp_path, tool_seconds=2.0, title="t", environment={})
    assert "no commit could be compared" in report.read_text(encoding="utf-8")


def test_the_environment_says_where_and_with_what() -> None:
    facts = describe(["smoothagent", "demo"], "a server")
    assert facts["command"] == "smoothagent demo"
    assert "usable cores" in facts["cpu"]
    assert {"date", "memory", "python", "smoothagent-core"} <= set(facts)
