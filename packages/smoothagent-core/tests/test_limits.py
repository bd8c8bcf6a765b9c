"""The three limits: impossible ones are refused by name, the others follow growth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent import ConfigurationError, Limits
from smoothagent.limits import Growth


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"hard": 0}, "hard limit is 0"),
        ({"hard": -5}, "hard limit is -5"),
        ({"hard": 100, "keep": 100}, "keep is 100 tokens and hard is 100"),
        ({"hard": 100, "keep": 200}, "keep is 200"),
        ({"hard": 100, "keep": -1}, "keep is -1"),
        ({"hard": 100, "keep": 20, "soft": 100}, r"soft limit is 100 tokens and hard is 100.*leave it out for 80"),
        ({"hard": 100, "soft": 120}, "soft limit is 120"),
        ({"hard": 100, "soft": 0}, "soft limit is 0"),
        ({"hard": 100, "ceiling": 99}, r"ceiling is 99 tokens and hard is 100.*leave it out for 125"),
    ],
)
def test_impossible_limits_are_refused_with_value_and_remedy(limits: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        Limits(**limits)
    assert isinstance(raised.value, ValueError)


@given(st.integers(1, 10**6), st.one_of(st.none(), st.integers(1, 10**6)), st.integers(0, 10**4))
def test_the_default_ceiling_is_the_smaller_of_window_and_a_quarter_more(
    hard: int, window: int | None, reserve: int
) -> None:
    ceiling = Limits(hard).default_ceiling(window, reserve)
    assert hard <= ceiling <= hard * 5 // 4
    if window is not None and window - reserve >= hard:
        assert ceiling <= window - reserve


def test_the_papers_numbers() -> None:
    """15K, 11K and 4K kept (paper, section 6)."""
    limits = Limits(15_000, keep=4_000)
    assert limits.start(Growth()) == 11_000
    assert limits.default_ceiling() == 18_750


@given(
    st.integers(8, 10**5),
    st.floats(0, 1),
    st.floats(0, 10**5),
    st.floats(0, 100),
    st.floats(0, 1000),
)
def test_preparation_begins_between_nothing_and_hard(
    hard: int, kept: float, per_turn: float, turn: float, lookahead: float
) -> None:
    keep = min(int(hard * kept), hard - 1)
    growth = Growth(per_turn=per_turn, turn_seconds=turn, lookahead_seconds=lookahead)
    limits = Limits(hard, keep)
    start = limits.start(growth)
    assert 1 <= start <= hard
    # Never later than without measurements, and never so early that more than twice ``keep`` would stay verbatim.
    assert start <= limits.start(Growth())
    assert start >= limits.start(Growth()) or hard - start <= 2 * keep - per_turn
    assert Limits(hard, keep, soft=1).start(growth) == 1


def test_a_long_lookahead_starts_earlier() -> None:
    limits = Limits(1000, keep=100)
    slow = Growth(per_turn=20, turn_seconds=2.0, lookahead_seconds=10.0)
    assert limits.start(slow) == 1000 - 120
    # What a turn overshoots stays verbatim too.
    slower = Growth(per_turn=20, turn_seconds=2.0, lookahead_seconds=100.0)
    assert limits.start(slower) == 1000 - 180
    fast = Growth(per_turn=10, turn_seconds=2.0, lookahead_seconds=1.0)
    assert limits.start(fast) == 900


def test_growth_is_measured_from_turn_to_turn() -> None:
    growth = Growth()
    assert growth.tokens_during_lookahead() == 0
    assert growth.turns_until(100) == 1
    for turn in range(10):
        growth.turn(now=2.0 * turn, tokens=100 * turn, turns=turn)
    assert growth.per_turn == 100
    assert growth.turn_seconds == 2.0
    assert growth.turns_until(1000) == 1
    assert growth.turns_until(1001) == 2
    assert growth.still_to_come(950) == 50
    assert growth.still_to_come(2000) == 0
    growth.lookahead(4.0)
    assert growth.tokens_during_lookahead() == 300


def test_a_commit_is_no_growth() -> None:
    growth = Growth()
    growth.turn(0.0, 100, 1)
    growth.turn(1.0, 200, 2)
    growth.moved(50, 1)
    growth.turn(2.0, 150, 2)
    assert growth.per_turn == 100
    growth.turn(3.0, 10, 1)  # shrunk behind our back
    growth.turn(4.0, 110, 2)
    assert growth.per_turn == 100
