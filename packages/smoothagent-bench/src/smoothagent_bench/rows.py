"""The rows of a framework's own run, which goes on beside whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any

from smoothagent_bench.record import Row


async def rows_of(work: Coroutine[Any, Any, None], queue: asyncio.Queue[Row | None]) -> AsyncGenerator[Row]:
    """What ``work`` puts into ``queue``, as it does. What it raises is raised after that; it ends with its reader."""
    running = asyncio.create_task(work)
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (row := await queue.get()) is not None:
            yield row
        await running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
