"""An event loop whose clock jumps to the next timer when nothing can run, after trio's ``MockClock``.

``time()`` starts at 0 and moves only when every task waits: ``asyncio.sleep(3600)`` takes no real time and two
runs of a test see the same times. What the loop cannot see (a thread at work) must be declared with `held`,
or the clock would jump over it; ``run_in_executor`` and ``asyncio.to_thread`` declare themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")

DEADLOCK_S = 20.0
"""Real seconds without a timer, an event or a thread's wake-up after which a test is called deadlocked."""


class DeadlockError(RuntimeError):
    """Every task waits for something that no timer and no thread will bring."""


class _JumpingSelector(selectors.BaseSelector):
    """Never sleeps while there is a timer to jump to: adds the wait to the virtual clock instead."""

    def __init__(self, grace: float) -> None:
        self._real = selectors.DefaultSelector()
        self._grace = grace
        self._lock = threading.Lock()
        self.now = 0.0
        self.holds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return self._real.select(0)
        ready = self._real.select(self._grace)
        if ready:
            return ready
        if timeout is None:
            return self._wait_for_thread()
        while self.holds:
            ready = self._real.select(0.005)
            if ready:
                return ready
        self.now += timeout
        return []

    def _wait_for_thread(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(DEADLOCK_S)
        while not ready and self.holds:
            ready = self._real.select(DEADLOCK_S)
        if not ready:
            raise DeadlockError(f"no timer is set and nothing happened for {DEADLOCK_S:.0f} real seconds")
        return ready

    def hold(self, by: int) -> None:
        with self._lock:
            self.holds += by

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """A selector event loop on virtual time.

    Args:
        grace: real seconds to wait for socket events before each jump; 0 where no test uses sockets.
    """

    def __init__(self, *, grace: float = 0.0) -> None:
        # The base constructor already asks for the time.
        self._jumping = _JumpingSelector(grace)
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Keep the clock from jumping while a thread works for this loop; any thread may enter it."""
        self._jumping.hold(1)
        try:
            yield
        finally:
            self._jumping.hold(-1)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """As the base class does, with the clock held until the thread is done."""
        future = super().run_in_executor(executor, func, *args)
        self._jumping.hold(1)
        future.add_done_callback(lambda _: self._jumping.hold(-1))
        return future


def run_virtual(main: Coroutine[Any, Any, T], *, grace: float = 0.0) -> T:
    """Run ``main`` to its end on a fresh `VirtualClockLoop`; leftover tasks are cancelled and awaited."""
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(grace=grace)) as runner:
        return runner.run(main)
