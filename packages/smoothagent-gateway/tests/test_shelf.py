"""The shelf says what a plain list of its sessions would."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from smoothagent_gateway.shelf import Shelf


@dataclass
class One:
    name: str
    size: int


ACTS = st.lists(st.tuples(st.sampled_from("pd"), st.integers(0, 4), st.integers(0, 2), st.integers(0, 9)), max_size=30)


@given(ACTS)
def test_it_is_a_list_of_what_was_put_last(acts: list[tuple[str, int, int, int]]) -> None:
    shelf, plain = Shelf[One](), dict[str, tuple[One, int]]()
    sessions = [One(f"s{i}", 0) for i in range(5)]
    for act, which, begins, size in acts:
        one = sessions[which]
        plain.pop(one.name, None)
        if act == "p":
            one.size = size
            shelf.put(one, begins)
            plain[one.name] = one, begins
        else:
            shelf.drop(one.name)
        assert list(shelf) == [s for s, _ in plain.values()]
        assert list(reversed(shelf)) == [s for s, _ in reversed(plain.values())]
        assert len(shelf) == len(plain)
        assert (one.name in shelf) == (act == "p")
        for key in range(3):
            assert shelf.beginning(key) == [s for s, begun in reversed(plain.values()) if begun == key]
        assert shelf.total == sum(s.size for s, _ in plain.values())
