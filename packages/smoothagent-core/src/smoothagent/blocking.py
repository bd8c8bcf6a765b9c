"""Running a user's code that may block beside the lane's loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable

from smoothagent.lane import Lane


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
