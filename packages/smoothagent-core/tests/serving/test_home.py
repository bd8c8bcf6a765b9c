"""Calls on a client of the user's are made on its own loop, and end with it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from serving.fake_chat import FakeChat
from serving.fake_http import Reply, Seen
from smoothagent import KeepRecent, LookaheadRuntime, OpenAIBackend, Prompt
from smoothagent.errors import BackendUnreachableError, ConfigurationError
from smoothagent.lane import ThreadLane
from smoothagent.serving.home import Home

T = TypeVar("T")


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine function."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


@dataclass
class Noting(FakeChat):
    """Notes on which loop it is asked."""

    loops: set[asyncio.AbstractEventLoop] = field(default_factory=set[asyncio.AbstractEventLoop])

    async def handle(self, seen: Seen) -> Reply:
        self.loops.add(asyncio.get_running_loop())
        return await super().handle(seen)


@contextmanager
def elsewhere() -> Generator[ThreadLane]:
    """A lane of the test's own."""
    lane = ThreadLane()
    yield lane
    lane.shut_down()


async def on(lane: ThreadLane, work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(lane.spawn(work))


@on_a_loop
async def test_it_runs_at_home_and_brings_back_the_result_or_the_error() -> None:
    home = Home()
    home.note()

    async def where() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("as it was")

    with elsewhere() as lane:
        assert await on(lane, home.run(where())) is asyncio.get_running_loop()
        assert await home.run(where()) is asyncio.get_running_loop()
        with pytest.raises(KeyError, match="as it was"):
            await on(lane, home.run(fails()))


@on_a_loop
async def test_without_a_home_it_runs_where_it_is_awaited() -> None:
    home = Home()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with elsewhere() as lane:
        assert await on(lane, home.run(where())) is not asyncio.get_running_loop()


@on_a_loop
async def test_cancelling_the_caller_stops_the_work_before_the_caller_ends() -> None:
    home, began, ended, log = Home(), asyncio.Event(), asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()
    home.note()

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            log.append("stopped")

    async def caller() -> None:
        try:
            await home.run(work())
        finally:
            log.append("caller ended")
            loop.call_soon_threadsafe(ended.set)

    with elsewhere() as lane:
        future = asyncio.wrap_future(lane.spawn(caller()))
        await began.wait()
        future.cancel()
        await asyncio.wait_for(ended.wait(), 5)
    assert log == ["stopped", "caller ended"]


def test_work_on_a_loop_that_ends_is_an_error_and_not_a_wait() -> None:
    home = Home()

    async def main(lane: ThreadLane) -> Any:
        home.note()
        return lane.spawn(home.run(asyncio.Event().wait()))

    with elsewhere() as lane:
        # asyncio.run cancels what still runs on its loop.
        future = asyncio.run(main(lane))
        with pytest.raises(
            BackendUnreachableError, match=r"event loop that the client passed as client=… .* keep it running"
        ):
            future.result(5)
        late = asyncio.Event().wait()
        with pytest.raises(BackendUnreachableError, match="has ended or stands still"):
            lane.spawn(home.run(late)).result(5)


def test_a_loop_that_is_closed_without_a_word_is_noticed() -> None:
    home, loop = Home(), asyncio.new_event_loop()

    async def note() -> None:
        home.note()

    loop.run_until_complete(note())
    with elsewhere() as lane:
        future = lane.spawn(home.run(asyncio.sleep(0)))
        threading.Event().wait(0.05)  # it is scheduled on a loop that stands still
        loop.close()
        with pytest.raises(BackendUnreachableError, match="has ended or stands still"):
            future.result(10)


def test_a_new_loop_is_the_home_once_the_old_one_is_closed() -> None:
    home = Home()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def main(lane: ThreadLane) -> bool:
        home.note()
        return await on(lane, home.run(where())) is asyncio.get_running_loop()

    with elsewhere() as lane:
        assert asyncio.run(main(lane))
        assert asyncio.run(main(lane))


def agent_runtime(backend: OpenAIBackend, lane: ThreadLane | None) -> LookaheadRuntime[dict[str, Any]]:
    return LookaheadRuntime(KeepRecent(2, at_turns=4), backend=backend, prompt=Prompt(model="m"), lane=lane)


async def talk(runtime: LookaheadRuntime[dict[str, Any]], turns: int) -> AsyncGenerator[int]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 40}]
    for i in range(turns):
        messages.append({"role": "user", "content": f"question {i} " * 20})
        messages = await runtime.aon_commit(messages)
        async with runtime.main_request():
            await asyncio.sleep(0.01)
        messages.append({"role": "assistant", "content": f"answer {i} " * 20})
        runtime.on_segment_boundary(messages)
        await asyncio.sleep(0.03)
        yield len(messages)


