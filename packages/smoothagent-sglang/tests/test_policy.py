"""The policy decides as a plain search over all possibilities does, and keeps the bounds it is given."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from reference import batch_seconds, printed_colocated, printed_disaggregated, widest_pieces
from smoothagent_sglang.latency import BatchLatency, Load, Residuals
from smoothagent_sglang.policy import (
    Candidate,
    Decision,
    Sizes,
    Waiting,
    colocated,
    disaggregated,
    heads,
    slack,
    urgency,
)

TIMES = st.floats(1e-4, 0.5)


def rising(steps: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    table, tokens, seconds = list[tuple[int, float]](), 0, 0.0
    for more, longer in steps:
        tokens, seconds = tokens + more, seconds + longer
        table.append((tokens, seconds))
    return tuple(table)


TABLES = st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 0.05)), min_size=1, max_size=6).map(rising)
MODELS = st.builds(BatchLatency, TABLES, st.floats(0, 1e-5), st.floats(0, 1e-6), st.just(Residuals()))
TOKENS = st.integers(1, 1500)
PREFIX = st.integers(0, 40).map(lambda n: n * 64)
WAITING = st.lists(st.builds(Waiting, st.floats(0, 5), TOKENS, PREFIX), max_size=8)
CANDIDATES = st.lists(st.builds(Candidate, st.floats(0, 9), TOKENS, PREFIX), max_size=9)
SIZES = st.builds(Sizes, st.integers(64, 600), st.integers(16, 300), st.integers(1, 40), st.sampled_from([1, 16, 64]))
DECODES = st.lists(st.integers(1, 4000), max_size=8)


@given(MODELS, WAITING, CANDIDATES, st.floats(0, 3), SIZES, TIMES)
def test_algorithm_1_as_printed(
    model: BatchLatency,
    waiting: list[Waiting],
    candidates: list[Candidate],
    now: float,
    sizes: Sizes,
    w: float,
) -> None:
    decided = disaggregated(model, waiting, candidates, now, sizes=sizes, be_step=w, literal=True)
    assert decided.pieces == printed_disaggregated(model, waiting, candidates, now, sizes)


@given(MODELS, DECODES, WAITING, CANDIDATES, SIZES, TIMES)
def test_algorithm_2_as_printed(
    model: BatchLatency,
    decodes: list[int],
    waiting: list[Waiting],
    candidates: list[Candidate],
    sizes: Sizes,
    tbt: float,
) -> None:
    decided = colocated(model, decodes, waiting, candidates, 0, sizes=sizes, tbt=tbt, be_step=1, literal=True)
    assert (decided.decodes, decided.waiting, decided.pieces) == printed_colocated(
        model, decodes, waiting, candidates, sizes, tbt
    )


@given(MODELS, WAITING, CANDIDATES, st.floats(0, 3), SIZES, TIMES)
def test_a_prefill_server_is_held_up_within_its_slack(
    model: BatchLatency,
    waiting: list[Waiting],
    candidates: list[Candidate],
    now: float,
    sizes: Sizes,
    w: float,
) -> None:
    decided = disaggregated(model, waiting, candidates, now, sizes=sizes, be_step=w)
    own = disaggregated(model, waiting, [], now, sizes=sizes, be_step=w)
    added = model.estimate(decided.load) - model.estimate(own.load)
    allowed = min(w, max(0.0, slack(model, waiting, now, sizes)))
    assert added <= allowed + 1e-9
    limit = model.estimate(own.load) + allowed
    assert decided.pieces == widest_pieces(model, own.load, candidates, limit, sizes)
    _is_well_formed(decided, candidates, sizes)


@given(MODELS, DECODES, WAITING, CANDIDATES, st.floats(0, 3), SIZES, TIMES, TIMES, st.booleans())
def test_a_colocated_server_keeps_both_bounds(
    model: BatchLatency,
    decodes: list[int],
    waiting: list[Waiting],
    candidates: list[Candidate],
    now: float,
    sizes: Sizes,
    tbt: float,
    w: float,
    mixed: bool,
) -> None:
    def decide(be: list[Candidate]) -> Decision:
        return colocated(model, decodes, waiting, be, now, sizes=sizes, tbt=tbt, be_step=w, mixed=mixed)

    decided, own = decide(candidates), decide([])
    if not decided.pieces:
        assert decided.load == own.load
        return
    taken = model.estimate(decided.load)
    assert taken <= w + 1e-9
    if decodes:
        between = taken if mixed else taken + model.estimate(Load(len(decodes), sum(decodes), 0))
        assert between <= tbt + 1e-9
    if waiting:
        assert taken - model.estimate(own.load) <= max(0.0, slack(model, waiting, now, sizes)) + 1e-9
    _is_well_formed(decided, candidates, sizes)


def _is_well_formed(decided: Decision, candidates: list[Candidate], sizes: Sizes) -> None:
    places = [piece.candidate for piece in decided.pieces]
    assert places == heads(candidates)[: len(places)], "the most urgent first, none passed over"
    for place, tokens in decided.pieces:
        one = candidates[place]
        assert 0 < tokens <= min(one.tokens, sizes.piece)
        assert tokens == one.tokens or ((one.prefix + tokens) % sizes.page == 0 and tokens >= sizes.least)


@given(MODELS, WAITING, st.floats(0, 3), SIZES)
def test_slack_is_what_the_worst_placed_request_has(
    model: BatchLatency, waiting: list[Waiting], now: float, sizes: Sizes
) -> None:
    expected = math.inf
    for i, one in enumerate(waiting):
        ahead = 0.0
        for before in waiting[: i + 1]:
            done = 0
            while done < before.tokens:
                n = min(sizes.chunk, before.tokens - done)
                ahead += batch_seconds(model, [], [(n, before.prefix + done)])
                done += n
        expected = min(expected, one.deadline - now - ahead)
    assert math.isclose(slack(model, waiting, now, sizes), expected, rel_tol=1e-9, abs_tol=1e-9)


@given(
    MODELS, st.lists(st.tuples(TOKENS, PREFIX, st.floats(0, 9), st.floats(0, 9)), min_size=1), SIZES, st.floats(0, 1)
)
def test_least_laxity_first_at_any_time(
    model: BatchLatency, requests: list[tuple[int, int, float, float]], sizes: Sizes, aging: float
) -> None:
    def laxity(request: tuple[int, int, float, float], now: float) -> float:
        tokens, prefix, deadline, arrival = request
        return deadline - now - model.whole(tokens, prefix, sizes.piece) - aging * (now - arrival)

    candidates = [
        Candidate(urgency(model, Candidate(0, tokens, prefix), deadline, arrival, sizes, aging), tokens, prefix)
        for tokens, prefix, deadline, arrival in requests
    ]
    first = heads(candidates)[0]
    for now in (10.0, 1000.0):
        assert laxity(requests[first], now) <= min(laxity(one, now) for one in requests) + 1e-6
