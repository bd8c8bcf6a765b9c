from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from fake_tokens import fake_tokens
from smoothagent import ConfigurationError, Isolate, Message
from smoothagent_bench import tool
from smoothagent_bench.harness import find_harness
from smoothagent_bench.sources import Reader, lay_out
from smoothagent_bench.strategies import KINDS, Variant, build, reached_hard, variants
from smoothagent_bench.tokens import wire_message
from smoothagent_bench.workload import Profile, Script, ScriptWriter, demo_profile, paper_profile


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("workspace")
    return folder, lay_out(folder)


def script(workspace: tuple[Path, list[str]], profile: Profile, kind: str, seed: str = "0/0") -> Script:
    tokens = fake_tokens()
    return ScriptWriter(profile, tokens, Reader(*workspace, tokens.text, seed), "12345678").write(kind)


@pytest.mark.parametrize("window", [4_096, 8_192, 32_768])
def test_a_step_has_the_papers_size_times_the_scale(workspace: tuple[Path, list[str]], window: int) -> None:
    profile, tokens = paper_profile(window), fake_tokens()
    written = script(workspace, profile, "summarize")
    assert len(written.steps) == 28
    sizes: list[int] = []
    for step in written.steps:
        call = tool.call(0, step.read.argv)
        sizes += [
            tokens.count(Message("user", step.user))
            + tokens.count(wire_message({"role": "assistant", "content": "", "tool_calls": [call]}))
            + step.reply
            + tokens.count(wire_message(tool.result(call, step.read.text)))
        ]
    # The task of the first step is a sentence; the others follow the paper's 600–650.
    mean = sum(sizes[1:]) / 27 / profile.scale
    assert 590 <= mean <= 660


def test_every_command_prints_the_planned_text(workspace: tuple[Path, list[str]]) -> None:
    reads = [step.read for step in script(workspace, paper_profile(8_192), "offload").steps]
    assert {read.argv[0] for read in reads} >= {"head", "sed"}
    for read in reads:
        done = subprocess.run(read.argv, cwd=workspace[0], capture_output=True, text=True, check=True)
        assert done.stdout == read.text


def test_the_tool_runs_the_command_and_takes_its_time(workspace: tuple[Path, list[str]]) -> None:
    read = script(workspace, demo_profile(), "summarize").steps[0].read
    call = tool.call(7, read.argv)
    assert asyncio.run(tool.run(call, workspace[0], 0)) == read.text
    assert tool.result(call, read.text) == {"role": "tool", "tool_call_id": "call_7", "content": read.text}


def test_a_failing_command_is_a_clear_error(workspace: tuple[Path, list[str]]) -> None:
    with pytest.raises(RuntimeError, match=r"'head -n 3 missing\.py' ended with status 1"):
        asyncio.run(tool.run(tool.call(0, ("head", "-n", "3", "missing.py")), workspace[0], 0))


def test_the_same_agent_reads_the_same_in_every_mode_and_others_something_else(
    workspace: tuple[Path, list[str]],
) -> None:
    profile = paper_profile(8_192)
    first, again, other = (script(workspace, profile, "summarize", seed) for seed in ("0/0", "0/0", "0/1"))
    assert first == again
    assert [s.read.argv for s in first.steps] != [s.read.argv for s in other.steps]


def test_prompts_are_unique_and_equally_long(workspace: tuple[Path, list[str]]) -> None:
    tokens = fake_tokens()
    systems = {
        ScriptWriter(demo_profile(), tokens, Reader(*workspace, tokens.text, "0")).write("isolate").system
        for _ in range(5)
    }
    assert len(systems) == 5
    assert len({len(s) for s in systems}) == 1


def test_a_sub_agent_has_the_papers_sizes(workspace: tuple[Path, list[str]]) -> None:
    profile, tokens = paper_profile(8_192), fake_tokens()
    sub_agent = script(workspace, profile, "isolate").sub_agent
    assert sub_agent is not None
    assert 170 <= tokens.text(sub_agent.system) <= 200
    assert len(sub_agent.reads) == profile.isolation.reads
    brought = sum(read.tokens for read in sub_agent.reads)
    assert 1_200 <= brought <= 1_500
    assert script(workspace, profile, "summarize").sub_agent is None


