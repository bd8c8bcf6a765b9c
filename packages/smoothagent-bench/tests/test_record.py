from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_rows import row, run
from smoothagent import ConfigurationError, StoreUnavailableError
from smoothagent_bench.record import Group, ResultsFile, Row, by_run, check_own, check_settings


def test_rows_survive_the_file(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "new" / "folder")
    rows = [*run("none", [0.5, 0.25]), row("lookahead", 0, 1.5, commit=True, lookahead="hit", known_tokens=12)]
    results.append(rows)
    assert results.rows() == rows
    first = json.loads(results.path.read_text(encoding="utf-8").splitlines()[0])
    assert {"strategy", "mode", "agent", "turn", "commit", "commit_s", "ttft_s", "turn_s", "prompt_tokens"} <= set(
        first
    )
    assert {"cached_tokens", "completion_tokens", "tbt_p99_s", "lookahead"} <= set(first)


def test_a_torn_last_line_is_dropped_and_only_its_group_redone(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    results.append(run("none", [0.5, 0.5]))
    results.append(run("sync", [0.5, 0.5]))
    text = results.path.read_text(encoding="utf-8")
    results.path.write_text(text[:-20], encoding="utf-8")
    assert results.complete(agents=1, steps=2) == {Group("s", 0, "none")}
    assert [r.mode for r in results.rows()] == ["none", "none"]


def test_a_group_that_lacks_an_agent_is_redone(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    results.append([*run("none", [0.5]), *run("none", [0.5], agent=1), *run("sync", [0.5])])
    assert results.complete(agents=2, steps=1) == {Group("s", 0, "none")}
    assert len(results.rows()) == 2


def test_a_damaged_line_in_the_middle_is_a_clear_error(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    results.path.write_text('{"strategy": 1}\n' + row("none", 0, 1.0).encode() + "\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="line 1 is no result row"):
        results.rows()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError, match="choose another --out"):
        ResultsFile(tmp_path / "file")


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    check_settings(tmp_path, {"agents": 1, "tool_seconds": 2.0})
    check_settings(tmp_path, {"agents": 1, "tool_seconds": 2.0})
    with pytest.raises(ConfigurationError, match="measured with agents 1, not 2"):
        check_settings(tmp_path, {"agents": 2, "tool_seconds": 2.0})


def test_clearing_forgets_rows_and_settings(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    results.append(run("none", [0.5]))
    check_settings(tmp_path, {"agents": 1})
    results.clear()
    assert results.rows() == []
    check_settings(tmp_path, {"agents": 2})


def test_rows_come_by_run_in_order_of_turns() -> None:
    rows = [row("none", 1, 1.0), row("sync", 0, 1.0), row("none", 0, 1.0)]
    assert [[r.turn for r in turns] for turns in by_run(rows)] == [[0, 1], [0]]


@given(st.integers(0, 10_000), st.floats(0, 1e4, allow_nan=False), st.none() | st.integers(0, 9_999))
def test_encoding_keeps_microseconds(turn: int, seconds: float, cached: int | None) -> None:
    original = row("sync", turn, seconds, cached_tokens=cached)
    decoded = Row.decode(original.encode())
    assert decoded.turn_s == pytest.approx(seconds, abs=1e-6)
    assert (decoded.turn, decoded.cached_tokens) == (turn, cached)


def test_fields_of_a_later_version_are_ignored() -> None:
    line = json.dumps({**json.loads(row("none", 0, 1.0).encode()), "later": 1})
    assert Row.decode(line) == row("none", 0, 1.0)


def test_what_broke_is_counted_and_forgotten_with_the_rest(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    assert results.broken() == {}
    for mode in ("lookahead", "lookahead", "sync"):
        results.note_broken(Group("summarize", 0, mode), "the server died")
    assert results.broken() == {"summarize": {"lookahead": 2, "sync": 1}}
    results.clear()
    assert results.broken() == {}


def test_a_demo_does_not_clear_a_benchmarks_results(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    check_own(tmp_path)
    results.clear()
    check_own(tmp_path)
    check_settings(tmp_path, {"command": "demo", "profile": "demo"})
    (tmp_path / "results.jsonl").write_text("{}\n")
    check_own(tmp_path)
    kinds: list[dict[str, str]] = [{"command": "bench", "profile": "demo"}, {"profile": "paper"}]
    for number, settings in enumerate(kinds):
        other = tmp_path / str(number)
        other.mkdir()
        check_settings(other, settings)
        with pytest.raises(ConfigurationError, match="which would be lost: choose another --out"):
            check_own(other)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "results.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match="which would be lost"):
        check_own(bare)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "settings.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is damaged"):
        check_own(damaged)
