from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_rows import row, run
from smoothagent_bench import figures
from smoothagent_bench.figures import Pair, Runs, episodes, ordinary_twins, p99, pairs, strategy_figures, summarize
from smoothagent_bench.record import Row

# One agent, five turns. Turn 3 reaches the trigger: sync pays 4.0 s there; lookahead goes on for one
# turn (0.9 s), commits in turn 4 (0.4 s).
NONE = run("none", [0.5, 0.6, 0.7, 0.8, 1.0])
SYNC = run("sync", [0.5, 0.6, 0.7, 4.0, 0.5], commits={3})
AHEAD = run("lookahead", [0.55, 0.6, 0.7, 0.9, 0.4], commits={4}, reached={3})


def test_transform_turn_is_the_slowest_from_trigger_to_commit() -> None:
    (episode,) = episodes(AHEAD)
    assert (episode.first, episode.commit.turn, episode.slowest.turn) == (3, 4, 3)


def test_pair_by_hand() -> None:
    (pair,) = pairs(Runs([*NONE, *SYNC, *AHEAD]))
    assert pair == Pair(la=0.9, sync=4.0, la_ord=0.8, sync_ord=0.8)
    assert pair.r == pytest.approx(1.125)
    assert pair.sync_over_ord == pytest.approx(5.0)
    assert pair.speedup == pytest.approx(4.0 / 0.9)
    assert pair.reduction == pytest.approx(1 - 0.9 / 4.0)
    assert pair.excess_reduction == pytest.approx(1 - 0.1 / 3.2)


def test_each_mode_is_compared_with_the_turn_in_its_own_place() -> None:
    ahead = run("lookahead", [0.5, 0.6, 0.7, 0.8, 0.7], commits={4}, reached={3})
    slower = [r for r in ahead if r.turn != 3] + [row("lookahead", 3, 0.6, reached_hard=True)]
    (pair,) = pairs(Runs([*NONE, *SYNC, *slower]))
    assert (pair.la, pair.la_ord, pair.sync_ord) == (0.7, 1.0, 0.8)


def test_excess_reduction_is_not_given_where_sync_costs_little() -> None:
    assert Pair(la=1.0, sync=2.9, la_ord=1.0, sync_ord=1.0).excess_reduction is None
    assert Pair(la=1.0, sync=3.0, la_ord=1.0, sync_ord=1.0).excess_reduction == 1.0


def test_a_transform_turn_cheaper_than_ordinary_removes_all_of_the_excess_and_no_more() -> None:
    assert Pair(la=0.1, sync=5.0, la_ord=1.0, sync_ord=1.0).excess_reduction == 1.0


def test_a_sub_agents_ordinary_turn_is_its_own_second_one_in_sync() -> None:
    sync = run("sync", [0.5, 0.5, 9.0, 0.7, 0.8], commits={2}, delegated=True)
    ahead = run("lookahead", [0.5, 0.5, 0.6, 5.0, 0.8], commits={2}, delegated=True)
    (pair,) = pairs(Runs([*NONE, *sync, *ahead]))
    assert (pair.la_ord, pair.sync_ord) == (0.7, 0.7)


def test_ordinary_turns_are_paired_with_none_before_the_first_commit_and_with_sync_after_it() -> None:
    sync = run("sync", [0.5, 0.6, 4.0, 0.3, 0.3], commits={2})
    ahead = run("lookahead", [0.5, 0.6, 0.4, 0.3, 0.3], commits={2})
    twins = ordinary_twins(Runs([*NONE, *sync, *ahead]))
    assert [(t.ahead.turn, t.plain.mode) for t in twins] == [(0, "none"), (1, "none"), (3, "sync"), (4, "sync")]


