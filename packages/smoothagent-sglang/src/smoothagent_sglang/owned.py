"""Which nodes of the prefix cache are lookahead work's own, so that room for more of it is made there and nowhere else.

A piece's KV becomes a node behind the one before it. It is ours until a live request goes on from it, or splits it;
then it is that request's, and stays. What is ours and kept for nobody may go, from its end backwards::

    root ── live ── piece 1 ── piece 2        of one request
                          └── piece 2' ──…    of another that goes on from its first piece
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple


def begins_alike(one: Sequence[int], other: Sequence[int], tokens: int) -> bool:
    """Whether two prompts have their first ``tokens`` in common."""
    # Most differ early, or at the end of what is compared.
    return len(one) >= tokens and one[tokens - 1] == other[tokens - 1] and one[:tokens] == other[:tokens]


class Node(NamedTuple):
    """One of them.

    Attributes:
        node: the cache's own handle.
        parent: the one before it; None where that is not ours.
        ids: the tokens of a prompt that has it; at least ``end`` of them.
        begin: tokens before it.
        end: tokens up to its end.
    """

    node: Any
    parent: Hashable | None
    ids: Sequence[int]
    begin: int
    end: int


class Owned:
    """The nodes, the oldest first.

    Attributes:
        tokens: of all of them.
    """

    def __init__(self) -> None:
        self._nodes: dict[Hashable, Node] = {}
        self._children: Counter[Hashable] = Counter()
        self._kept: Counter[Hashable] = Counter()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._nodes

    def add(self, key: Hashable, node: Node) -> None:
        """A piece's node."""
        if key in self._nodes or node.end <= node.begin:
            return
        parent = node.parent if node.parent in self._nodes else None
        self._nodes[key] = node._replace(parent=parent)
        if parent is not None:
            self._children[parent] += 1
        self.tokens += node.end - node.begin

    def keep(self, keys: Iterable[Hashable]) -> None:
        """Somebody needs them."""
        self._kept.update(keys)

    def let_go(self, keys: Iterable[Hashable]) -> None:
        """Somebody needs them no longer."""
        self._kept.subtract(keys)

    def used(self, ids: Sequence[int], cached: int, *, live: bool) -> None:
        """A request begins: nodes that it shares are a live one's now, and so is one that a lookahead request splits.

        Args:
            ids: the request's prompt.
            cached: how many of these are in the cache; a live one will have the others there, too.
            live: it is no lookahead request.
        """
        reaches = len(ids) if live else cached
        for key, node in list(self._nodes.items()):
            if reaches <= node.begin or (not live and cached >= node.end):
                continue
            if begins_alike(ids, node.ids, node.begin + 1):
                self.drop(key)

    def drop(self, key: Hashable) -> None:
        """It is not ours any more."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        self.tokens -= node.end - node.begin
        self._kept.pop(key, None)
        if node.parent in self._nodes:
            self._children[node.parent] -= 1
        for other, its in list(self._nodes.items()):
            if its.parent == key:
                self._nodes[other] = its._replace(parent=None)
        self._children.pop(key, None)

    def drop_all(self, keys: Iterable[Hashable]) -> None:
        """They are not ours any more."""
        for key in list(keys):
            self.drop(key)

    def may_go(self, key: Hashable) -> bool:
        """Whether it is ours, and needed by nobody."""
        return key in self._nodes and self._kept[key] <= 0

    def free(self, tokens: int, evict: Callable[[int, Callable[[Hashable], bool]], Sequence[Hashable]]) -> int:
        """Have as many evicted, if there are; returns how many were.

        Args:
            tokens: how many.
            evict: evicts leaves of the cache of which a function says that they may go, until so many tokens are
                free; returns which.
        """
        if not any(map(self.may_go, self._nodes)):
            return 0  # the cache need not be searched
        freed = 0
        for key in evict(tokens, self.may_go):
            node = self._nodes[key]
            freed += node.end - node.begin
            self.drop(key)
        if freed < tokens:
            # What is left of these is gone already, or others go on from it.
            self.drop_all(key for key in self._nodes if self.may_go(key) and not self._children[key])
        return freed
