"""A summary that is being written in the background, and what it is a summary of."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from smoothagent.forks import after_fork
from smoothagent.lane import Lane
from smoothagent.unshared import Unshared
from smoothagent.waiting import wrapped

M = TypeVar("M")

log = logging.getLogger("smoothagent")

_GRACE = 0.25
"""Seconds that nobody takes for a pause."""
_AT_MOST = 30.0
"""Seconds that a summary is waited for where it has to be there."""
_HUNG = 300.0
"""Seconds after which one is given up that nobody waits for."""


class Taken(NamedTuple):
    """A summary that is being put in its place.

    Attributes:
        text: the whole summary, what there was before included.
        covered: how many messages it stands for.
    """

    text: str
    covered: int


class RunningSummary(Unshared, Generic[M]):
    """At most one at a time. It is taken only where what it covers is still what it was (the law, 6).

    An adapter says what a copy of its framework's messages is, and when two are the same to a model.

    Attributes:
        covers: how many messages it stands for.
        count: how many were begun or taken so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._future: concurrent.futures.Future[str] | None = None
        self._covered: list[M] = []
        self._existing = ""
        self._waited = False
        self._began = 0.0
        after_fork(self._forget)

    @abstractmethod
    def snapshot(self, messages: Sequence[M]) -> list[M]:
        """Messages as they are now."""

    @abstractmethod
    def alike(self, a: M, b: M) -> bool:
        """Whether two messages are the same to a model."""

    @property
    def busy(self) -> bool:
        """Whether there is one, written or not."""
        return self._future is not None

    @property
    def covers(self) -> int:
        """How many messages it stands for."""
        return len(self._covered)

    def start(
        self, lane: Lane, writing: Coroutine[Any, Any, str], covered: Sequence[M], existing: str
    ) -> concurrent.futures.Future[str]:
        """Begin one of ``covered``, added to the ``existing`` summary; ``writing`` runs on the lane."""
        self.drop()
        self.count += 1
        # Copies: what is changed in place afterwards is not what the summary says.
        self._covered, self._existing = self.snapshot(covered), existing
        self._waited, self._began = False, time.monotonic()
        future = self._future = lane.spawn(writing)
        return future

    def drop(self) -> None:
        """It will not be used."""
        future, self._future = self._future, None
        if future is not None:
            future.cancel()

    def wait(self, *, due: bool) -> None:
        """Block until it is written: where it is ``due`` for as long as that may take, else for a moment."""
        future, timeout = self._future, self._timeout(due=due)
        if future is not None:
            concurrent.futures.wait([future], timeout)

    async def await_(self, *, due: bool) -> None:
        """`wait`, on a loop."""
        future, timeout = self._future, self._timeout(due=due)
        if future is not None:
            await asyncio.wait({wrapped(future)}, timeout=timeout)

    def ready(self) -> str | None:
        """The summary, if it is written."""
        future = self._future
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        text = future.result()
        return text if text.strip() else None

    def failed(self) -> bool:
        """Whether it has ended without a text."""
        future = self._future
        return future is not None and future.done() and self.ready() is None

    @property
    def why(self) -> str:
        """Why it is not there."""
        return "none is being written" if self._future is None else _why(self._future)

    def hangs(self) -> bool:
        """Whether it has been written for so long that it is better asked for again."""
        future = self._future
        return future is not None and not future.done() and time.monotonic() > self._began + _HUNG

    def fits(self, existing: str, messages: Sequence[M]) -> bool:
        """Whether it is one of the first of ``messages``, with the same summary before it."""
        covered = self._covered
        return (
            self._future is not None
            and existing == self._existing
            and len(covered) <= len(messages)
            and all(map(self.alike, covered, messages))
        )

    def take(self, existing: str, messages: Sequence[M]) -> Taken | None:
        """What is ready and fits, and no longer here; one that failed or does not fit is dropped."""
        future = self._future
        if future is None:
            return None
        fits = self.fits(existing, messages)
        if fits and not future.done():
            return None
        text = self.ready()
        self._future = None
        if not fits:
            future.cancel()
            return None
        if text is None:
            log.warning("a summary in the background failed, the messages are kept as they are: %s", _why(future))
            return None
        self.count += 1
        return Taken(text, len(self._covered))

    def _timeout(self, *, due: bool) -> float:
        """One that was waited for in vain is not waited for again."""
        if not due or self._waited:
            return _GRACE
        self._waited = True
        return _AT_MOST

    def _forget(self) -> None:
        """In a forked child nobody writes it."""
        self._future = None


def _why(future: concurrent.futures.Future[str]) -> str:
    if not future.done():
        return "it is still being written"
    return "it was cancelled" if future.cancelled() else repr(future.exception() or "its text is empty")
