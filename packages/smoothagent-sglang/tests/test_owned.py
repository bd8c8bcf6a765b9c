"""What is evicted is ours, needed by nobody, and a leaf: against a plain tree of prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable

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
            ours -= set(paths)
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

    def evict(tokens: int, may_go: Callable[[Hashable], bool]) -> list[Hashable]:
        gone = list[Hashable]()
        while len(gone) < tokens:
            leaves = [p for p in tree if not any(q[: len(p)] == p and q != p for q in tree)]
            found = next((p for p in sorted(leaves) if may_go(p)), None)
            if found is None:
                break
            assert found in ours
            assert found not in kept
            tree.discard(found)
            ours.discard(found)
            gone.append(found)
        return gone

    wanted = data.draw(st.integers(0, 9))
    before = len(ours)
    assert owned.free(wanted, evict) == before - len(ours) <= wanted
    owned.let_go(kept)
    kept.clear()
    while owned.free(100, evict):
        pass
    assert len(owned) <= len(ours), "what live requests go on from is not ours to evict"
    assert all(any(other[: len(path)] == path for other in tree - ours) for path in ours)


def test_a_node_that_is_split_is_nobodys() -> None:
    owned = Owned()
    owned.add("a", Node("a", None, [1, 2, 3, 4, 5, 6], 2, 6))
    owned.used([1, 2, 9, 9, 9, 9], 2, live=True)
    assert "a" in owned, "what lies before it is not ours in any case"
    owned.used([1, 2, 3, 4, 5, 6, 7], 6, live=False)
    assert "a" in owned, "a lookahead request that goes on from all of it"
    owned.used([1, 2, 3, 4, 9, 9], 4, live=False)
    assert "a" not in owned
    assert owned.tokens == 0
