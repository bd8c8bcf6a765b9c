"""A summary that is being written in the background, and what it is a summary of."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
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


@dataclass(eq=False)
class _Job(Generic[M]):
    """One summary that is being written, and what it is of: never one's text with another's messages.

    Attributes:
        future: its text.
        covered: the messages that it stands for, as they were.
        existing: the summary that it goes on with.
        began: when, on the monotonic clock.
        waited: it was waited for, once.
    """

    future: concurrent.futures.Future[str]
    covered: list[M]
    existing: str
    began: float
    waited: bool = False

    def text(self) -> str | None:
        """What was written, if it is."""
        future = self.future
        if not future.done() or future.cancelled() or future.exception() is not None:
            return None
        text = future.result()
        return text if text.strip() else None


class RunningSummary(Unshared, Generic[M]):
    """At most one at a time. It is taken only where what it covers is still what it was (the law, 6). Any thread.

    An adapter says what a copy of its framework's messages is, and when two are the same to a model.

    Attributes:
        count: how many were begun or taken so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._job: _Job[M] | None = None
        self._forget()
        after_fork(self._forget)

    def _forget(self) -> None:
        """In a forked child nobody writes it."""
        self._lock = threading.Lock()
        self._job = None

    @abstractmethod
    def snapshot(self, messages: Sequence[M]) -> list[M]:
        """Messages as they are now."""

    @abstractmethod
    def alike(self, a: M, b: M) -> bool:
        """Whether two messages are the same to a model."""

    @property
    def busy(self) -> bool:
        """Whether there is one, written or not."""
        return self._job is not None

    @property
    def covers(self) -> int:
        """How many messages it stands for."""
        job = self._job
        return 0 if job is None else len(job.covered)

    def start(
        self, lane: Lane, writing: Coroutine[Any, Any, str], covered: Sequence[M], existing: str
    ) -> concurrent.futures.Future[str]:
        """Begin one of ``covered``, added to the ``existing`` summary; ``writing`` runs on the lane."""
        # Copies: what is changed in place afterwards is not what the summary says.
        copies = self.snapshot(covered)
        job = _Job(lane.spawn(writing), copies, existing, time.monotonic())
        with self._lock:
            before, self._job = self._job, job
            self.count += 1
        if before is not None:
            before.future.cancel()
        return job.future

    def drop(self) -> None:
        """It will not be used."""
        with self._lock:
            job, self._job = self._job, None
        if job is not None:
            job.future.cancel()

    def wait(self, *, due: bool) -> None:
        """Block until it is written: where it is ``due`` for as long as that may take, else for a moment."""
        job = self._job
        if job is not None:
            concurrent.futures.wait([job.future], _timeout(job, due=due))

    async def await_(self, *, due: bool) -> None:
        """`wait`, on a loop."""
        job = self._job
        if job is not None:
            await asyncio.wait({wrapped(job.future)}, timeout=_timeout(job, due=due))

    def ready(self) -> str | None:
        """The summary, if it is written."""
        job = self._job
        return None if job is None else job.text()

    def failed(self) -> bool:
        """Whether it has ended without a text."""
        job = self._job
        return job is not None and job.future.done() and job.text() is None

    @property
    def why(self) -> str:
        """Why it is not there."""
        job = self._job
        return "none is being written" if job is None else _why(job.future)

    def hangs(self) -> bool:
        """Whether it has been written for so long that it is better asked for again."""
        job = self._job
        return job is not None and not job.future.done() and time.monotonic() > job.began + _HUNG

    def fits(self, existing: str, messages: Sequence[M]) -> bool:
        """Whether it is one of the first of ``messages``, with the same summary before it."""
        job = self._job
        return job is not None and self._is_of(job, existing, messages)

    def take(self, existing: str, messages: Sequence[M]) -> Taken | None:
        """What is ready and fits, and no longer here; one that failed or does not fit is dropped."""
        job = self._job
        if job is None:
            return None
        fits = self._is_of(job, existing, messages)
        if fits and not job.future.done():
            return None
        with self._lock:
            if self._job is not job:
                return None  # another has taken it, or begun one
            self._job = None
        if not fits:
            job.future.cancel()
            return None
        text = job.text()
        if text is None:
            log.warning("a summary in the background failed, the messages are kept as they are: %s", _why(job.future))
            return None
        self.count += 1
        return Taken(text, len(job.covered))

    def _is_of(self, job: _Job[M], existing: str, messages: Sequence[M]) -> bool:
        covered = job.covered
        return existing == job.existing and len(covered) <= len(messages) and all(map(self.alike, covered, messages))


def _timeout(job: _Job[Any], *, due: bool) -> float:
    """One that was waited for in vain is not waited for again."""
    if not due or job.waited:
        return _GRACE
    job.waited = True
    return _AT_MOST


def _why(future: concurrent.futures.Future[str]) -> str:
    if not future.done():
        return "it is still being written"
    return "it was cancelled" if future.cancelled() else repr(future.exception() or "its text is empty")
