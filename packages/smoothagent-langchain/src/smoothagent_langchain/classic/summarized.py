"""A memory whose summary is written while the user reads the answer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from typing import Any, Self, cast

from langchain_core.messages import BaseMessage
from pydantic import PrivateAttr

from smoothagent_langchain.aside import quiet
from smoothagent_langchain.classic.warmed import WarmedMemory
from smoothagent_langchain.running import RunningSummary, snapshot
from smoothagent_langchain.shape import History

log = logging.getLogger("smoothagent")

_MISSED = "a summary that was waited for has not come, the messages are kept as they are: %s"


class SummarizedMemory(WarmedMemory):
    """A summary that is written while the user reads the answer.

    Attributes:
        strict: have the summary made in `save_context`, as the built-in does; else it may come a turn later, and what
            it will cover is given as it is until then. For memories that are made anew for each request, or saved
            after each turn.
    """

    strict: bool = False
    _running: RunningSummary = PrivateAttr(default_factory=RunningSummary)
    _latest: list[BaseMessage] = PrivateAttr(default_factory=list[BaseMessage])
    """The messages that are in no summary, as of the last load or save: the lane does not ask a database."""

    def __copy__(self) -> Self:
        """A copy has its own summaries made."""
        twin = super().__copy__()
        twin._running, twin._latest = RunningSummary(), list(self._latest)
        return twin

    def flush(self) -> None:
        """Wait for what is being summarized, 30 s a summary, and put it in its place: before the memory is saved."""
        self._begin()
        while self._owes and not self._running.failed():
            before = self._running.count
            self._running.wait(due=True)
            self._settle()
            if before == self._running.count:
                break  # it does not come
        if self._is_short:
            log.warning(_MISSED, self._running.why)

    async def aflush(self) -> None:
        """`flush`, on a loop."""
        self._begin()
        while self._owes and not self._running.failed():
            before = self._running.count
            await self._running.await_(due=True)
            await self._asettle()
            if before == self._running.count:
                break
        if self._is_short:
            log.warning(_MISSED, self._running.why)

    def _begin(self) -> None:
        """Begin what is owed, if nothing is being written."""

    @property
    def _is_short(self) -> bool:
        """Whether something should be in the summary that is not."""
        raise NotImplementedError

    async def _asettle(self) -> None:
        """`_settle`, on a loop."""
        self._settle()

    @property
    def _owes(self) -> bool:
        """Whether there is anything that should be in the summary and is being written."""
        return self._running.busy and bool(self._latest)

    def _settle(self) -> None:
        """Take the summary that is ready."""
        raise NotImplementedError

    def _forget(self) -> None:
        super()._forget()
        self._running.drop()
        self._latest = []

    def _summarize(self, covered: list[BaseMessage], existing: str) -> None:
        """Have ``covered`` added to the summary, by a copy of this memory whose model shows in nobody's traces."""
        if covered:
            twin: Any = self.model_copy(update={"llm": quiet(cast("Any", self).llm)})
            lane, covered = self._upcoming.lane, snapshot(covered)
            future = self._running.write(lane, lambda: twin.predict_new_summary(covered, existing), covered, existing)
            future.add_done_callback(lambda _: lane.call(self._warm_ahead))

    def _warm_ahead(self) -> None:
        """Warm what a prompt with the new summary begins with."""
        messages, text = self._latest, self._running.ready()
        if text is not None and self._running.fits(self._summary, messages):
            self._upcoming.expect(self._history(text, messages[self._running.covers :]))

    @property
    def _summary(self) -> str:
        """The summary so far."""
        raise NotImplementedError

    def _history(self, summary: str, messages: list[BaseMessage]) -> History:
        """What the chain is given."""
        raise NotImplementedError


@contextlib.contextmanager
def kept() -> Generator[None]:
    """A summary that fails on the spot, too, leaves everything as it is."""
    try:
        yield
    except Exception as error:
        log.warning("a summary failed, the messages are kept as they are: %r", error)
