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
        """A request has found ``cached`` tokens: nodes that it shares are a live one's now, and so is one it splits.

        Args:
            ids: the request's prompt.
            cached: how many of these are in the cache.
            live: it is no lookahead request.
        """
        for key, node in list(self._nodes.items()):
            begin = node.begin
            if cached <= begin or (not live and cached >= node.end):
                continue
            if ids[begin] == node.ids[begin] and ids[:begin] == node.ids[:begin]:
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

    def free(self, tokens: int, evict: Callable[[Any], int]) -> int:
        """Have as many evicted, if there are; returns how many were.

        Args:
            tokens: how many.
            evict: evicts a node, and returns its tokens; 0 where it cannot be.
        """
        freed = 0
        while freed < tokens:
            key = next((k for k in self._nodes if not self._children[k] and self._kept[k] <= 0), None)
            if key is None:
                break
            node = self._nodes[key]
            self.drop(key)
            freed += evict(node.node)
        return freed
