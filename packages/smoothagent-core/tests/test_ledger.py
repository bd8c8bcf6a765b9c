"""Counters that only grow, what they are worth, and switching off."""

from __future__ import annotations

import json
import threading
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent.errors import ConfigurationError
from smoothagent.ledger import Budget, Ledger, LedgerSnapshot, Money, PriceTable

NAMES = [f.name for f in fields(LedgerSnapshot)]
ADDS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 10**6), max_size=6), max_size=8)


@given(st.lists(ADDS, max_size=4))
def test_a_parent_counts_what_its_children_count(conversations: list[list[dict[str, Any]]]) -> None:
    parent = Ledger()
    for adds in conversations:
        child = Ledger(parent=parent)
        before = child.snapshot().to_dict()
        for add in adds:
            child.add(**add)
            after = child.snapshot().to_dict()
            assert all(after[name] >= before[name] for name in NAMES)
            before = after
        assert all(before[name] == sum(add.get(name, 0) for add in adds) for name in NAMES)
    total = parent.snapshot().to_dict()
    for name in NAMES:
        assert total[name] == sum(add.get(name, 0) for adds in conversations for add in adds)


@given(ADDS)
def test_snapshot_is_json_and_its_ratio_a_share(adds: list[dict[str, Any]]) -> None:
    ledger = Ledger()
    for add in adds:
        ledger.add(**add)
    snapshot = ledger.snapshot()
    assert 0 <= snapshot.waste_ratio <= 1
    assert set(json.loads(json.dumps(snapshot.to_dict()))) == {*NAMES, "waste_ratio"}


def test_threads() -> None:
    parent = Ledger()
    ledgers = [Ledger(parent=parent) for _ in range(2)]

    def work(ledger: Ledger) -> None:
        for _ in range(500):
            ledger.add(commits=1, prefilled_tokens=3)

    threads = [threading.Thread(target=work, args=(ledgers[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parent.snapshot() == LedgerSnapshot(commits=2000, prefilled_tokens=6000)


def test_a_negative_count_counts_nothing() -> None:
    ledger = Ledger()
    with pytest.raises(ConfigurationError, match="wasted_tokens=-1"):
        ledger.add(commits=1, wasted_tokens=-1)
    assert ledger.snapshot() == LedgerSnapshot()


def test_money() -> None:
    snapshot = LedgerSnapshot(
        prefilled_tokens=1_000_000,
        reused_tokens=2_000_000,
        generated_tokens=100_000,
        saved_tokens=4_000_000,
        saved_output_tokens=100_000,
    )
    same = snapshot.cost(PriceTable(input=2.0, cached_input=0.5, output=10.0))
    assert same == Money(spent=2 + 1 + 1, saved=4 * 1.5 + 1)
    assert same.net == 3
    assert str(same) == "spent 4.0000 USD, saved 7.0000, net +3.0000"
    apart = snapshot.cost(PriceTable(2.0, 0.5, 10.0, best_effort_input=0.0, best_effort_output=5.0, currency="EUR"))
    assert apart == Money(spent=0 + 1 + 0.5, saved=7, currency="EUR")
    assert snapshot.cost(PriceTable(2.0, 0.5, 10.0, per=1_000)).spent == 4000


@given(ADDS, st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_spending_only_grows(adds: list[dict[str, Any]], price: float, cached: float, output: float) -> None:
    ledger, prices, spent = Ledger(), PriceTable(price, cached, output), 0.0
    for add in adds:
        ledger.add(**add)
        money = ledger.snapshot().cost(prices)
        assert money.spent >= spent
        spent = money.spent


def test_token_budget() -> None:
    ledger = Ledger(Budget(max_background_tokens=100))
    assert ledger.allows()
    ledger.add(prefilled_tokens=60, generated_tokens=39, reused_tokens=1000)
    assert ledger.allows()
    ledger.add(generated_tokens=1)
    assert not ledger.allows()
    assert ledger.why_off == "lookahead is off: 100 background tokens of max_background_tokens=100"


def test_waste_is_judged_only_after_enough_tokens() -> None:
    ledger = Ledger(Budget(max_waste_ratio=0.5, min_background_tokens=1000))
    ledger.add(prefilled_tokens=999, wasted_tokens=999)
    assert ledger.allows()
    ledger.add(prefilled_tokens=1)
    assert ledger.why_off == "lookahead is off: 100% of its 1000 tokens were never committed, max_waste_ratio=0.5"
    fine = Ledger(Budget(max_waste_ratio=0.5, min_background_tokens=0))
    assert fine.allows()
    fine.add(prefilled_tokens=10, wasted_tokens=5)
    assert fine.allows()


def test_money_budget() -> None:
    prices = PriceTable(1.0, 0.1, 2.0, per=1)
    ledger = Ledger(Budget(max_spent=10, prices=prices))
    ledger.add(prefilled_tokens=9)
    assert ledger.allows()
    ledger.add(reused_tokens=10)
    assert ledger.why_off == "lookahead is off: it cost 10.0000 USD of max_spent=10"


def test_a_parent_s_budget_binds_its_children() -> None:
    parent = Ledger(Budget(max_background_tokens=100))
    one, two = Ledger(parent=parent), Ledger(Budget(max_background_tokens=1000), parent=parent)
    one.add(prefilled_tokens=100)
    assert two.snapshot() == LedgerSnapshot()
    assert not two.allows()
    assert two.why_off == parent.why_off


@given(ADDS, st.integers(0, 10**6), st.floats(0, 1))
def test_off_exactly_when_it_says_why(adds: list[dict[str, Any]], cap: int, ratio: float) -> None:
    ledger = Ledger(Budget(max_background_tokens=cap, max_waste_ratio=ratio))
    for add in adds:
        ledger.add(**add)
        assert ledger.allows() == (ledger.why_off is None)
    if ledger.snapshot().background_tokens >= cap:
        assert not ledger.allows()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_background_tokens": -1}, "max_background_tokens=-1"),
        ({"max_waste_ratio": 1.5}, "max_waste_ratio=1.5"),
        ({"max_waste_ratio": float("nan")}, "max_waste_ratio=nan"),
        ({"max_spent": -1.0}, "max_spent=-1.0"),
        ({"max_spent": 1.0}, "without prices"),
        ({"min_background_tokens": -1}, "min_background_tokens=-1"),
    ],
)
def test_impossible_budgets(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Budget(**arguments)


def test_impossible_prices() -> None:
    with pytest.raises(ConfigurationError, match=r"a price of -1\.0"):
        PriceTable(-1.0, 0.0, 0.0)
    with pytest.raises(ConfigurationError, match="a price of nan"):
        PriceTable(1.0, 0.0, 0.0, best_effort_input=float("nan"))
    with pytest.raises(ConfigurationError, match="per=0"):
        PriceTable(1.0, 0.0, 0.0, per=0)
