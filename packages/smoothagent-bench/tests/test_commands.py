from __future__ import annotations

from pathlib import Path

import pytest

from smoothagent import cli
from smoothagent_bench import commands


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line a refused command says."""
    assert commands.bench(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("smoothagent: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--strategy", "sumarize"], "unknown strategy 'sumarize': choose from offload, keep-recent"),
        (["--harness", "nosuch"], "unknown harness 'nosuch'"),
        (["--model", "gpt"], "--model gpt needs --base-url"),
        (["--harness", "langchain", "--strategy", "isolate"], "has no isolate: choose from summarize, offload"),
        (["--one-server", "--base-url", "http://127.0.0.1:9/v1"], "leave --lookahead-url out instead"),
        (["--lookahead-url", "http://127.0.0.1:9/v1"], "needs --base-url"),
        (["--engine", "embedded", "--base-url", "http://127.0.0.1:9/v1"], "give one of the two"),
        (["--window-turns", "2,x"], "--window-turns 'x' is no number"),
        (["--strategy", "offload", "--window-turns", "2"], "needs --strategy sliding-window"),
    ],
)
def test_wrong_options_are_one_clear_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(argv, capsys)


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--base-url", "http://127.0.0.1:9/v1", "--out", str(tmp_path)], capsys)
    assert "nothing answers at http://127.0.0.1:9/v1" in said


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert "choose another --out" in refused(["--out", str(tmp_path / "file")], capsys)


@pytest.mark.parametrize("argv", [["--agents", "0"], ["--tool-seconds", "-1"], ["--runs", "x"]])
def test_numbers_out_of_range_are_refused_by_the_parser(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        commands.bench(argv)
    assert exit_.value.code == 2


def test_the_core_command_finds_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert {"bench", "demo"} <= set(capsys.readouterr().out.split())
    assert cli.main(["bench", "--strategy", "sumarize"]) == 2
