"""The event loop that a client of the user's belongs to: its connections, and so all calls on it, live there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from smoothagent.errors import BackendUnreachableError
from smoothagent.waiting import wrapped

T = TypeVar("T")

_LOOK_EVERY = 1.0
"""Seconds between looks whether the loop still runs: one that ends tells nobody."""
_STOP_WITHIN = 5.0
"""Seconds that a cancelled call may take to stop on its loop."""


class Home:
    """Runs coroutines on one loop, whichever loop awaits them.

    Until a loop is noted they run where they are awaited.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def note(self) -> None:
        """The caller's running loop is the home, unless there is one that still runs. Called where the agent is."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._loop is None or not self._loop.is_running():
            self._loop = running

    def forget(self) -> None:
        """There is no home."""
        self._loop = None

    def is_here(self) -> bool:
        """Whether the caller's running loop is the home."""
        try:
            return self._loop is not None and self._loop is asyncio.get_running_loop()
        except RuntimeError:
            return False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, run at home. Cancelling the caller cancels it there and waits for its end.

        Raises:
            BackendUnreachableError: the loop is closed, or was while the work was under way.
        """
        home = self._loop
        if home is None or home is asyncio.get_running_loop():
            return await work
        return await _Errand(home, work).result()


class _Errand(Generic[T]):
    """One coroutine on another loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop, self._work = loop, work
        self._task: asyncio.Task[T] | None = None
        self._unwanted = False
        self._done: concurrent.futures.Future[T] = concurrent.futures.Future()

    async def result(self) -> T:
        waiting = wrapped(self._done)
        try:
            self._loop.call_soon_threadsafe(self._start)
            # asyncio.wait does not cancel what it waits for when it is cancelled itself.
            while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY))[0]:
                if not self._loop.is_running():
                    self._loop.call_soon_threadsafe(self._cancel)
                    raise _closed()
        except RuntimeError:  # closed before it was told
            raise _closed() from None
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
                if self._loop.is_running():
                    await asyncio.wait({waiting}, timeout=_STOP_WITHIN)
            raise
        finally:
            if not self._loop.is_running():
                self._abandon()
        if waiting.cancelled():
            # Not by us: whoever ends a loop cancels what still runs on it.
            raise _closed() from None
        return waiting.result()

    def _abandon(self) -> None:
        """The loop has ended, perhaps with the task just begun: nothing of it is left to complain at its end."""
        task = self._task
        if task is None:
            self._unwanted = True
            self._work.close()
        elif self._loop.is_closed():
            if task.done():
                _ = task.cancelled() or task.exception()
            else:
                # A closed loop can neither cancel its tasks nor run them; asyncio would report each as forgotten.
                task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
                self._work.close()

    def __del__(self) -> None:
        # Its loop may have ended before it began.
        if inspect.getcoroutinestate(self._work) == inspect.CORO_CREATED:
            self._work.close()

    def _start(self) -> None:
        if inspect.getcoroutinestate(self._work) == inspect.CORO_CLOSED:
            return  # given up while the loop stood still
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._deliver)
        if self._unwanted:
            self._task.cancel()

    def _cancel(self) -> None:
        self._unwanted = True
        if self._task is not None:
            self._task.cancel()

    def _deliver(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._done.cancel()
        elif (error := task.exception()) is not None:
            self._done.set_exception(error)
        else:
            self._done.set_result(task.result())


def _closed() -> BackendUnreachableError:
    return BackendUnreachableError(
        "the event loop that the client passed as client=… lives on has ended or stands still, or has cancelled the "
        "lookahead work on it: keep it running while the agent runs, or pass base_url=… so that the lookahead has a "
        "client of its own"
    )
