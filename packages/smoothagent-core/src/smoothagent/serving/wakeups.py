"""Waiting on one event loop for what other threads tell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Wakeups:
    """Waits and calls on ``loop``, which may be closed at any time; None: there is none yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop = loop
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def now(self) -> float:
        """The loop's time, in seconds; 0 without one."""
        return self.loop.time() if self.loop is not None else 0.0

    async def sleep(self, delay: float | None) -> None:
        """Until `wake`, or until ``delay`` seconds have passed. On the loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = None if delay is None else loop.call_later(delay, _resolve, future)
        self._waiters.add(future)
        try:
            await future
        finally:
            self._waiters.discard(future)
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """End all waits. On the loop."""
        for future in tuple(self._waiters):
            _resolve(future)

    def call(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` on the loop: at once where that runs here, else soon. From any thread."""
        loop = self.loop
        if loop is None:
            return
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            fn()
            return
        # A loop that has just been closed has nothing to be told.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(fn)


def _resolve(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed
        if not future.done():
            future.set_result(None)
