"""The agent's own model calls, as far as they tell of themselves (`MainRequest`)."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from smoothagent.errors import BackendError, ConfigurationError
from smoothagent.forks import after_fork
from smoothagent.in_use import InUse
from smoothagent.lookahead import Lookahead
from smoothagent.serving.backend import Backend, LoopBound, Stream, Usage

M = TypeVar("M")
log = logging.getLogger("smoothagent")


class OwnCalls(Generic[M]):
    """The host of a conversation's main requests (`smoothagent.request.RequestHost`).

    Args:
        lookahead: what gives way to them.

    Attributes:
        in_use: hooks that wait and calls that have not ended, for whoever frees what is idle.
        first_usage: who else is told the first call's usage.
        closed: the conversation is over; a call made now is like any other, and nothing may be leased for it.
    """

    def __init__(self, lookahead: Lookahead[M]) -> None:
        self._lookahead = lookahead
        self._backend = backend = lookahead.backend
        # Asked once: checking a protocol takes longer than all else a hook does of this.
        self._loop_bound = backend if isinstance(backend, LoopBound) else None
        self._observer = lookahead.observer
        self._probe: concurrent.futures.Future[None] | None = None
        self._answer: list[str] = []
        self._waited = False
        self.in_use = InUse()
        self.closed = False
        self.first_usage: Callable[[Usage], None] | None = None
        after_fork(self._start_afresh)

    def ask_server(self) -> None:
        """Find out, once and from the first hook on, what the server can do, so that requests are routed right."""
        backend = self._backend
        if self._loop_bound is not None:
            self._loop_bound.note_loop()
        if self._probe is None and backend is not None:
            self._probe = self._lookahead.lane.spawn(self._ask_caps(backend))

    async def _ask_caps(self, backend: Backend) -> None:
        try:
            self._lookahead.server_known(await backend.caps())
        except BackendError as error:
            log.debug("session %s: the server could not be asked yet: %s", self._lookahead.session, error)
            self._probe = None  # it may still be starting: the next hook asks again
        except ConfigurationError as error:
            # Asking again would not mend it, and the agent goes on: it is said at once, and not only when work fails.
            self._observer.say_once("configuration", f"nothing is warmed or routed: {error}")

    def _start_afresh(self) -> None:
        self._probe = None  # it was asked on the parent's lane
        self.in_use.forget()

    # ---- what a main request tells -------------------------------------------------------------

    def request_opens(self) -> concurrent.futures.Future[Any] | None:
        """A call is about to be made; returns what it has to wait for, shortly.

        The first one: that the server's kind is known, so that it can be routed. The first after a commit: that what
        was warmed is where it goes.
        """
        self._observer.request_opens()
        self.ask_server()
        probe, waited = self._probe, self._waited
        self._waited = True
        delivery = self._lookahead.delivery
        if delivery is None and not waited and probe is not None and not probe.done():
            return probe
        return delivery

    def request_may_block(self) -> bool:
        """Whether the lane goes on while a running loop stands still; not for the first call, which can do without."""
        loop_bound = self._loop_bound is not None and self._loop_bound.needs_this_loop()
        return self._lookahead.lane.threads and not loop_bound and self._lookahead.delivery is not None

    def request_started(self) -> dict[str, Any]:
        """Mark and route the agent's own call; lookahead gives way."""
        self._observer.request_started()
        self._answer.clear()
        self.in_use.begins()
        if self._backend is None or self.closed:
            return {}
        with self._lookahead.lock:
            self._lookahead.delivered()
        self._backend.main_arrived(self._lookahead.session)
        return self._backend.route(self._lookahead.session, Stream.MAIN)

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        self._observer.first_token()
        if self._backend is not None and not self.closed:
            self._backend.main_first_token(self._lookahead.session)

    def request_text(self, text: str) -> None:
        """What the agent's model answers is part of the next prompt: the lookahead follows it."""
        lookahead = self._lookahead
        job = lookahead.job
        if job is None or not lookahead.follows_answers:
            return
        self._answer.append(text)
        if job.wants_answer(sum(map(len, self._answer))):
            self._answer = ["".join(self._answer)]
            with lookahead.lock:
                lookahead.answering(self._answer[0])

    def request_usage(self, usage: Usage) -> None:
        """Calibrate the counter, settle the last commit."""
        conversation = self._lookahead.conversation
        told, self.first_usage = self.first_usage, None
        if told is not None:
            told(usage)
        with self._lookahead.lock:
            conversation.calibrate(usage.prompt_tokens)
            self._observer.usage(usage, conversation.view.messages)

    def request_done(self) -> None:
        """Tool time begins."""
        self.in_use.ends()
        if self._backend is not None:
            self._backend.main_done(self._lookahead.session)
