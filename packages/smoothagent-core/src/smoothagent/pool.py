"""Many conversations in one process, bounded; idle ones are freed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from smoothagent.errors import ClosedError, ConfigurationError
from smoothagent.record import CommitRecord
from smoothagent.runtime import LookaheadRuntime

M = TypeVar("M")

_RECORDS = 4
"""Records of freed conversations that are kept, as a multiple of the limit."""


class RuntimePool(Generic[M]):
    """One `LookaheadRuntime` a session, made on first use.

    When there are more than ``limit``, the longest unused are freed; so are those unused for ``idle_seconds``. Any
    hook or call of the agent's is a use, and none is freed while one is under way. A conversation that was freed
    loses only what was prepared: the next ``get`` makes a new runtime with the record of its last commit, and an
    agent that still holds the old one can go on with it.

    Args:
        make: makes the runtime of a session.
        limit: most conversations at once.
        idle_seconds: how long an unused one is kept; None keeps it.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        make: Callable[[str], LookaheadRuntime[M]],
        *,
        limit: int = 256,
        idle_seconds: float | None = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit < 1:
            raise ConfigurationError(f"a pool of {limit} conversations: the limit must be at least 1")
        self._make, self._limit, self._idle, self._clock = make, limit, idle_seconds, clock
        self._lock = threading.Lock()
        self._runtimes: OrderedDict[str, tuple[LookaheadRuntime[M], float]] = OrderedDict()
        self._records: OrderedDict[str, CommitRecord[M]] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._runtimes)

    def get(self, session: str) -> LookaheadRuntime[M]:
        """The runtime of ``session``. Raises ClosedError after ``close``."""
        with self._lock:
            if self._closed:
                raise ClosedError("the pool is closed: make a new RuntimePool")
            now = self._clock()
            found = self._runtimes.pop(session, None)
            runtime = found[0] if found is not None else self._new(session)
            self._runtimes[session] = (runtime, now)
            freed = self._take_idle(now, session)
        for old in freed:
            old.rest()
        return runtime

    def _new(self, session: str) -> LookaheadRuntime[M]:
        runtime = self._make(session)
        record = self._records.pop(session, None)
        if record is not None:
            runtime.restore(record)
        runtime.in_use.tell = lambda: self._used(session, runtime)
        return runtime

    def _used(self, session: str, runtime: LookaheadRuntime[M]) -> None:
        found = self._runtimes.get(session)
        if found is not None and found[0] is runtime:
            # Without the lock, which a garbage collection that ends a stream may find taken: a use may be missed.
            self._runtimes[session] = (runtime, self._clock())

    def find(self, session: str) -> LookaheadRuntime[M] | None:
        """The runtime of ``session`` if there is one, which counts as a use."""
        with self._lock:
            found = self._runtimes.pop(session, None)
            if found is None:
                return None
            self._runtimes[session] = (found[0], self._clock())
            return found[0]

    def peek(self, session: str) -> LookaheadRuntime[M] | None:
        """The runtime of ``session`` if there is one; looking is no use."""
        with self._lock:
            found = self._runtimes.get(session)
            return None if found is None else found[0]

    def drop(self, session: str) -> None:
        """Close one conversation, if it is there."""
        with self._lock:
            found = self._runtimes.pop(session, None)
        if found is not None:
            found[0].close()

    def sweep(self) -> int:
        """Close what is idle now; returns how many."""
        with self._lock:
            freed = self._take_idle(self._clock())
        for old in freed:
            old.rest()
        return len(freed)

    def close(self) -> None:
        """Close all conversations."""
        with self._lock:
            self._closed = True
            runtimes = [r for r, _ in self._runtimes.values()]
            self._runtimes.clear()
        for runtime in runtimes:
            runtime.close()

    def _take_idle(self, now: float, wanted: str | None = None) -> list[LookaheadRuntime[M]]:
        """Take out what is to be freed, the longest unused first, and never the one that is ``wanted``."""
        by_age = sorted(self._runtimes.items(), key=lambda item: item[1][1])
        freed: list[LookaheadRuntime[M]] = []
        for session, (runtime, used) in by_age:
            expired = self._idle is not None and now - used > self._idle
            if len(self._runtimes) <= self._limit and not expired:
                break
            if runtime.in_use.now or session == wanted:
                continue
            del self._runtimes[session]
            freed.append(runtime)
            if runtime.record is not None:
                self._records[session] = runtime.record
                self._records.move_to_end(session)
        while len(self._records) > _RECORDS * self._limit:
            self._records.popitem(last=False)
        return freed
