"""Many conversations in one process: bounded, freed when idle, closed together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripted import ScriptedBackend
from smoothagent import ClosedError, ConfigurationError, KeepRecent, LookaheadRuntime, RuntimePool


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def until(condition: Callable[[], bool]) -> None:
    """Wait for the lane's thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def made(backend: ScriptedBackend | None = None, **changes: Any) -> tuple[RuntimePool[Any], list[str], Clock]:
    sessions: list[str] = []
    clock = Clock()

    def make(session: str) -> LookaheadRuntime[Any]:
        sessions.append(session)
        return LookaheadRuntime(KeepRecent(2, at_turns=4), session=session, backend=backend)

    return RuntimePool(make, clock=clock, **changes), sessions, clock


def closed(runtime: LookaheadRuntime[Any]) -> bool:
    try:
        runtime.on_segment_boundary([])
    except ClosedError:
        return True
    return False


def kept(pool: RuntimePool[Any], *sessions: str) -> bool:
    """Whether just these are in the pool; looking is a use, so it comes last."""
    return len(pool) == len(sessions) and all(pool.find(s) is not None for s in sessions)


def test_a_session_keeps_its_runtime() -> None:
    pool, sessions, _ = made()
    assert pool.get("a") is pool.get("a")
    assert pool.get("b") is not pool.get("a")
    assert (sessions, len(pool)) == (["a", "b"], 2)


def test_the_longest_unused_is_freed_when_there_are_too_many() -> None:
    pool, sessions, clock = made(limit=2)
    pool.get("a")
    pool.get("b")
    clock.now = 1
    pool.get("a")
    pool.get("c")
    assert kept(pool, "a", "c")
    pool.get("b")
    assert sessions == ["a", "b", "c", "b"]


def test_whoever_holds_one_that_was_freed_goes_on_with_it() -> None:
    """A tool that runs for longer than the idle time, or more conversations at once than the limit."""
    server = ScriptedBackend()
    pool, _, clock = made(server, idle_seconds=10)
    a = pool.get("a")
    clock.now = 100
    pool.get("b")
    until(lambda: server.released == ["a"])
    assert not closed(a)
    messages = [{"role": "user", "content": "hello"}]
    assert a.on_commit(messages) == messages


def test_a_hook_or_a_call_is_a_use_and_none_is_freed_meanwhile() -> None:
    pool, _, clock = made(limit=3, idle_seconds=10)
    a, b = pool.get("a"), pool.get("b")
    clock.now = 9
    a.on_segment_boundary([])
    with b.main_request():
        clock.now = 18
        assert pool.sweep() == 0
        clock.now = 200
        assert pool.sweep() == 1, "a"
    assert kept(pool, "b")


def test_a_conversation_that_was_freed_goes_on_from_its_last_commit() -> None:
    pool, _, clock = made(idle_seconds=10)
    raw: list[Any] = [{"role": "user", "content": "task"}]
    for turn in range(6):
        raw += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"question {turn}"}]
    view = pool.get("a").on_commit(raw)
    assert len(view) < len(raw)
    clock.now = 100
    pool.get("b")
    assert pool.find("a") is None
    raw.append({"role": "user", "content": "more"})
    assert pool.get("a").on_commit(raw) == [*view, raw[-1]]


def test_what_is_idle_is_freed() -> None:
    pool, _, clock = made(idle_seconds=10)
    pool.get("a")
    clock.now = 5
    pool.get("b")
    clock.now = 12
    assert pool.sweep() == 1
    assert kept(pool, "b")
    clock.now = 30
    pool.get("c")
    assert kept(pool, "c")


def test_without_an_idle_limit_nothing_is_freed_by_time() -> None:
    pool, _, clock = made(idle_seconds=None)
    pool.get("a")
    clock.now = 10**9
    assert pool.sweep() == 0


def test_one_that_has_just_been_asked_for_is_never_the_one_freed() -> None:
    pool, _, clock = made(limit=1, idle_seconds=10)
    pool.get("a")
    clock.now = 100
    pool.get("a")
    assert kept(pool, "a")


def test_dropping_and_closing_free_what_the_server_holds() -> None:
    backend = ScriptedBackend()
    pool, _, _ = made(backend)
    a, b = pool.get("a"), pool.get("b")
    pool.drop("a")
    pool.drop("a")
    pool.drop("unknown")
    assert closed(a)
    until(lambda: backend.released == ["a"])
    pool.close()
    pool.close()
    assert closed(b)
    until(lambda: backend.released == ["a", "b"])
    assert len(pool) == 0
    with pytest.raises(ClosedError, match="make a new RuntimePool"):
        pool.get("a")


def test_a_pool_of_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a pool of 0 conversations"):
        made(limit=0)


def test_a_runtime_that_cannot_be_made_leaves_the_pool_as_it_was() -> None:
    def make(session: str) -> LookaheadRuntime[Any]:
        raise ConfigurationError("no")

    pool: RuntimePool[Any] = RuntimePool(make)
    with pytest.raises(ConfigurationError):
        pool.get("a")
    assert len(pool) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 8)), max_size=30), st.integers(1, 4))
def test_never_more_than_the_limit_and_never_one_idle_too_long(uses: list[tuple[str, int]], limit: int) -> None:
    pool, _, clock = made(limit=limit, idle_seconds=10)
    used: dict[str, float] = {}
    for session, pause in uses:
        clock.now += pause
        pool.get(session)
        used.pop(session, None)
        used[session] = clock.now
        # The newest ones that are not idle.
        fresh = [s for s, t in used.items() if clock.now - t <= 10][-limit:]
        used = {s: t for s, t in used.items() if s in fresh}
        assert len(pool) == len(used)
    assert all(pool.find(s) is not None for s in used)
    pool.close()


def test_threads_get_one_runtime_a_session() -> None:
    pool, sessions, _ = made()
    barrier = threading.Barrier(8)
    got: list[LookaheadRuntime[Any]] = []

    def ask() -> None:
        barrier.wait()
        got.append(pool.get("a"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(r) for r in got}) == 1
    assert sessions == ["a"]
    pool.close()