def test_no_turn_of_an_episode_is_ordinary_in_either_mode() -> None:
    twins = ordinary_twins(Runs([*NONE, *SYNC, *AHEAD]))
    assert [t.ahead.turn for t in twins] == [0, 1, 2]
    late_sync = run("sync", [0.5, 0.6, 0.7, 0.8, 4.0], commits={4})
    early = run("lookahead", [0.5, 0.6, 0.7, 0.4, 0.4], commits={3})
    assert [t.ahead.turn for t in ordinary_twins(Runs([*NONE, *late_sync, *early]))] == [0, 1, 2]


def test_a_commit_after_its_trigger_is_counted_as_deferred() -> None:
    assert strategy_figures([*NONE, *SYNC, *AHEAD])["deferred_commits"] == 1
    at_once = run("lookahead", [0.5, 0.6, 0.7, 0.9, 0.4], commits={3})
    assert strategy_figures([*NONE, *SYNC, *at_once])["deferred_commits"] == 0


def test_the_control_is_what_nothing_but_noise_does() -> None:
    sync = run("sync", [0.55, 0.6, 0.7, 4.0, 0.5], commits={3})
    twins = figures.control_twins(Runs([*NONE, *sync, *AHEAD]))
    assert [(t.ahead.turn, t.ahead.mode, t.plain.mode) for t in twins] == [(t, "sync", "none") for t in range(3)]
    out = strategy_figures([*NONE, *sync, *AHEAD])["control"]
    assert out["ordinary_turns"] == 3
    assert out["ordinary_ratio_max"] == pytest.approx(1.1)


def test_strategy_figures_by_hand() -> None:
    ahead = [
        *AHEAD[:4],
        row(
            "lookahead",
            4,
            0.4,
            commit=True,
            reached_hard=True,
            lookahead="late",
            late_commits=1,
            cached_tokens=450,
            known_tokens=500,
            background_prefilled=300,
            background_generated=100,
            wasted=80,
        ),
    ]
    out = strategy_figures([*NONE, *SYNC, *ahead])
    assert out["commits"] == out["late_commits"] == out["compared_commits"] == 1
    assert out["ordinary_turns"] == 3
    assert out["ordinary_ratio_p50"] == pytest.approx(1.0)
    assert out["ordinary_ratio_max"] == pytest.approx(1.1)
    assert out["ordinary_ratio_p99"] is None
    assert out["tbt_ratio_p50"] == 1.0
    assert out["warm_hit_ratio_min"] == pytest.approx(0.9)
    assert out["wasted_token_ratio"] == pytest.approx(0.2)
    assert out["worst_turn_s"] == {"none": 1.0, "sync": 4.0, "lookahead": 0.9}
    assert out["wall_s"] == {"none": 5.0, "sync": 5.0, "lookahead": 5.0}
    # 100 cold tokens a turn, but 50 in the last one of lookahead, and 300 in its background.
    assert out["prefilled_tokens"] == {"none": 500, "sync": 500, "lookahead": 750}


def test_warm_hit_ratio_is_of_the_coldest_commit_and_never_above_one() -> None:
    rows = [
        row("lookahead", 1, 1.0, commit=True, cached_tokens=95, known_tokens=100),
        row("lookahead", 2, 1.0, commit=True, cached_tokens=120, known_tokens=100),
        row("lookahead", 4, 1.0, cached_tokens=1, known_tokens=100),
        row("lookahead", 3, 1.0, commit=True, cached_tokens=None, known_tokens=100),
    ]
    assert figures.warm_hit_ratio_min(rows[:3]) == 0.95
    assert figures.warm_hit_ratio_min(rows[1:2]) == 1.0
    # SGLang and older vLLM leave the field out where they found nothing: the coldest commit of all.
    assert figures.warm_hit_ratio_min(rows) == 0.0
    assert figures.warm_hit_ratio_min(rows[3:]) is None, "a server that never tells"


