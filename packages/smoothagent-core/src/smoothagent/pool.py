"""Many conversations in one process, bounded; idle ones are freed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from smoothagent.errors import ClosedError, ConfigurationError
from smoothagent.runtime import LookaheadRuntime

M = TypeVar("M")


class RuntimePool(Generic[M]):
    """One `LookaheadRuntime` a session, made on first use.

    When there are more than ``limit``, the longest unused are closed; so are those unused for
    ``idle_seconds``. A closed conversation loses only what was prepared: the next ``get`` makes a new
    runtime, which starts as the plain framework would.

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
            runtime = found[0] if found is not None else self._make(session)
            self._runtimes[session] = (runtime, now)
            freed = self._take_idle(now)
        for old in freed:
            old.close()
        return runtime

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
            old.close()
        return len(freed)

    def close(self) -> None:
        """Close all conversations."""
        with self._lock:
            self._closed = True
            runtimes = [r for r, _ in self._runtimes.values()]
            self._runtimes.clear()
        for runtime in runtimes:
            runtime.close()

    def _take_idle(self, now: float) -> list[LookaheadRuntime[M]]:
        freed: list[LookaheadRuntime[M]] = []
        while self._runtimes:
            session, (runtime, used) = next(iter(self._runtimes.items()))
            expired = self._idle is not None and now - used > self._idle
            if len(self._runtimes) <= self._limit and not expired:
                break
            del self._runtimes[session]
            freed.append(runtime)
        return freed