@on_a_loop
async def test_a_backend_on_the_agents_own_client_stays_on_the_agents_loop() -> None:
    server = Noting(kind="vllm", per_token=0.0)
    backend = OpenAIBackend(client=server.client(), dialect="vllm", warm=True)
    with elsewhere() as lane:
        runtime = agent_runtime(backend, lane)
        lengths = [n async for n in talk(runtime, 6)]
        await runtime.aclose()
    assert any(b < a for a, b in itertools.pairwise(lengths)), "it committed"
    assert server.bodies("/v1/chat/completions"), "it warmed"
    assert server.loops == {asyncio.get_running_loop()}


def test_a_backend_made_before_any_loop_finds_the_agents() -> None:
    server = Noting(kind="vllm", per_token=0.0)
    backend = OpenAIBackend(client=server.client(), dialect="vllm", warm=True)

    async def main(lane: ThreadLane) -> asyncio.AbstractEventLoop:
        runtime = agent_runtime(backend, lane)
        async for _ in talk(runtime, 6):
            pass
        await runtime.aclose()
        return asyncio.get_running_loop()

    with elsewhere() as lane:
        assert server.loops <= {asyncio.run(main(lane))}
        assert server.bodies("/v1/chat/completions")


def test_a_loop_that_stands_still_is_not_waited_for() -> None:
    """Made on a loop for the set-up, used from another: the first never runs again."""
    home, setup = Home(), asyncio.new_event_loop()

    async def note() -> None:
        home.note()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def main(lane: ThreadLane) -> bool:
        home.note()
        return await on(lane, home.run(where())) is asyncio.get_running_loop()

    setup.run_until_complete(note())
    with elsewhere() as lane:
        with pytest.raises(BackendUnreachableError, match="stands still"):
            lane.spawn(home.run(where())).result(10)
        assert asyncio.run(main(lane))
    setup.run_until_complete(asyncio.sleep(0))
    setup.close()


@on_a_loop
async def test_a_blocking_commit_on_the_clients_own_loop_is_refused_and_no_deadlock() -> None:
    server = Noting(kind="vllm", per_token=0.0)
    backend = OpenAIBackend(client=server.client(), dialect="vllm", warm=True)
    runtime = agent_runtime(backend, None)
    with pytest.raises(ConfigurationError, match=r"await aon_commit"):
        runtime.on_commit([{"role": "user", "content": "hi"}])
    # From a thread the loop is free to serve it.
    assert await asyncio.to_thread(runtime.on_commit, [{"role": "user", "content": "hi"}])
    await runtime.aclose()


def test_the_lane_never_becomes_the_home() -> None:
    """One loop a turn, as in a web worker: each is the home while it runs."""
    server = Noting(kind="vllm", per_token=0.0)
    backend = OpenAIBackend(client=server.client(), dialect="vllm", warm=True)
    mine: list[asyncio.AbstractEventLoop] = []
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 40}]

    async def turn(i: int) -> None:
        mine.append(asyncio.get_running_loop())
        messages.append({"role": "user", "content": f"question {i} " * 20})
        messages[:] = await runtime.aon_commit(messages)
        messages.append({"role": "assistant", "content": f"answer {i} " * 20})
        runtime.on_segment_boundary(messages)
        await asyncio.sleep(0.05)

    with elsewhere() as lane:
        runtime = agent_runtime(backend, lane)
        for i in range(8):
            asyncio.run(turn(i))
        runtime.close(5)
    assert server.loops <= set(mine)
