"""Whether anything of a conversation is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class InUse:
    """Counts what is under way; any thread, at any moment (a stream that is dropped ends in a garbage collection).

    Attributes:
        tell: called at each use.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], object] = _nobody
        self.forget()

    @property
    def now(self) -> bool:
        """Whether a hook waits or a call has not ended."""
        return self._count > 0

    def begins(self) -> None:
        """A call begins."""
        with self._lock:
            self._count += 1
        self.tell()

    def ends(self) -> None:
        """It has ended."""
        with self._lock:
            self._count = max(0, self._count - 1)
        self.tell()

    def noted(self) -> None:
        """A hook was called that is over at once."""
        self.tell()

    @contextmanager
    def during(self) -> Generator[None]:
        """A hook that may wait."""
        self.begins()
        try:
            yield
        finally:
            self.ends()

    def forget(self) -> None:
        """Nothing is under way, as in a forked child."""
        self._lock = threading.RLock()
        self._count = 0


def _nobody() -> None:
    pass
