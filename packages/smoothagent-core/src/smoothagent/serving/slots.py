"""Which of a llama.cpp server's slots belong to which conversation of this process."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from smoothagent.serving.backend import Stream

logger = logging.getLogger(__name__)

SLOTS_PER_CONVERSATION = 3
"""Main, summary (a copy of main's KV) and lookahead (the transformed context)."""


_FORMER = 256
"""Conversations whose former slots are remembered."""


@dataclass(slots=True)
class Lease:
    """Three slots of one conversation."""

    main: int
    summary: int
    lookahead: int

    @property
    def slots(self) -> tuple[int, int, int]:
        """All of them."""
        return self.main, self.summary, self.lookahead

    def of(self, stream: Stream) -> int:
        """The slot a stream's requests go to."""
        match stream:
            case Stream.MAIN:
                return self.main
            case Stream.SUMMARY:
                return self.summary
            case Stream.LOOKAHEAD:
                return self.lookahead
            case Stream.ASIDE:
                raise ValueError("an aside has no slot of the conversation's")


class SlotTable:
    """Leases slots, three a conversation, lowest first. Any thread.

    A server with other clients (other processes) needs the slots shared out: each gets its own.

    Args:
        slots: the slots that may be leased.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._free = sorted(set(slots))
        self._total = len(self._free)
        self._leases: dict[str, Lease] = {}
        self._former: OrderedDict[str, Lease] = OrderedDict()
        self._said = False

    def lease(self, conversation: str) -> Lease | None:
        """The conversation's lease, made at the first call; None where fewer than three slots are free."""
        with self._lock:
            lease = self._leases.get(conversation)
            if lease is None and len(self._free) >= SLOTS_PER_CONVERSATION:
                # A conversation that comes back may find what it left, each in its place.
                former = self._former.pop(conversation, None)
                if former is None or not set(self._free).issuperset(former.slots):
                    former = Lease(*self._free[:SLOTS_PER_CONVERSATION])
                self._free = [slot for slot in self._free if slot not in former.slots]
                lease = self._leases[conversation] = former
            elif lease is None and not self._said:
                self._said = True
                logger.warning(
                    "no three of the %d llama.cpp slots are free for conversation %r: nothing is warmed for it. "
                    "Start the server with --parallel %d (three slots a conversation) or close idle conversations.",
                    self._total,
                    conversation,
                    SLOTS_PER_CONVERSATION * (len(self._leases) + 1),
                )
            return lease

    def spare(self, conversation: str) -> int | None:
        """A slot that nobody leases, for requests that would else land on one that somebody does.

        The same for all requests of one conversation, which find each other there.
        """
        with self._lock:
            return self._free[zlib.crc32(conversation.encode()) % len(self._free)] if self._free else None

    def find(self, conversation: str) -> Lease | None:
        """The conversation's lease if it has one."""
        with self._lock:
            return self._leases.get(conversation)

    def swap(self, conversation: str) -> None:
        """The lookahead slot becomes the main one and the other way round."""
        with self._lock:
            lease = self._leases.get(conversation)
            if lease is not None:
                lease.main, lease.lookahead = lease.lookahead, lease.main

    def release(self, conversation: str) -> None:
        """Give the conversation's slots back; nothing happens where it has none."""
        with self._lock:
            lease = self._leases.pop(conversation, None)
            if lease is not None:
                self._free = sorted([*self._free, *lease.slots])
                self._former[conversation] = lease
                while len(self._former) > _FORMER:
                    self._former.popitem(last=False)

    def leased(self) -> frozenset[int]:
        """All slots that are leased now."""
        with self._lock:
            return frozenset(slot for lease in self._leases.values() for slot in lease.slots)
