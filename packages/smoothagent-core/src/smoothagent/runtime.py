"""The thin shell around the state machine: two hooks in an agent's loop (paper section 3.2, Listing 2)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from smoothagent.codec import Codec, OpenAICodec
from smoothagent.conversation import Conversation
from smoothagent.delegation import Delegation
from smoothagent.errors import BackendError, ClosedError, ConfigurationError, SmoothAgentError
from smoothagent.job import LookaheadJob, Natives
from smoothagent.lane import Lane, process_lane
from smoothagent.ledger import Ledger
from smoothagent.limits import Limits
from smoothagent.machine import (
    Boundary,
    Command,
    CommitPoint,
    Committed,
    Do,
    Event,
    Failed,
    State,
    SynchronousFailed,
    Transformed,
    Warmed,
    step,
)
from smoothagent.message import Message
from smoothagent.model import LaneModel
from smoothagent.observe import Observer
from smoothagent.prompt import Prompt
from smoothagent.record import CommitRecord, CommitReport
from smoothagent.request import MainRequest
from smoothagent.serving.backend import Backend, Caps, Stream, Usage
from smoothagent.state import LookaheadState
from smoothagent.strategy import CutStrategy, LookaheadStrategy
from smoothagent.telemetry import Telemetry
from smoothagent.tokens import EstimateCounter, TokenCounter
from smoothagent.waiting import Ended, Procedure, Wait, adrive, drive, wrapped
from smoothagent.wrap import wrap

M = TypeVar("M")
C = TypeVar("C")
log = logging.getLogger("smoothagent")

_LOG_EVENTS = 10_000


class LookaheadRuntime(Generic[M]):
    """Lookahead for one conversation.

    Thread-safe: hooks may come from any thread or loop, one at a time per conversation.

    Args:
        strategy: the strategy, or a factory of it.
        backend: the model server; without one the transformation alone runs ahead, nothing is warmed.
        codec: how messages go in and out; default `OpenAICodec`.
        prompt: what else shapes the tokens; a hook's own ``prompt`` overrides it from then on.
        session: name of the conversation; default a random one.
        ceiling: tokens that an uncommitted request may never reach while a lookahead is late.
        tokens: counts messages; default an estimate that the server's usage calibrates.
        lookahead: False transforms at the trigger only, on the critical path, as built-ins do.
        lane: where lookahead work runs; default the process's daemon thread.
        ledger: counts what lookahead cost and saved; default one of its own.
        wait: seconds to wait at most for a lookahead at the ceiling.

    Attributes:
        last_commit: how the last commit turned out, None before the first.

    Raises:
        ConfigurationError: the strategy needs a model and there is no backend, or the ceiling is below hard.
    """

    def __init__(
        self,
        strategy: LookaheadStrategy | Callable[[], LookaheadStrategy],
        *,
        backend: Backend | None = None,
        codec: Codec[M] | None = None,
        prompt: Prompt | None = None,
        session: str | None = None,
        ceiling: int | None = None,
        tokens: TokenCounter | None = None,
        lookahead: bool = True,
        lane: Lane | None = None,
        ledger: Ledger | None = None,
        wait: float = 30.0,
    ) -> None:
        self.strategy = strategy if isinstance(strategy, LookaheadStrategy) else strategy()
        _check(self.strategy, backend, ceiling)
        self.backend = backend
        self.codec: Codec[M] = codec or cast("Codec[M]", OpenAICodec())
        self.session = session or uuid.uuid4().hex
        self.lookahead = lookahead
        self.wait = wait
        self.ledger = ledger or Ledger()
        self.last_commit: CommitReport | None = None
        self._lane: Lane = lane or process_lane()
        hard = self.strategy.hard
        self._fixed_ceiling = ceiling is not None
        self._ceiling = ceiling if ceiling is not None else (Limits(hard).default_ceiling() if hard else None)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._state = State()
        self._log: list[Event] = []
        self._job: LookaheadJob[M] | None = None
        self._previous: concurrent.futures.Future[None] | None = None
        self._job_started = 0.0
        self._due_at: int | None = None
        self._critical: concurrent.futures.Future[LookaheadStrategy] | None = None
        self._checked: Prompt | None = None
        self._conversation = Conversation(self.codec, tokens or EstimateCounter(), self.strategy, prompt or Prompt())
        self._observer = Observer(self.session, self.ledger, self._lane.time)
        self._probe = self._lane.spawn(self._ask_server(backend)) if backend is not None else None

    # ---- the two hooks -------------------------------------------------------------------------

    def on_commit(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> list[M]:
        """Call before each model call; returns what to send: a new list, never the one given.

        Untouched messages come back as the same objects. Blocks only where the law lets it.

        Raises HistoryError for a history no request could carry, ConfigurationError for a prompt the
        strategy cannot work with, ClosedError after ``close``.
        """
        return drive(self._committing(messages, prompt), self._lane)

    async def aon_commit(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> list[M]:
        """`on_commit` for async agents. Cancelling it never cancels the lookahead."""
        return await adrive(self._committing(messages, prompt))

    def on_segment_boundary(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> None:
        """Call when a segment is complete: best when the assistant's calls are known, before tools run.

        Never blocks; any number of times; calls may be pending. Raises as `on_commit`.
        """
        with self._lock:
            self._follow(messages, prompt)
            conversation, view = self._conversation, self._conversation.view
            conversation.known = len(view)
            wants = self.lookahead and self._job is None and self.ledger.allows() and self._ask("should_lookahead")
            promote = self._job is not None and self._ask("should_promote")
            digest = view.digest(len(view)) or ""
            event = Boundary(len(view), digest, self._at_job(), conversation.prompt_digest, wants, promote)
            self._observer.boundary(self.strategy, wanted=wants or self._job is not None, lookahead=self.lookahead)
            for command in self._apply(event):
                self._carry_out(command)

    def main_request(self, prompt: Prompt | None = None) -> MainRequest:
        """A context manager around the agent's own call: marks it, paces lookahead beside it, measures it."""
        if prompt is not None:
            with self._lock:
                self._conversation.prompt = prompt
        return MainRequest(self)

    def wrap(self, client: C) -> C:
        """An openai client whose ``chat.completions.create`` does what `main_request` does."""
        return wrap(client, self.main_request)

    def delegate(self, *, prompt: Prompt, head: Sequence[M], instruction: Callable[[str], M]) -> Delegation[M]:
        """Hand a task to a sub-agent: warm its prompt now, its instruction as it is written.

        Args:
            prompt: the sub-agent's model and tools.
            head: the messages its first request begins with; `Delegation.extend` adds to them.
            instruction: makes the instruction message of a text.
        """
        return Delegation(
            backend=self.backend,
            codec=self.codec,
            lane=self._lane,
            ledger=self.ledger,
            prompt=prompt,
            head=head,
            instruction=instruction,
            lookahead=self.lookahead,
        )

    # ---- records, closing ----------------------------------------------------------------------

    @property
    def prompt(self) -> Prompt:
        """The prompt in force."""
        return self._conversation.prompt

    @property
    def record(self) -> CommitRecord[M] | None:
        """The last commit, for adapters that hand in raw history and persist it."""
        return self._conversation.record

    def restore(self, record: CommitRecord[M]) -> None:
        """Go on from a persisted record; where the next input matches neither of its chains it is dropped."""
        with self._lock:
            self._conversation.record = record

    @property
    def events(self) -> list[dict[str, Any]]:
        """The state machine's newest events, for `smoothagent.machine` to replay."""
        with self._lock:
            return [event.encode() for event in self._log]

    @property
    def telemetry(self) -> Telemetry:
        """Spans and metrics of this conversation."""
        return self._observer.telemetry

    def close(self, timeout: float = 0) -> None:
        """Cancel lookahead work and free what the server holds; waits up to ``timeout`` seconds for it."""
        future = self._shut()
        if timeout > 0 and future is not None:
            concurrent.futures.wait([future], timeout)

    async def aclose(self) -> None:
        """`close`, waiting for the work to have stopped."""
        future = self._shut()
        if future is not None:
            await asyncio.wait({wrapped(future)}, timeout=5.0)

    def _shut(self) -> concurrent.futures.Future[None] | None:
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            if self._critical is not None:
                self._critical.cancel()  # frees a caller that waits for it
            job = self._job
            self._drop_job("closed")
            self._observer.closing()
        if self.backend is not None:
            self.backend.release(self.session)
        return job.stopped if job is not None else self._previous

    # ---- committing ----------------------------------------------------------------------------

    def _committing(self, messages: Sequence[M], prompt: Prompt | None) -> Procedure[list[M]]:
        """The whole of ``on_commit``."""
        started = self._lane.time()
        waited = 0.0
        with self._lock:
            self._follow(messages, prompt)
            self._conversation.growth.turn(started, self._conversation.tokens, self._conversation.view.assistants)
            commands = self._apply(self._commit_point(messages))
        while True:
            with self._lock:
                outcome = self._decide(commands)
            if not isinstance(outcome, Wait):
                self._observer.committed(self.last_commit, self._lane.time() - started, waited)
                return outcome
            before = self._lane.time()
            ended = yield outcome
            waited += self._lane.time() - before
            with self._lock:
                if commands[-1].do is Do.WAIT:
                    commands = self._apply(self._commit_point(messages, waited=True))
                    continue
                result = self._waited_for(ended)
                self._observer.committed(self.last_commit, self._lane.time() - started, waited)
                return result

    def _decide(self, commands: Sequence[Command]) -> list[M] | Wait:
        """Carry out a commit point's commands; the last one is the decision."""
        for command in commands[:-1]:
            self._carry_out(command)
        decision = commands[-1]
        match decision.do:
            case Do.COMMIT:
                return self._commit(decision.why)
            case Do.SYNCHRONOUS:
                return self._synchronous()
            case Do.WAIT if self._job is not None:
                return Wait(self._job.transformed, self.wait)
            case _:
                return list(self._conversation.view.natives)

    def _commit_point(self, messages: Sequence[M], *, waited: bool = False) -> CommitPoint:
        due = self._ask("should_commit")
        if due and self._due_at is None:
            self._due_at = self._conversation.tokens
        job = self._job
        at_ceiling = self._at_ceiling()
        strategy = self.strategy
        decides = job is None or job.la is not None or waited or at_ceiling or (strategy.exact and not strategy.defer)
        if due and decides:
            # What cannot be committed yet need not be verified yet: that costs a pass over all messages.
            self._conversation.reverify(messages)
            due, at_ceiling = self._ask("should_commit"), self._at_ceiling()
        tail, warm = ("ok", False) if job is None or not due else self._freshness(job)
        return CommitPoint(
            length=len(self._conversation.view),
            at_job=self._at_job(),
            prompt=self._conversation.prompt_digest,
            due=due,
            tail=tail,
            defer=strategy.defer,
            at_ceiling=at_ceiling,
            waited=waited,
            exact=strategy.exact,
            warm=warm,
        )

    def _at_ceiling(self) -> bool:
        """Whether the uncommitted request would reach the ceiling.

        A strategy that names no token trigger has one all the same, from where it first was due.
        """
        tokens = self._conversation.tokens
        ceilings = [self._ceiling] if self._ceiling is not None else []
        if not self._fixed_ceiling and self.strategy.hard is None:
            ceilings += [self._due_at + self._due_at // 4] if self._due_at is not None else []
        return any(tokens >= ceiling for ceiling in ceilings)

    def _freshness(self, job: LookaheadJob[M]) -> tuple[str, bool]:
        """Whether what is prepared leaves the right tail, and whether what is cold of it matters little."""
        conversation, view = self._conversation, self._conversation.view
        if job.la is None:
            # A result that could not be committed when it comes is not worth waiting for.
            tail = sum(view.sizes[job.planned :])
            return self.strategy.tail_fits(tail, conversation.fixed + tail) if job.planned else "ok", False
        twin = self.strategy.snapshot(job.la)
        try:
            done = twin.commit(view.messages)
        except Exception:
            return "ok", True  # the commit itself will say what is wrong
        if done is None:
            return "long", True  # not what is due now: made anew, as a stale one
        after = conversation.count(done.head) + sum(view.sizes[done.covered :])
        view_tokens = conversation.fixed + after
        fits = twin.tail_fits(after - conversation.count(job.la.transformed), view_tokens)
        if not job.prefills:
            return fits, True
        warmth = conversation.warmth(job.warmed, done, conversation.settled())
        return fits, warmth.known - warmth.warmed <= max(16, view_tokens // 12)

    def _commit(self, why: str) -> list[M] | Wait:
        job = self._job
        assert job is not None, "only a job can be committed"
        twin = self.strategy.snapshot(job.la)
        if twin.extend_inline and not twin.exact:
            return self._transformed_inline(twin)
        return self._splice(twin, "late" if why else "lookahead")

    def _synchronous(self) -> list[M] | Wait:
        twin = self.strategy.snapshot(LookaheadState())
        if twin.exact:
            return self._splice(twin, "sync")
        twin.bind(LaneModel(self, self._learned(), lookahead=False))
        return self._transformed_inline(twin)

    def _transformed_inline(self, twin: LookaheadStrategy) -> list[M] | Wait:
        """Run ``transform`` on the critical path: here, or on the lane where it has to wait for a model."""
        try:
            work = twin.transform()
        except Exception as error:
            return self._waited_for(Ended(error=error))
        if work is None:
            return self._waited_for(Ended(twin))
        self._critical = self._lane.spawn(_finished(work, twin))
        self._critical.add_done_callback(lambda _: self._lane.call(_discard, work))
        return Wait(self._critical, None)

    def _waited_for(self, ended: Ended) -> list[M]:
        """The end of a transformation on the critical path."""
        if ended.error is None and ended.in_time:
            return self._splice(ended.value, "lookahead" if self._job is not None else "sync")
        return self._failed(ended.error)

    def _failed(self, error: Exception | None) -> list[M]:
        """A transformation on the critical path failed: the agent goes on with the history as it is."""
        if self._closed:
            return list(self._conversation.view.natives)
        if error is None or isinstance(error, SmoothAgentError):
            self._observer.say_once("transform", f"the transformation failed, the history is kept: {error}")
        else:
            log.warning("session %s: the transformation failed, the history is kept", self.session, exc_info=error)
        self.ledger.add(failures=1)
        return self._unchanged(SynchronousFailed(len(self._conversation.view)), "failed")

    def _splice(self, twin: LookaheadStrategy, kind: str) -> list[M]:
        """Replace the prefix of the view by what was prepared; a commit that saves too little is not made."""
        conversation, view, job = self._conversation, self._conversation.view, self._job
        try:
            done = twin.commit(view.messages)
        except Exception as error:
            return self._failed(error)
        if done is None or not 0 < done.covered <= len(view):
            return self._unchanged(SynchronousFailed(len(view)), "unfit")
        before, messages = conversation.tokens, len(view)
        warmth = conversation.warmth(job.warmed if job is not None else (), done, conversation.known)
        after = before - sum(view.sizes[: done.covered]) + conversation.count(done.head)
        refusal = twin.refuse(before, after)
        if refusal is not None:
            self._observer.say_once("saving", f"a transformation is not made: {refusal}")
            return self._unchanged(Committed(len(view), worthwhile=False), "saves too little")
        natives = job.natives if job is not None else self._learned()
        result = conversation.splice(done, natives)
        report = CommitReport(kind, before, after, messages, len(result), done.covered, *warmth)
        self._finish_commit(report)
        return list(result)

    def _unchanged(self, event: Event, why: str) -> list[M]:
        self._drop_job(why)
        self._apply(event)
        return list(self._conversation.view.natives)

    def _finish_commit(self, report: CommitReport) -> None:
        job, self._job = self._job, None
        warmed: Sequence[Message] = ()
        if job is not None:
            warmed = job.warmed
            self._previous = job.stopped
            job.cancel()
            if self.backend is not None and job.touched:
                self.backend.committed(self.session)
            if report.warmed_tokens < self._conversation.count(warmed):
                self.ledger.add(mispredictions=1)
        self._apply(Committed(len(self._conversation.view)))
        self._due_at = None
        self.last_commit = report
        self._observer.spliced(report, type(self.strategy).__name__, warmed)

    # ---- facts ---------------------------------------------------------------------------------

    def _follow(self, messages: Sequence[M], prompt: Prompt | None) -> None:
        if self._closed:
            raise ClosedError(f"the runtime of session {self.session!r} is closed: make a new one for it")
        if self._pid != os.getpid():
            self._forget_parent()
        self._conversation.follow(messages, prompt)
        prompt = self._conversation.prompt
        if prompt is not self._checked:
            self.strategy.check(prompt)
            self._checked = prompt

    def _forget_parent(self) -> None:
        """After a fork the lane's thread, and so the job, exist in the parent only."""
        self._pid = os.getpid()
        self._job = self._previous = None
        self._state = State(next_id=self._state.next_id)

    def _ask(self, question: str) -> bool:
        """One of the strategy's questions; a fault in it must not stop the agent."""
        strategy = self.strategy
        la = strategy.la
        strategy.la = self._job.la if self._job is not None and self._job.la is not None else LookaheadState()
        try:
            return bool(getattr(strategy, question)())
        except Exception as error:
            name = f"{type(strategy).__name__}.{question}"
            self._observer.say_once(question, f"{name} failed and counts as no: {error!r}")
            return False
        finally:
            strategy.la = la

    def _at_job(self) -> str:
        job = self._state.job
        return (self._conversation.view.digest(job.end) or "") if job is not None and job.end else ""

    def _learned(self) -> Natives[M]:
        natives: Natives[M] = Natives(self.codec)
        natives.learn(self._conversation.view.messages, self._conversation.view.natives)
        return natives

    async def _ask_server(self, backend: Backend) -> None:
        """Find out what the server can do, so that the first request is routed right."""
        try:
            self.server_known(await backend.caps())
        except BackendError as error:
            log.debug("session %s: the server could not be asked yet: %s", self.session, error)

    # ---- commands ------------------------------------------------------------------------------

    def _apply(self, event: Event) -> tuple[Command, ...]:
        self._state, commands = step(self._state, event)
        self._log.append(event)
        if len(self._log) > _LOG_EVENTS:
            del self._log[: _LOG_EVENTS // 2]
        return commands

    def _carry_out(self, command: Command) -> None:
        match command.do:
            case Do.START:
                self._start(command.job)
            case Do.EXTEND if self._job is not None:
                self._job.extend(self._conversation.snapshot())
            case Do.PROMOTE if self.backend is not None:
                self._lane.spawn(_quietly(self.backend.promote(self.session)))
            case Do.CANCEL:
                self._drop_job(command.why)
            case _:
                pass

    def _start(self, job_id: int) -> None:
        self._job = LookaheadJob(
            job_id,
            self.strategy.snapshot(LookaheadState()),
            self._conversation.snapshot(),
            self.session,
            self._conversation.prompt,
            self._lane,
            self.backend,
            self.codec,
            self,
            after=self._previous,
            prefills=self._observer.fidelity.warming_pays,
            planned=self._planned(),
        )
        self._job_started = self._lane.time()
        self._job.start()

    def _planned(self) -> int:
        """The cut that a job started now will make, where the strategy has one that stays; else 0."""
        strategy = self.strategy
        if strategy.exact or not isinstance(strategy, CutStrategy):
            return 0
        prediction = strategy.predict(strategy.main.messages)
        return prediction.cut if prediction is not None else 0

    def _drop_job(self, why: str) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        log.debug("session %s: lookahead %d dropped: %s", self.session, job.id, why)
        self._previous = job.stopped
        self._observer.wasted(job.prefilled)
        job.cancel()

    # ---- what a job tells, on the lane ---------------------------------------------------------

    def server_known(self, caps: Caps) -> None:
        """What the server can do: its window bounds the ceiling, what it lacks is said once."""
        with self._lock:
            hard = self.strategy.hard
            if caps.window is not None and not self._fixed_ceiling:
                reserve = caps.window // 16
                known = hard is not None
                self._ceiling = Limits(hard).default_ceiling(caps.window, reserve) if known else caps.window - reserve
            self._observer.server_known(caps)

    def job_transformed(self, job_id: int, end: int, digest: str) -> None:
        """The job's transformation covers ``end`` messages."""
        with self._lock:
            self._apply(Transformed(job_id, end, digest))

    def job_warmed(self, job_id: int) -> None:
        """The job has nothing left to prefill."""
        with self._lock:
            job = self._job
            if job is not None and job.id == job_id and not job.measured:
                job.measured = True
                self._conversation.growth.lookahead(self._lane.time() - self._job_started)
            self._apply(Warmed(job_id))

    def job_failed(self, job_id: int, error: Exception, length: int) -> None:
        """The job's transformation failed; the agent goes on, at worst as slow as without us."""
        with self._lock:
            if self._job is not None and self._job.id == job_id:
                self._drop_job("failed")
            self._apply(Failed(job_id, length))
            self.ledger.add(failures=1)
            if isinstance(error, SmoothAgentError):
                self._observer.say_once("lookahead", f"a lookahead failed, the history is kept: {error}")
            else:
                log.warning("session %s: a lookahead failed, the history is kept", self.session, exc_info=error)

    def job_prefilled(self, usage: Usage) -> None:
        """Tokens were prefilled ahead."""
        cached = max(0, usage.cached_tokens or 0)
        self.ledger.add(prefilled_tokens=max(0, usage.prompt_tokens - cached), reused_tokens=cached)

    def prefill_failed(self, error: Exception) -> None:
        """Warming failed; the transformation alone runs ahead."""
        with self._lock:
            self.ledger.add(failures=1)
            self._observer.say_once("prefill", f"warming failed, the transformation alone runs ahead: {error}")

    # ---- what a main request tells -------------------------------------------------------------

    @property
    def request_ready(self) -> concurrent.futures.Future[None] | None:
        """Done once the server's kind is known and calls can be routed; None where there is nothing to wait for."""
        probe = self._probe
        return None if probe is None or probe.done() else probe

    def request_started(self) -> dict[str, Any]:
        """Mark and route the agent's own call; lookahead gives way."""
        self._observer.request_started()
        if self.backend is None:
            return {}
        self.backend.main_arrived(self.session)
        return self.backend.route(self.session, Stream.MAIN)

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        self._observer.first_token()
        if self.backend is not None:
            self.backend.main_first_token(self.session)

    def request_usage(self, usage: Usage) -> None:
        """Calibrate the counter, settle the last commit."""
        with self._lock:
            self._conversation.calibrate(usage.prompt_tokens)
            self._observer.usage(usage, self._conversation.view.messages)

    def request_done(self) -> None:
        """Tool time begins."""
        if self.backend is not None:
            self.backend.main_done(self.session)


def _check(strategy: LookaheadStrategy, backend: Backend | None, ceiling: int | None) -> None:
    if strategy.needs_model and backend is None:
        name = type(strategy).__name__
        raise ConfigurationError(f"{name} needs a model: pass backend=OpenAIBackend(...) to LookaheadRuntime")
    hard = strategy.hard
    if ceiling is not None and hard is not None and ceiling < hard:
        raise ConfigurationError(f"ceiling is {ceiling} tokens and hard is {hard}: the ceiling must be at least hard")


async def _finished(work: Awaitable[None], twin: LookaheadStrategy) -> LookaheadStrategy:
    await work
    return twin


def _discard(work: Awaitable[None]) -> None:
    """Close what was cancelled before it began, or it would be reported as never awaited."""
    if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except BackendError as error:
        log.debug("promotion failed: %s", error)