@examples(30)
@given(wanted=st.lists(st.integers(8, 400), min_size=1, max_size=40), seed=st.text(max_size=4))
def test_reads_make_up_for_each_other(workspace: tuple[Path, list[str]], wanted: list[int], seed: str) -> None:
    reader = Reader(*workspace, fake_tokens().text, seed)
    reads = [reader.next(tokens) for tokens in wanted]
    # The last read may be off by half a line, or by a file that ended too early.
    off = abs(sum(r.tokens for r in reads) - sum(wanted))
    assert off <= max(wanted) + 40
    for read in reads:
        whole = (workspace[0] / read.path).read_text(encoding="utf-8")
        assert read.text in whole


def test_a_code_base_that_is_used_up_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * 60, encoding="utf-8")
    reader = Reader(tmp_path, ["a.py"], fake_tokens().text, "0")
    with pytest.raises(ConfigurationError, match="run fewer steps"):
        list(map(reader.next, [10] * 60))


def test_profiles_are_possible() -> None:
    for profile in (demo_profile(), paper_profile(8_192), paper_profile(32_768), paper_profile(131_072)):
        assert profile.keep <= profile.soft < profile.hard
        assert profile.hard - profile.keep == profile.soft
        assert profile.summary >= 64
        isolation = profile.isolation
        assert isolation.opens_at + isolation.reads <= isolation.delegates_at < profile.steps - 2
        assert profile.keep_turns < profile.at_turns < profile.steps
    assert paper_profile(131_072).scale == 1
    with pytest.raises(ConfigurationError, match="window is 2048 tokens"):
        paper_profile(2_048)


def test_every_strategy_can_be_built(tmp_path: Path) -> None:
    for variant in variants(KINDS):
        strategy = build(variant, demo_profile(), tmp_path)
        assert strategy.needs_model == (variant.kind == "summarize")


def test_the_untransformed_strategy_leaves_all_alone() -> None:
    history = [Message("system", "s"), Message("user", "u"), Message("assistant", "a")]
    strategy = Isolate()
    assert strategy.predict(history) is None
    assert not strategy.should_commit()
    assert strategy.cut(history) == 1
    assert strategy.rewrite(history) == history


def test_variants() -> None:
    assert [v.label for v in variants(["summarize", "offload", "summarize"])] == ["summarize", "offload"]
    swept = variants(["sliding-window"], window_turns=[2, 8], stride=2)
    assert swept == [
        Variant("sliding-window-2 by 2", "sliding-window", 2, 2),
        Variant("sliding-window-8 by 2", "sliding-window", 8, 2),
    ]
    assert [v.label for v in variants(["sliding-window"])] == ["sliding-window"], "results of strides are not mixed"
    with pytest.raises(ConfigurationError, match="unknown strategy 'sumarize': choose from offload"):
        variants(["sumarize"])
    with pytest.raises(ConfigurationError, match="needs --strategy sliding-window"):
        variants(["offload"], window_turns=[2])


@pytest.mark.parametrize(
    ("kind", "below", "at"),
    [
        ("offload", {"turns": 99, "tokens": 1_199}, {"turns": 0, "tokens": 1_200}),
        ("summarize", {"turns": 99, "tokens": 749}, {"turns": 0, "tokens": 750}),
        ("keep-recent", {"turns": 7, "tokens": 9_999}, {"turns": 8, "tokens": 0}),
        ("sliding-window", {"turns": 3, "tokens": 9_999}, {"turns": 4, "tokens": 0}),
    ],
)
def test_triggers(kind: str, below: dict[str, Any], at: dict[str, Any]) -> None:
    assert not reached_hard(Variant(kind, kind), demo_profile(), **below)
    assert reached_hard(Variant(kind, kind), demo_profile(), **at)


def test_an_unknown_harness_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown harness 'nosuch': installed are .*plain"):
        find_harness("nosuch")
