"""One procedure, driven by blocking and by async callers alike.

A procedure is a generator that yields what it waits for and is sent how that ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from smoothagent.lane import Lane

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Work on the lane to wait for, at most ``timeout`` seconds (None: it ends by itself)."""

    future: concurrent.futures.Future[Any]
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a wait ended: with ``value``, with ``error``, or with neither, when time was up or the work was cancelled."""

    value: Any = None
    error: Exception | None = None
    in_time: bool = True


Procedure = Generator[Wait, Ended, T]


def drive(procedure: Procedure[T], lane: Lane) -> T:
    """Run to the end, blocking the calling thread where it waits."""
    try:
        wait = next(procedure)
        while True:
            wait = procedure.send(_block(wait, lane))
    except StopIteration as stop:
        return stop.value


async def adrive(procedure: Procedure[T]) -> T:
    """Run to the end on the calling loop. Cancelling the caller cancels neither lane nor work."""
    try:
        wait = next(procedure)
        while True:
            wait = procedure.send(await _pause(wait))
    except StopIteration as stop:
        return stop.value
    finally:
        procedure.close()


def wrapped(future: concurrent.futures.Future[Any]) -> asyncio.Future[Any]:
    """``future`` for the running loop; an error nobody asks for is not reported as lost."""
    inner = asyncio.wrap_future(future)
    inner.add_done_callback(lambda f: f.cancelled() or f.exception())
    return inner


def _block(wait: Wait, lane: Lane) -> Ended:
    try:
        return Ended(lane.wait(wait.future, wait.timeout))
    except (TimeoutError, concurrent.futures.CancelledError):
        if wait.future.done() and not wait.future.cancelled():
            return _ended(wait.future)  # the work itself raised TimeoutError
        return Ended(in_time=False)
    except Exception as error:
        if not wait.future.done():
            raise  # not the work's error but ours: a blocking hook on the lane's own loop
        return Ended(error=error)


async def _pause(wait: Wait) -> Ended:
    # asyncio.wait cancels the future neither when we are cancelled nor when time is up.
    done, _ = await asyncio.wait({wrapped(wait.future)}, timeout=wait.timeout)
    if not done or wait.future.cancelled():
        return Ended(in_time=False)
    return _ended(wait.future)


def _ended(future: concurrent.futures.Future[Any]) -> Ended:
    error = future.exception()
    if error is None:
        return Ended(future.result())
    if isinstance(error, Exception):
        return Ended(error=error)
    raise error
