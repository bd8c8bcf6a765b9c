"""Where lookahead work runs: one daemon thread per process, with an event loop of its own.

The loop outlives every turn, request and user loop, so background work belongs to the runtime and
not to the turn that started it. A daemon thread never delays interpreter exit; a fork resets it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from smoothagent.errors import ClosedError

T = TypeVar("T")
log = logging.getLogger("smoothagent")


class Lane(Protocol):
    """Runs coroutines beside the agent.

    Attributes:
        threads: blocking work may go to threads of its own.
    """

    threads: bool

    def time(self) -> float:
        """The loop's clock, seconds."""
        ...

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``work`` in a fresh context. Cancelling the future cancels the work."""
        ...

    def call(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn`` on the lane's loop soon; from the loop's own thread, now."""
        ...

    def later(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn`` on the lane's loop, never now; for finalizers, which may find any lock taken."""
        ...

    def wait(self, future: concurrent.futures.Future[T], timeout: float | None) -> T:
        """Block the calling thread. Raises TimeoutError; the work goes on."""
        ...


async def _unless_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """One that is cancelled before it begins does not begin: asyncio cancels it only after its first step."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        work.close()
        raise
    return await work


class ThreadLane:
    """The process's lane."""

    threads = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over = False

    def time(self) -> float:
        """The loop's clock, seconds."""
        return self._running().time()

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``work`` in a fresh context, so that nothing of the caller's traces or callbacks follows."""
        if self._over:
            # Other exit handlers may still run an agent: its lookahead fails, it does not hang.
            work.close()
            failed: concurrent.futures.Future[T] = concurrent.futures.Future()
            failed.set_exception(ClosedError("the interpreter is exiting: no lookahead work is started any more"))
            return failed
        loop = self._running()
        return contextvars.Context().run(asyncio.run_coroutine_threadsafe, _unless_cancelled(work), loop)

    def call(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn`` on the loop; at interpreter exit, when there is none any more, here."""
        if self._over:
            fn(*args)
            return
        loop = self._running()
        if threading.current_thread() is self._thread:
            fn(*args)
        else:
            loop.call_soon_threadsafe(fn, *args, context=contextvars.Context())

    def later(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn`` on the loop, if there is one."""
        loop = self._loop
        if loop is not None and not self._over:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(fn, *args, context=contextvars.Context())

    def wait(self, future: concurrent.futures.Future[T], timeout: float | None) -> T:
        """Block the calling thread until ``future`` is done."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking hook was called on the lookahead lane itself: use the async twin there")
        return future.result(timeout)

    def shut_down(self) -> None:
        """At interpreter exit: cancel what is left, so that nothing is reported as lost; takes a moment at most."""
        self._over = True
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not loop.is_running():
            return

        def stop(rounds: int) -> None:
            tasks = asyncio.all_tasks(loop)
            if not tasks or not rounds:
                loop.stop()
                return
            # Again and again: one that is cancelled may first wait for something else to end.
            for task in tasks:
                task.cancel()
            loop.call_soon(loop.call_soon, stop, rounds - 1)

        loop.call_soon_threadsafe(stop, 50)
        thread.join(_EXIT_SECONDS)
        if not thread.is_alive():
            loop.close()

    def reset(self) -> None:
        """Forget thread and loop; in a forked child they do not exist."""
        self._lock = threading.Lock()
        self._loop = None
        self._thread = None
        self._over = False

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), name="smoothagent-lane", daemon=True)
                thread.start()
                self._loop, self._thread = loop, thread
            return self._loop


_EXIT_SECONDS = 0.5


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio lets these out of the loop, which all conversations share; the work has failed with it already.
            log.warning("lookahead work raised %r", error)
        else:
            return


_process_lane = ThreadLane()
atexit.register(_process_lane.shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process_lane.reset)


def process_lane() -> ThreadLane:
    """The lane of this process."""
    return _process_lane


class LoopLane:
    """A lane on the caller's own running loop: for tests under a virtual clock, and single-loop programs.

    Only the async hooks can be used with it where they have to wait.
    """

    threads = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def time(self) -> float:
        """The loop's clock, seconds."""
        return self._loop.time()

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``work`` as a task in a fresh context."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        task = self._loop.create_task(work, context=contextvars.Context())
        self._tasks.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if future.cancelled():
                return
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        task.add_done_callback(ended)
        future.add_done_callback(lambda f: task.cancel() if f.cancelled() else None)
        return future

    def call(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn`` now."""
        fn(*args)

    def later(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn`` soon."""
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(fn, *args, context=contextvars.Context())

    def wait(self, future: concurrent.futures.Future[T], timeout: float | None) -> T:
        """Never possible on one's own loop."""
        del timeout
        if future.done():
            return future.result()
        raise RuntimeError("this runtime lives on the calling loop: use aon_commit instead of on_commit")
