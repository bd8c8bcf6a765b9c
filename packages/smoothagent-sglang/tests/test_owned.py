"""What is evicted is ours, needed by nobody, and a leaf: against a plain tree of prompts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from smoothagent_sglang.owned import Node, Owned

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


def _paths(prompt: list[int]) -> list[tuple[int, ...]]:
    return [tuple(prompt[: i + 1]) for i in range(len(prompt))]


@given(PROMPTS, PROMPTS, st.data())
def test_what_goes_is_a_leaf_of_ours_that_nobody_needs(
    lookahead: list[list[int]], live: list[list[int]], data: st.DataObject
) -> None:
    """One token a node, so that nothing is ever split."""
    owned, tree, ours = Owned(), set[tuple[int, ...]](), set[tuple[int, ...]]()
    kept: list[tuple[int, ...]] = []
    order = [(True, p) for p in lookahead] + [(False, p) for p in live]
    for is_lookahead, prompt in data.draw(st.permutations(order)):
        paths = _paths(prompt)
        cached = sum(p in tree for p in paths)
        owned.used(prompt, cached, live=not is_lookahead)
        if not is_lookahead:
            ours -= set(paths[:cached])
        for i, path in enumerate(paths):
            if path not in tree and is_lookahead:
                owned.add(path, Node(path, paths[i - 1] if i else None, prompt, i, i + 1))
                ours.add(path)
        tree |= set(paths)
        if is_lookahead and data.draw(st.booleans()):
            owned.keep(paths)
            kept += paths
        assert owned.tokens == len(owned) == len(ours)
        assert all(path in owned for path in ours)

    def evict(node: Any) -> int:
        path = tuple(node)
        assert path in ours
        assert path not in kept
        assert not any(other[: len(path)] == path and other != path for other in tree), "a leaf"
        tree.discard(path)
        ours.discard(path)
        return 1

    wanted = data.draw(st.integers(0, 9))
    freed = owned.free(wanted, evict)
    if freed < wanted:  # all that could go has gone
        needed = {k[: i + 1] for k in kept for i in range(len(k))} | (tree - ours)
        for path in ours:
            assert path in kept or any(other[: len(path)] == path for other in needed)
    owned.let_go(kept)
    kept.clear()
    owned.free(100, evict)
    blocked = tree - ours
    assert all(any(other[: len(path)] == path for other in blocked) for path in ours)


def test_a_node_that_is_split_is_nobodys() -> None:
    owned = Owned()
    owned.add("a", Node("a", None, [1, 2, 3, 4, 5, 6], 2, 6))
    owned.used([1, 2, 3, 9, 9, 9], 2, live=True)
    assert "a" in owned, "what lies before it is not ours in any case"
    owned.used([1, 2, 3, 4, 5, 6, 7], 6, live=False)
    assert "a" in owned, "a lookahead request that goes on from all of it"
    owned.used([1, 2, 3, 4, 9, 9], 4, live=False)
    assert "a" not in owned
    assert owned.tokens == 0
