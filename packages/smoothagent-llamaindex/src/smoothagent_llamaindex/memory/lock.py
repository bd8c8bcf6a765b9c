"""A lock that an object keeps to itself."""

from __future__ import annotations

import threading
from types import TracebackType

from smoothagent.forks import after_fork
from smoothagent.unshared import Unshared


class Lock(Unshared):
    """A lock, held by threads and for moments only, never while something is awaited.

    A deep copy of the object that has it gets another one, and so does a forked child.
    """

    def __init__(self) -> None:
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
