"""A lock that an object keeps to itself."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from smoothagent.forks import after_fork
from smoothagent.unshared import Unshared

_POLL = 0.001


class Lock(Unshared):
    """A lock for threads and loops alike, held for moments only.

    A copy of the object that has it gets another one, and so does a forked child.
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

    async def __aenter__(self) -> None:
        # Not in a thread: one whose caller is cancelled would hold it for ever.
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110  it is shared with threads
            await asyncio.sleep(_POLL)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
