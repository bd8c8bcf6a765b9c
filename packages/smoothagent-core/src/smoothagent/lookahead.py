"""A conversation's lookahead: the state machine with the job it commands, and what the job tells."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from functools import reduce
from typing import Generic, TypeVar

from smoothagent.ceiling import Ceiling
from smoothagent.codec import Codec
from smoothagent.conversation import Conversation
from smoothagent.errors import BackendError, SmoothAgentError
from smoothagent.forks import after_fork
from smoothagent.job import LookaheadJob
from smoothagent.lane import Lane
from smoothagent.ledger import Ledger
from smoothagent.machine import (
    MOST_STALE,
    Command,
    Do,
    Event,
    Failed,
    Planned,
    Restored,
    State,
    Transformed,
    Warmed,
    step,
)
from smoothagent.observe import Observer
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Backend, Caps, Usage
from smoothagent.serving.chat import without_thoughts
from smoothagent.state import LookaheadState
from smoothagent.strategy import CutStrategy, LookaheadStrategy
from smoothagent.telemetry import Telemetry

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_LOG_EVENTS = 10_000


class Lookahead(Generic[M]):
    """Applies events to the machine and carries its commands out.

    Everything but what a job tells is called under ``lock``.

    Attributes:
        lock: guards the conversation and all that belongs to it.
        job: the job in flight or ready.
        state: the machine's state.
        log: its newest events.
        previous: done once the last job has let go of the server.
        delivery: tells whether a committed stream has come to where main requests go, if it was warmed elsewhere.
        follows_answers: answers may be warmed as they stream.
        ceiling: what an uncommitted request may never reach.
    """

    def __init__(
        self,
        session: str,
        strategy: LookaheadStrategy,
        conversation: Conversation[M],
        codec: Codec[M],
        backend: Backend | None,
        lane: Lane,
        ledger: Ledger,
        ceiling: Ceiling,
    ) -> None:
        self.session, self.strategy, self.conversation, self.codec = session, strategy, conversation, codec
        self.backend, self.lane, self.ledger, self.ceiling = backend, lane, ledger, ceiling
        self.observer = Observer(session, ledger, lane.time)
        self.lock = threading.RLock()
        self.state = State()
        self.log: list[Event] = []
        self.job: LookaheadJob[M] | None = None
        self.previous: concurrent.futures.Future[None] | None = None
        self.delivery: concurrent.futures.Future[bool] | None = None
        self.follows_answers = False
        self._started_at = 0.0
        after_fork(self._start_afresh)

    @property
    def prompt(self) -> Prompt:
        """The main stream's prompt."""
        return self.conversation.prompt

    @property
    def telemetry(self) -> Telemetry:
        """Where spans go."""
        return self.observer.telemetry

    def _start_afresh(self) -> None:
        """In a forked child: the lane's thread, the job and whoever held the lock exist in the parent only."""
        self.lock = threading.RLock()
        self.job = self.previous = self.delivery = None
        self.start_over()

    def apply(self, event: Event) -> tuple[Command, ...]:
        """The machine's next step."""
        self.state, commands = step(self.state, event)
        self.log.append(event)
        if len(self.log) > _LOG_EVENTS:
            old, self.log = self.log[: _LOG_EVENTS // 2], self.log[_LOG_EVENTS // 2 :]
            self.log.insert(0, Restored(reduce(lambda state, event: step(state, event)[0], old, State())))
        return commands

    def start_over(self) -> None:
        """Nothing is in flight or prepared any more."""
        self.apply(Restored(State(next_id=self.state.next_id)))

    def carry_out(self, command: Command) -> None:
        """Do what concerns the job."""
        match command.do:
            case Do.START:
                self._start(command.job)
            case Do.EXTEND if self.job is not None:
                self.job.extend(self.conversation.snapshot())
            case Do.PROMOTE if self.backend is not None and self.job is not None:
                self.lane.spawn(self._promote(self.backend, self.job))
            case Do.CANCEL:
                self.drop(command.why)
                if self.state.stale == MOST_STALE:
                    self.observer.say_once(
                        "stale",
                        f"{MOST_STALE} lookaheads in a row were for a history or a prompt that had changed when it "
                        "was to be committed, so nothing is prepared until the next commit: keep what changes on "
                        "every turn (a date, retrieved memories) out of the system text, and at the end",
                    )
            case _:
                pass

    def answering(self, text: str) -> None:
        """The model has answered ``text`` so far, to all that the view holds."""
        said = without_thoughts(text)  # which are not part of the next prompt
        if said and self.job is not None and not self.prompt.volatile_tail:
            self.job.answering(len(self.conversation.view), said)

    def delivered(self) -> None:
        """A main request is about to be routed: what has not been handed over by now is not waited for."""
        delivery, self.delivery = self.delivery, None
        if self.backend is not None and delivery is not None:
            settle_delivery(delivery, self.backend, self.session)

    def undelivered(self) -> None:
        """Nobody is going to ask for what is being handed over."""
        delivery, self.delivery = self.delivery, None
        if delivery is not None:
            delivery.cancel()

    def drop(self, why: str) -> None:
        """Cancel the job: what it prepared will not be used."""
        job, self.job = self.job, None
        if job is None:
            return
        log.debug("session %s: lookahead %d dropped: %s", self.session, job.id, why)
        self.previous = job.stopped
        self.observer.wasted(job.spent)
        job.dropped = True
        job.cancel()
        self._settle()

    def take(self, *, warmer: bool) -> LookaheadJob[M] | None:
        """The job whose result is being committed; it ends.

        Where its stream is the ``warmer`` one, the server's streams change places. A late one may hold less of the
        new view than the main stream does, which still has all that both views begin with.
        """
        job, self.job = self.job, None
        if job is not None:
            self.previous = job.stopped
            job.cancel()
            if self.backend is not None and warmer and self.backend.committed(self.session):
                self.delivery = self.lane.spawn(deliver(self.backend, self.session))
            self._settle()
        return job

    async def _promote(self, backend: Backend, job: LookaheadJob[M]) -> None:
        if job is not self.job:
            return  # over before it could be hurried
        try:
            await backend.promote(self.session)
        except BackendError as error:
            log.debug("promotion failed: %s", error)

    def _settle(self) -> None:
        """The hurry is over, and so is one that was about to begin: the lane does both in order."""
        if self.backend is not None:
            self.lane.call(self.backend.settle, self.session)

    def ask(self, question: str) -> bool:
        """One of the strategy's questions; a fault in it must not stop the agent."""
        strategy = self.strategy
        la = strategy.la
        strategy.la = self.job.la if self.job is not None and self.job.la is not None else LookaheadState()
        try:
            return bool(getattr(strategy, question)())
        except Exception as error:
            name = f"{type(strategy).__name__}.{question}"
            self.observer.say_once(question, f"{name} failed and counts as no: {error!r}")
            return False
        finally:
            strategy.la = la

    def at_job(self) -> str:
        """Digest of what the job covers, in the present view."""
        job = self.state.job
        return (self.conversation.view.digest(job.end) or "") if job is not None and job.end else ""

    def _start(self, job_id: int) -> None:
        try:
            self._begin(job_id)
        except Exception as error:  # of a strategy's own methods
            self.job = None
            self.job_failed(job_id, error, len(self.conversation.view))

    def _begin(self, job_id: int) -> None:
        self.job = LookaheadJob(
            job_id,
            self.strategy.snapshot(LookaheadState()),
            self.conversation.snapshot(),
            self.session,
            self.conversation.prompt,
            self.lane,
            self.backend,
            self.codec,
            self,
            after=self.previous,
            prefills=self.observer.fidelity.warming_pays,
            planned=self._planned(),
        )
        self._started_at = self.lane.time()
        planned = self.job.planned
        if planned:
            self.apply(Planned(job_id, planned, self.conversation.view.digest(planned) or ""))
        self.job.start()

    def _planned(self) -> int:
        """The cut that a job started now will make, where the strategy has one that stays; else 0."""
        strategy = self.strategy
        if strategy.exact or not isinstance(strategy, CutStrategy):
            return 0
        prediction = strategy.predict(strategy.main.messages)
        return prediction.cut if prediction is not None else 0

    # ---- what a job tells, on the lane ---------------------------------------------------------

    def server_known(self, caps: Caps) -> None:
        """What the server can do: its window bounds the ceiling, what it lacks is said once."""
        with self.lock:
            if caps.window is not None:
                self.ceiling.window(caps.window)
                hard = self.strategy.waits_for
                if hard is not None and hard >= caps.window:
                    self.observer.say_once(
                        "window",
                        f"the trigger is {hard} tokens and the server's window is {caps.window}: the server will "
                        "refuse the prompt before anything is transformed; lower the trigger, or give the server more "
                        "context",
                    )
            self.follows_answers = caps.follows_answers
            self.observer.server_known(caps, self.backend)

    def job_transformed(self, job_id: int, la: LookaheadState, digest: str) -> None:
        """The job's transformation is ``la``: what it covers and its digest change together."""
        with self.lock:
            if self.job is not None and self.job.id == job_id:
                self.job.la = la
            self.apply(Transformed(job_id, la.last_segment_end, digest))

    def job_warmed(self, job_id: int) -> None:
        """The job has nothing left to prefill."""
        with self.lock:
            job = self.job
            if job is not None and job.id == job_id and not job.measured:
                job.measured = True
                self.conversation.growth.lookahead(self.lane.time() - self._started_at)
            self.apply(Warmed(job_id))

    def job_failed(self, job_id: int, error: Exception, length: int) -> None:
        """The job's transformation failed; the agent goes on, at worst as slow as without us."""
        with self.lock:
            if self.job is not None and self.job.id == job_id:
                self.drop("failed")
            self.apply(Failed(job_id, length))
            self.ledger.add(failures=1)
            if isinstance(error, SmoothAgentError):
                self.observer.say_once("lookahead", f"a lookahead failed, the history is kept: {error}")
            else:
                log.warning("session %s: a lookahead failed, the history is kept", self.session, exc_info=error)

    def job_prefilled(self, usage: Usage) -> None:
        """Tokens were prefilled ahead."""
        cached = max(0, usage.cached_tokens or 0)
        self.ledger.add(prefilled_tokens=max(0, usage.prompt_tokens - cached), reused_tokens=cached)

    def job_cut_short(self, spent: Usage, *, wasted: bool) -> None:
        """A request of the job's ended without a result, after it had computed and generated this."""
        prefilled, generated = spent.prompt_tokens, spent.completion_tokens
        self.ledger.add(
            prefilled_tokens=prefilled,
            generated_tokens=generated,
            wasted_tokens=prefilled + generated if wasted else 0,
        )

    def prefill_failed(self, error: Exception) -> None:
        """Warming failed; the transformation alone runs ahead."""
        with self.lock:
            self.ledger.add(failures=1)
            self.observer.say_once("prefill", f"warming failed, the transformation alone runs ahead: {error}")


async def deliver(backend: Backend, session: str) -> bool:
    """Bring a committed stream to where main requests go. Whether it came."""
    try:
        return await backend.deliver(session)
    except Exception as error:
        log.warning("session %s: what was warmed was not handed over, the next request is cold: %s", session, error)
        return False


def settle_delivery(delivery: concurrent.futures.Future[bool], backend: Backend, session: str) -> None:
    """Take the commit's change of streams back where the delivery did not come in time.

    The stream that main requests went to has at least what both prompts begin with. What comes later would replace
    what the request is about to compute.
    """
    if delivery.done() and not delivery.cancelled() and delivery.result():
        return
    delivery.cancel()
    log.info("session %s: what was warmed was not handed over in time, the request is cold", session)
    backend.undelivered(session)
