"""Many conversations in one process: bounded, freed when idle, closed together."""

from __future__ import annotations

import threading
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


def test_a_session_keeps_its_runtime() -> None:
    pool, sessions, _ = made()
    assert pool.get("a") is pool.get("a")
    assert pool.get("b") is not pool.get("a")
    assert (sessions, len(pool)) == (["a", "b"], 2)


def test_the_longest_unused_is_closed_when_there_are_too_many() -> None:
    pool, sessions, _ = made(limit=2)
    a, b = pool.get("a"), pool.get("b")
    pool.get("a")
    pool.get("c")
    assert closed(b)
    assert not closed(a)
    assert len(pool) == 2
    pool.get("b")
    assert sessions == ["a", "b", "c", "b"]


def test_what_is_idle_is_freed() -> None:
    pool, _, clock = made(idle_seconds=10)
    a = pool.get("a")
    clock.now = 5
    b = pool.get("b")
    clock.now = 12
    assert pool.sweep() == 1
    assert closed(a)
    assert not closed(b)
    clock.now = 30
    c = pool.get("c")
    assert closed(b)
    assert not closed(c)
    assert len(pool) == 1


def test_without_an_idle_limit_nothing_is_freed_by_time() -> None:
    pool, _, clock = made(idle_seconds=None)
    pool.get("a")
    clock.now = 10**9
    assert pool.sweep() == 0


def test_one_that_has_just_been_asked_for_is_never_the_one_freed() -> None:
    pool, _, clock = made(limit=1, idle_seconds=10)
    pool.get("a")
    clock.now = 100
    assert not closed(pool.get("a"))


def test_dropping_and_closing_free_what_the_server_holds() -> None:
    backend = ScriptedBackend()
    pool, _, _ = made(backend)
    a, b = pool.get("a"), pool.get("b")
    pool.drop("a")
    pool.drop("a")
    pool.drop("unknown")
    assert closed(a)
    assert backend.released == ["a"]
    pool.close()
    pool.close()
    assert closed(b)
    assert backend.released == ["a", "b"]
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
    used: dict[str, tuple[float, LookaheadRuntime[Any]]] = {}
    for session, pause in uses:
        clock.now += pause
        runtime = pool.get(session)
        assert not closed(runtime)
        used[session] = (clock.now, runtime)
        open_ones = [(s, t) for s, (t, r) in used.items() if not closed(r)]
        assert len(open_ones) == len(pool) <= limit
        assert all(clock.now - t <= 10 for _, t in open_ones)
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
