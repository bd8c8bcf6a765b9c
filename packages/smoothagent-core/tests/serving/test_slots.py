"""Leases of llama.cpp slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smoothagent.serving.backend import Stream
from smoothagent.serving.slots import SlotTable

OWN = (Stream.MAIN, Stream.SUMMARY, Stream.LOOKAHEAD)


def test_three_slots_a_conversation_lowest_first() -> None:
    table = SlotTable([5, 3, 4, 8, 7, 6])
    first, second = table.lease("a"), table.lease("b")
    assert first is not None
    assert second is not None
    assert [first.of(s) for s in OWN] == [3, 4, 5]
    assert table.lease("c") is None
    table.swap("a")
    assert [first.of(s) for s in OWN] == [5, 4, 3]
    table.release("a")
    assert table.lease("c") is not None


def test_a_spare_slot_is_nobodys_and_stays_the_same_for_one_conversation() -> None:
    table = SlotTable(range(5))
    lease = table.lease("a")
    assert lease is not None
    spare = {name: table.spare(name) for name in map(str, range(20))}
    assert set(spare.values()) == {3, 4}
    assert all(table.spare(name) == slot for name, slot in spare.items())
    assert SlotTable(()).spare("a") is None


def test_a_conversation_that_comes_back_finds_what_it_left_in_its_place() -> None:
    """Its KV is where it was last swapped to, and a request that is sent elsewhere finds nothing."""
    table = SlotTable(range(6))
    table.lease("a")
    table.swap("a")
    before = table.find("a")
    assert before is not None
    slots = before.slots
    table.release("a")
    again = table.lease("a")
    assert again is not None
    assert again.slots == slots
    table.release("a")
    # Others need them meanwhile.
    table.lease("b")
    table.lease("c")
    table.release("b")
    last = table.lease("a")
    assert last is not None
    assert not set(last.slots) & set(table.find("c").slots)  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.sampled_from(["lease", "swap", "release"]), st.integers(0, 4)), max_size=40))
def test_no_slot_is_leased_twice_and_none_is_lost(steps: list[tuple[str, int]]) -> None:
    table = SlotTable(range(7))
    for step, who in steps:
        getattr(table, step)(str(who))
        leases = [lease for k in range(5) if (lease := table.find(str(k))) is not None]
        used = [lease.of(s) for lease in leases for s in OWN]
        assert len(used) == len(set(used))
        assert set(used) == table.leased()
    for who in range(5):
        table.release(str(who))
    assert table.lease("a") is not None
    assert table.lease("b") is not None
