"""Running code that may block beside the lane's loop: a user's, or a framework's."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from smoothagent.errors import BackendError, BackendUnreachableError
from smoothagent.lane import Lane

T = TypeVar("T")


async def blocking(lane: Lane, fn: Callable[[], Awaitable[None] | None]) -> Awaitable[None] | None:
    """Run a user's ``transform`` where it may block: a daemon thread, which never delays interpreter exit."""
    if not lane.threads:
        return fn()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Awaitable[None] | None] = loop.create_future()

    def deliver(result: Awaitable[None] | None, error: BaseException | None) -> None:
        if done.done():
            if inspect.iscoroutine(result):
                result.close()  # cancelled meanwhile: nobody will await it
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = fn()
        except StopIteration as raised:
            error = RuntimeError(f"transform leaked {raised!r}")  # no future can carry a StopIteration
            error.__cause__ = raised
        except BaseException as raised:  # handed on to the waiting coroutine, whatever it is
            error = raised
        loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name="smoothagent-transform", daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        if done.done() and not done.cancelled() and done.exception() is None:
            deliver(done.result(), None)  # delivered already, but not taken
        raise


async def in_daemon_thread(work: Callable[[], T], failed: str) -> T:
    """Call ``work`` in a daemon thread, which never delays interpreter exit.

    For a framework's model object: its async client belongs to the user's loop.

    Args:
        work: what to call.
        failed: begins the error's text where it raises.

    Raises:
        BackendError: from whatever it raises; one of the class BackendError as it is.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # pyright: ignore[reportArgumentType]  it is there where no error is
        elif isinstance(error, BackendError):
            done.set_exception(error)
        else:
            unreachable = BackendUnreachableError(f"{failed}: {error!r}")
            unreachable.__cause__ = error
            done.set_exception(unreachable)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # handed on to the waiting coroutine, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="smoothagent-model", daemon=True).start()
    return await done
