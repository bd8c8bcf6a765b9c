"""The conversations in memory: in the order of their last use, and by how they begin."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar


class Shelved(Protocol):
    """What is kept.

    Attributes:
        name: tells them apart.
        size: bytes.
    """

    name: str
    size: int


S = TypeVar("S", bound=Shelved)


class Shelf(Generic[S]):
    """Finds those that begin as a request does without a look at all others, of which there may be hundreds.

    Attributes:
        total: bytes of all.
    """

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, S] = OrderedDict()
        self._by_beginning: dict[Hashable, OrderedDict[str, S]] = {}
        self._as: dict[str, tuple[Hashable, int]] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[S]:
        return iter(self._by_name.values())

    def __reversed__(self) -> Iterator[S]:
        return reversed(self._by_name.values())

    def put(self, session: S, begins: Hashable) -> None:
        """It was used last, and begins so now."""
        self.drop(session.name)
        self._by_name[session.name] = session
        self._by_beginning.setdefault(begins, OrderedDict())[session.name] = session
        self._as[session.name] = begins, session.size
        self.total += session.size

    def drop(self, name: str) -> None:
        """It is kept no longer."""
        if self._by_name.pop(name, None) is None:
            return
        begins, size = self._as.pop(name)
        alike = self._by_beginning[begins]
        del alike[name]
        if not alike:
            del self._by_beginning[begins]
        self.total -= size

    def beginning(self, begins: Hashable) -> Sequence[S]:
        """Those that begin so, the newest first."""
        return list(reversed(self._by_beginning.get(begins, OrderedDict[str, S]()).values()))


def written(message: Mapping[str, Any]) -> str:
    """A message as a key: what is equal is written alike, as far as JSON tells 1 from 1.0 and True."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