def test_a_server_that_does_not_tell_cached_tokens_has_no_prefilled_tokens() -> None:
    silent = row("none", 0, 1.0, cached_tokens=None)
    assert figures.prefilled_tokens([silent]) is None
    told = row("none", 1, 1.0, cached_tokens=0)
    assert figures.prefilled_tokens([silent, told]) == silent.prompt_tokens + told.prompt_tokens


def test_a_run_that_ends_before_its_commit_is_counted() -> None:
    rows = run("lookahead", [1.0, 1.0, 1.0], reached={1, 2})
    assert figures.uncommitted(rows) == 2
    assert strategy_figures(rows)["uncommitted_turns"] == 2


def test_one_mode_alone_gives_no_ratio_and_no_error() -> None:
    for rows in (NONE, SYNC, AHEAD):
        out = strategy_figures(rows)
        assert out["R_p50"] is None
        assert out["speedup_p50"] is None


def test_nearest_rank_percentile_needs_enough_values() -> None:
    assert p99([1.0] * 29) is None
    assert p99([float(n) for n in range(1, 101)]) == 99.0
    assert p99([float(n) for n in range(1, 31)]) == 30.0


def test_sweep_of_windows_is_ordered_by_size() -> None:
    rows: list[Row] = []
    for label, prompt, sync_s in (("sliding-window-8", 900, 6.0), ("sliding-window-2", 300, 2.0)):
        for mode, seconds in (("none", 0.5), ("sync", sync_s), ("lookahead", 0.5)):
            rows.append(row(mode, 0, seconds, strategy=label, commit=mode != "none", prompt_tokens=prompt))
    small, large = figures.window_fits(rows, tool_seconds=2.0)
    assert (small.label, small.window_tokens, small.prefill_s, small.r) == ("sliding-window-2", 300, 2.0, 1.0)
    assert small.hiding_s == pytest.approx(2.11)
    assert large.prefill_s == 6.0


seconds = st.floats(0.01, 100, allow_nan=False)


@given(la=seconds, sync=seconds, la_ord=seconds, sync_ord=seconds)
def test_excess_reduction_never_exceeds_one_and_is_one_exactly_when_no_pause_is_left(
    la: float, sync: float, la_ord: float, sync_ord: float
) -> None:
    excess = Pair(la, sync, la_ord, sync_ord).excess_reduction
    if excess is None:
        assert sync < 3 * sync_ord
    else:
        assert excess <= 1
        assert (excess == 1) == (la <= la_ord or math.isclose(1 - excess, 0, abs_tol=1e-12))


turn_lists = st.lists(st.tuples(seconds, st.booleans(), st.booleans()), min_size=1, max_size=30)


@given(turn_lists)
def test_every_commit_ends_one_episode_and_no_turn_is_in_two(turns: list[tuple[float, bool, bool]]) -> None:
    rows = [row("lookahead", i, s, commit=commit, reached_hard=reached) for i, (s, commit, reached) in enumerate(turns)]
    found = episodes(rows)
    assert [e.commit.turn for e in found] == [r.turn for r in rows if r.commit]
    for before, after in itertools.pairwise(found):
        assert before.commit.turn < after.first
    for episode in found:
        assert episode.first <= episode.slowest.turn <= episode.commit.turn
        assert episode.slowest.turn_s >= episode.commit.turn_s


@given(turn_lists)
def test_a_mode_compared_with_itself_changes_nothing(turns: list[tuple[float, bool, bool]]) -> None:
    rows: list[Row] = []
    for mode in ("none", "sync", "lookahead"):
        rows += [
            row(mode, i, s, commit=c and mode != "none", reached_hard=h and mode != "none")
            for i, (s, c, h) in enumerate(turns)
        ]
    (out,) = summarize(rows)["strategies"].values()
    assert out["R_max"] in (None, 1.0)
    assert out["speedup_p50"] in (None, 1.0)
    assert out["ordinary_ratio_max"] in (None, 1.0)
    assert out["tbt_ratio_max"] in (None, 1.0)
    assert out["excess_reduction_mean"] is None
