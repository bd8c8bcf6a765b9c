"""The lane: work that is called off does not begin."""

from __future__ import annotations

import asyncio
import threading

import pytest

from smoothagent.lane import ThreadLane


@pytest.mark.parametrize("busy", [False, True])
def test_what_is_cancelled_before_it_begins_does_not_begin(busy: bool) -> None:
    """Else it takes what was just given back, such as a server's slots, and keeps it."""
    lane = ThreadLane()
    begun: list[int] = []
    order: list[str] = []

    async def work(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(10)

    try:
        stands, goes_on = threading.Event(), threading.Event()
        if busy:
            lane.call(lambda: (stands.set(), goes_on.wait(10)))
            assert stands.wait(10)
            for number in range(20):
                lane.spawn(work(number)).cancel()
                lane.call(order.append, "released")
            goes_on.set()
        else:
            for number in range(20):
                lane.spawn(work(number)).cancel()
        # A later piece of work, which is not cancelled, runs after all of them had their turn.
        assert lane.wait(lane.spawn(asyncio.sleep(0.01, "done")), 10) == "done"
        assert not busy or begun == []
        assert order == ["released"] * (20 if busy else 0)
    finally:
        lane.shut_down()


def test_what_has_begun_is_cancelled() -> None:
    lane = ThreadLane()
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(10)
        finally:
            ended.set()

    try:
        future = lane.spawn(work())
        assert begun.wait(10)
        future.cancel()
        assert ended.wait(10)
    finally:
        lane.shut_down()
