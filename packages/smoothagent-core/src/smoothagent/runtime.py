"""The thin shell around the state machine: two hooks in an agent's loop (paper section 3.2, Listing 2)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from smoothagent.codec import Codec, OpenAICodec
from smoothagent.delegation import Delegation
from smoothagent.errors import BackendError, ClosedError, ConfigurationError, SmoothAgentError
from smoothagent.history import History
from smoothagent.job import LookaheadJob, Natives, Snapshot
from smoothagent.lane import Lane, process_lane
from smoothagent.ledger import Ledger
from smoothagent.limits import Growth, Limits
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
from smoothagent.record import CommitRecord, CommitReport, covered_after, head_after
from smoothagent.request import MainRequest
from smoothagent.serving.backend import Backend, Stream, Usage
from smoothagent.state import LookaheadState
from smoothagent.strategy import Commit, LookaheadStrategy
from smoothagent.tokens import EstimateCounter, TokenCounter

M = TypeVar("M")
C = TypeVar("C")
log = logging.getLogger("smoothagent")


@dataclass(frozen=True, slots=True)
class _Wait:
    future: concurrent.futures.Future[Any]
    timeout: float | None


class LookaheadRuntime(Generic[M]):
    """Lookahead for one conversation.

    Thread-safe: hooks may come from any thread or loop, one at a time per conversation.

    Args:
        strategy: the strategy, or a factory of it.
        backend: the model server; without one the transformation alone runs ahead, nothing is warmed.
        codec: how messages go in and out; default `OpenAICodec`.
        prompt: what else shapes the tokens; a hook's own ``prompt`` overrides it.
        session: name of the conversation; default a random one.
        ceiling: tokens that an uncommitted request may never reach while a lookahead is late.
        tokens: counts messages; default an estimate that the server's usage calibrates.
        lookahead: False transforms at the trigger only, on the critical path, as built-ins do.
        lane: where lookahead work runs; default the process's daemon thread.
        ledger: counts what lookahead cost and saved; default one of its own.
        wait: seconds to wait at most for a lookahead at the ceiling.

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
        if self.strategy.needs_model and backend is None:
            raise ConfigurationError(
                f"{type(self.strategy).__name__} needs a model: pass backend=OpenAIBackend(...) to LookaheadRuntime"
            )
        hard = self.strategy.hard
        if ceiling is not None and hard is not None and ceiling < hard:
            raise ConfigurationError(
                f"ceiling is {ceiling} tokens and hard is {hard}: the ceiling must be at least hard"
            )
        self.backend = backend
        self.codec: Codec[M] = codec or cast("Codec[M]", OpenAICodec())
        self.prompt = prompt or Prompt()
        self.session = session or uuid.uuid4().hex
        self.lookahead = lookahead
        self.wait = wait
        self.ledger = ledger or Ledger()
        self.last_commit: CommitReport | None = None
        self._tokens: TokenCounter = tokens or EstimateCounter()
        self._lane: Lane = lane or process_lane()
        self._ceiling = ceiling if ceiling is not None else (Limits(hard).default_ceiling() if hard else None)
        self._lock = threading.RLock()
        self._closed = False
        self._state = State()
        self._job: LookaheadJob[M] | None = None
        self._previous: concurrent.futures.Future[None] | None = None
        self._log: list[Event] = []
        self._input: History[M] = History(self.codec, self._tokens.count)
        self._spliced: History[M] = History(self.codec, self._tokens.count)
        self._view = self._input
        self._record: CommitRecord[M] | None = None
        self._raw = False
        self._known = 0
        self._growth = Growth()
        self._job_started = 0.0
        self._drift = 1.0
        self._wires: Natives[M] = Natives(self.codec)
        self._checked: Prompt | None = None
        self._prompt_seen: tuple[Prompt, str, int] | None = None
        self._observer = Observer(self.session, self.ledger, self._lane.time)
        self._model = LaneModel(self)
        self.strategy.bind(self._model)

    # ---- the two hooks -------------------------------------------------------------------------

    def on_commit(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> list[M]:
        """Call before each model call; returns what to send: a new list, never the one given.

        Untouched messages come back as the same objects. Blocks only where the law lets it.

        Raises HistoryError for a history no request could carry, ClosedError after ``close``.
        """
        steps = self._committing(messages, prompt)
        try:
            wait = next(steps)
            while True:
                wait = self._advance(steps, *self._block(wait))
        except StopIteration as stop:
            return stop.value

    async def aon_commit(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> list[M]:
        """`on_commit` for async agents. Cancelling it never cancels the lookahead."""
        steps = self._committing(messages, prompt)
        try:
            wait = next(steps)
            while True:
                wait = self._advance(steps, *await self._pause(wait))
        except StopIteration as stop:
            return stop.value

    def on_segment_boundary(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> None:
        """Call when a segment is complete: best when the assistant's calls are known, before tools run.

        Never blocks; any number of times; calls may be pending. Raises as `on_commit`.
        """
        with self._lock:
            self._follow(messages, prompt)
            view = self._view
            self._known = len(view)
            wants = self.lookahead and self._job is None and self.ledger.allows() and self._ask("should_lookahead")
            promote = self._job is not None and self._ask("should_promote")
            event = Boundary(
                len(view), view.digest(len(view)) or "", self._at_job(view), self._prompt_digest, wants, promote
            )
            self._observer.boundary(self.strategy, wanted=wants or self._job is not None, lookahead=self.lookahead)
            for command in self._apply(event):
                self._carry_out(command)

    def main_request(self, prompt: Prompt | None = None) -> MainRequest:
        """A context manager around the agent's own call: marks it, paces lookahead beside it, measures it."""
        del prompt
        return MainRequest(self)

    def wrap(self, client: C) -> C:
        """An openai client whose ``chat.completions.create`` does what `main_request` does."""
        from smoothagent.wrap import wrap

        return wrap(client, self.main_request)

    def delegate(
        self,
        *,
        prompt: Prompt,
        head: Sequence[M],
        instruction: Callable[[str], M],
    ) -> Delegation[M]:
        """Hand a task to a sub-agent: warm its prompt now, its instruction as it is written.

        Args:
            prompt: the sub-agent's model and tools.
            head: the messages its first request begins with.
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
    def record(self) -> CommitRecord[M] | None:
        """The last commit, for adapters that hand in raw history and persist it."""
        return self._record

    def restore(self, record: CommitRecord[M]) -> None:
        """Go on from a persisted record; where the next input matches neither of its chains it is dropped."""
        with self._lock:
            self._record = record

    @property
    def events(self) -> list[dict[str, Any]]:
        """The state machine's events so far (bounded), for `smoothagent.machine` to replay."""
        with self._lock:
            return [event.encode() for event in self._log]

    def close(self, timeout: float = 0) -> None:
        """Cancel lookahead work and free what the server holds; waits up to ``timeout`` seconds for it."""
        future = self._shut()
        if timeout > 0 and future is not None:
            concurrent.futures.wait([future], timeout)

    async def aclose(self) -> None:
        """`close`, waiting for the work to have stopped."""
        future = self._shut()
        if future is not None:
            await asyncio.wait({_wrapped(future)}, timeout=5.0)

    def _shut(self) -> concurrent.futures.Future[None] | None:
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            job, self._job = self._job, None
            self._observer.closing()
        if job is not None:
            self._observer.wasted(job.prefilled)
            job.cancel()
        if self.backend is not None:
            self._lane.call(self.backend.release, self.session)
        return job.future if job is not None else None

    # ---- committing ----------------------------------------------------------------------------

    def _committing(self, messages: Sequence[M], prompt: Prompt | None) -> Generator[_Wait, tuple[str, Any], list[M]]:
        """The whole of ``on_commit``, yielding what to wait for; sync and async drive it alike."""
        started = self._lane.time()
        waited = 0.0
        with self._lock:
            self._follow(messages, prompt)
            self._growth.turn(started, self.strategy.tokens, self._view.assistants)
            commands = self._apply(self._commit_point(messages))
        while True:
            wait, result = None, None
            with self._lock:
                for command in commands:
                    match command.do:
                        case Do.PROCEED:
                            result = list(self._view.natives)
                        case Do.COMMIT:
                            result, wait = self._commit(command.why)
                        case Do.SYNCHRONOUS:
                            result, wait = self._synchronous()
                        case Do.WAIT:
                            job = self._job
                            wait = _Wait(job.transformed, self.wait) if job is not None else None
                        case _:
                            self._carry_out(command)
            if wait is None:
                assert result is not None
                self._observer.committed(self.last_commit, self._lane.time() - started, waited)
                return result
            before = self._lane.time()
            kind, outcome = yield wait
            waited += self._lane.time() - before
            with self._lock:
                if commands[-1].do is Do.WAIT:
                    commands = self._apply(self._commit_point(messages, waited=True))
                else:
                    result = self._waited_for(kind, outcome)
                    self._observer.committed(self.last_commit, self._lane.time() - started, waited)
                    return result

    def _commit_point(self, messages: Sequence[M], *, waited: bool = False) -> CommitPoint:
        due = self._ask("should_commit")
        job = self._job
        if due and (job is None or job.la is not None):
            # Identity is trusted no longer: an object changed in place must not be spliced over.
            self._reverify(messages)
            due = self._ask("should_commit")
        view = self._view
        tail, warm = ("ok", False) if job is None or job.la is None or not due else self._freshness(job, view)
        return CommitPoint(
            length=len(view),
            at_job=self._at_job(view),
            prompt=self._prompt_digest,
            due=due,
            tail=tail,
            defer=self.strategy.defer,
            at_ceiling=self._ceiling is not None and self.strategy.tokens >= self._ceiling,
            waited=waited,
            exact=self.strategy.exact,
            warm=warm,
        )

    def _freshness(self, job: LookaheadJob[M], view: History[M]) -> tuple[str, bool]:
        """Whether what is prepared leaves the right tail, and whether what is cold of it matters."""
        assert job.la is not None
        end = job.la.last_segment_end
        tail_tokens = sum(view.sizes[end:])
        fixed = self.strategy.tokens - view.total
        view_tokens = fixed + tail_tokens + sum(map(self._tokens.count, job.la.transformed))
        twin = self._prepared(job)
        fits = twin.tail_fits(tail_tokens, view_tokens)
        done = twin.commit(view.messages)
        if done is None:
            return "long", True  # not what is due now: made anew, as a stale one
        if not job.prefills:
            return fits, True
        # The results that end the history are cold in any case: they are what the agent's next call is about.
        settled = len(view)
        while settled and view.messages[settled - 1].role != "assistant":
            settled -= 1
        known, warmed = self._warmth(job, done, view, settled)
        return fits, known - warmed <= max(16, view_tokens // 12)

    def _warmth(self, job: LookaheadJob[M], done: Commit, view: History[M], until: int) -> tuple[int, int]:
        """Tokens of the new view up to message ``until`` of the old one, and how many of them are prefilled."""
        new = [*done.head, *view.messages[done.covered : max(done.covered, until)]]
        known = warmed = 0
        matching = True
        for i, message in enumerate(new):
            size = self._tokens.count(message)
            known += size
            matching = matching and i < len(job.warmed) and (job.warmed[i] is message or job.warmed[i] == message)
            warmed += size if matching else 0
        return known, warmed

    def _prepared(self, job: LookaheadJob[M]) -> LookaheadStrategy:
        return self.strategy.snapshot(job.la)

    def _commit(self, why: str) -> tuple[list[M] | None, _Wait | None]:
        job = self._job
        assert job is not None
        twin = self._prepared(job)
        if twin.extend_inline and not twin.exact and job.la is not None:
            work = twin.transform()
            if work is not None:
                return None, _Wait(self._lane.spawn(_finished(work, twin)), None)
        return self._splice(twin, "late" if why else "lookahead"), None

    def _synchronous(self) -> tuple[list[M] | None, _Wait | None]:
        twin = self.strategy.snapshot(LookaheadState())
        if twin.exact:
            return self._splice(twin, "sync"), None
        if self.backend is None or not twin.needs_model:
            work = twin.transform()
            if work is None:
                return self._splice(twin, "sync"), None
            return None, _Wait(self._lane.spawn(_finished(work, twin)), None)
        self._snapshot()
        twin.bind(LaneModel(self, lookahead=False))
        return None, _Wait(self._lane.spawn(_transformed(twin)), None)

    def _waited_for(self, kind: str, outcome: Any) -> list[M]:
        """The end of a transformation on the critical path."""
        if kind == "ok":
            return self._splice(outcome, "late" if self._job is not None else "sync")
        if isinstance(outcome, SmoothAgentError):
            self._observer.say_once("transform", f"the transformation failed, the history is kept: {outcome}")
        else:
            log.warning("the transformation failed, the history is kept", exc_info=outcome)
        self.ledger.add(failures=1)
        self._apply(SynchronousFailed(len(self._view)))
        return list(self._view.natives)

    def _splice(self, twin: LookaheadStrategy, kind: str) -> list[M]:
        """Replace the prefix of the view by what was prepared; a commit that saves too little is not made."""
        view, job = self._view, self._job
        done = twin.commit(view.messages)
        if done is None or done.covered == 0 or done.covered > len(view):
            self._drop_job("unfit")
            self._apply(SynchronousFailed(len(view)))
            return list(view.natives)
        natives: Natives[M] = job.natives if job is not None else Natives(self.codec)
        natives.learn(view.messages, view.natives)
        head = [natives.of(m) for m in done.head]
        before, known_before = self.strategy.tokens, len(view)
        known, warmed = self._warmth(job, done, view, self._known) if job is not None else (0, 0)
        after_natives = [*head, *view.natives[done.covered :]]
        after = before - sum(view.sizes[: done.covered]) + sum(map(self._tokens.count, done.head))
        refusal = twin.refuse(before, after)
        if refusal is not None:
            self._observer.say_once("saving", f"a transformation is not made: {refusal}")
            self._drop_job("saves too little")
            self._apply(Committed(len(view), worthwhile=False))
            return list(view.natives)
        self._replace(done, head, after_natives)
        self._finish_commit(
            kind, CommitReport(kind, before, after, known_before, len(after_natives), done.covered, known, warmed)
        )
        return list(after_natives)

    def _replace(self, done: Commit, head: list[M], after: list[M]) -> None:
        view, record = self._view, self._record
        covered = covered_after(record, self._raw, done.covered)
        digest = self._input.digest(covered)
        assert digest is not None
        new_head = head_after(view.natives, head, done.covered, record, self._raw)
        self._known = max(0, self._known - done.covered) + len(head)
        spliced: History[M] = History(self.codec, self._tokens.count)
        spliced.update(after)
        head_digest = spliced.digest(len(new_head))
        assert head_digest is not None
        self._record = CommitRecord(covered, digest, new_head, head_digest)
        self._spliced = self._view = spliced
        self._look()
        self._growth.moved(self.strategy.tokens, spliced.assistants)

    def _finish_commit(self, kind: str, report: CommitReport) -> None:
        job, self._job = self._job, None
        if job is not None:
            if job.future is not None:
                self._previous = job.future
            job.cancel()
            if kind != "sync":
                if self.backend is not None and job.prefilled:
                    self._lane.call(self.backend.committed, self.session)
            if report.warmed_tokens < report.known_tokens // 2 and job.prefilled:
                self.ledger.add(mispredictions=1)
        self._apply(Committed(len(self._view)))
        self.last_commit = report
        self._observer.spliced(report, job.warmed if job is not None else (), self._view.messages)

    # ---- following the history -----------------------------------------------------------------

    def _follow(self, messages: Sequence[M], prompt: Prompt | None) -> None:
        if self._closed:
            raise ClosedError(
                f"the runtime of session {self.session!r} is closed: make a new one for this conversation"
            )
        if prompt is not None and prompt is not self.prompt:
            self.prompt = prompt
        if self.prompt is not self._checked:
            self.strategy.check(self.prompt)
            self._checked = self.prompt
        self._input.update(messages)
        self._resolve()
        self._look()

    def _resolve(self) -> None:
        record = self._record
        natives = record.resolve(self._input) if record is not None else None
        if record is not None and natives is None:
            log.debug("session %s: the history matches neither side of the last commit; starting anew", self.session)
            self._record = None
        if natives is None or natives is self._input.natives:
            self._view, self._raw = self._input, False
            return
        self._spliced.update(natives)
        self._view, self._raw = self._spliced, True

    def _reverify(self, messages: Sequence[M]) -> None:
        self._input = self._input.verified(messages, self._tokens.count)
        self._spliced = History(self.codec, self._tokens.count)
        self._resolve()
        self._look()

    def _look(self) -> None:
        """Let the strategy see the view."""
        view = self._view
        main = self.strategy.main
        main.messages = view.messages
        main.strategy_data.update(
            tokens=self._fixed + view.total,
            sizes=view.sizes,
            turns=view.assistants,
            growth=self._growth,
            count=self._tokens.count,
        )

    def _ask(self, question: str) -> bool:
        """One of the strategy's questions; a fault in it must not stop the agent."""
        strategy = self.strategy
        la = strategy.la
        strategy.la = self._job.la if self._job is not None and self._job.la is not None else LookaheadState()
        try:
            return bool(getattr(strategy, question)())
        except Exception as error:
            self._observer.say_once(
                question, f"{type(strategy).__name__}.{question} failed and counts as no: {error!r}"
            )
            return False
        finally:
            strategy.la = la

    def _at_job(self, view: History[M]) -> str:
        job = self._state.job
        return (view.digest(job.end) or "") if job is not None and job.end else ""

    @property
    def _prompt_digest(self) -> str:
        return self._prompt_facts()[1]

    @property
    def _fixed(self) -> int:
        return self._prompt_facts()[2]

    def _prompt_facts(self) -> tuple[Prompt, str, int]:
        seen = self._prompt_seen
        if seen is None or seen[0] is not self.prompt:
            seen = self._prompt_seen = (self.prompt, self.prompt.digest(), self._tokens.fixed(self.prompt))
        return seen

    # ---- commands ------------------------------------------------------------------------------

    def _apply(self, event: Event) -> tuple[Command, ...]:
        self._state, commands = step(self._state, event)
        log.debug("%s -> %s %s", event, self._state, commands)
        self._log.append(event)
        if len(self._log) > 10_000:
            del self._log[:5_000]
        return commands

    def _carry_out(self, command: Command) -> None:
        match command.do:
            case Do.START:
                self._start(command.job)
            case Do.EXTEND if self._job is not None:
                self._job.extend(self._snapshot())
            case Do.PROMOTE if self.backend is not None:
                self._lane.spawn(_quietly(self.backend.promote(self.session)))
            case Do.CANCEL:
                self._drop_job(command.why)
            case _:
                pass

    def _start(self, job_id: int) -> None:
        job = LookaheadJob(
            job_id,
            self.strategy.snapshot(LookaheadState()),
            self._snapshot(),
            self.session,
            self.prompt,
            self._lane,
            self.backend,
            self.codec,
            self,
            after=self._previous,
        )
        self._job, self._job_started = job, self._lane.time()
        job.start()

    def _drop_job(self, why: str) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        log.debug("session %s: lookahead %d dropped: %s", self.session, job.id, why)
        self._previous = job.future
        self._observer.wasted(job.prefilled)
        job.cancel()

    def _snapshot(self) -> Snapshot[M]:
        view = self._view
        self._wires = Natives(self.codec)
        self._wires.learn(view.messages, view.natives)
        facts = dict(self.strategy.main.strategy_data, sizes=list(view.sizes))
        digests = [view.digest(i + 1) or "" for i in range(len(view))]
        return Snapshot(list(view.messages), list(view.natives), facts, digests, self.prompt.volatile_tail)

    def wire_of(self, message: Message) -> dict[str, Any]:
        """A message exactly as the main stream sends it."""
        with self._lock:
            return self.codec.wire(self._wires.of(message))

    # ---- what a job tells (on the lane) --------------------------------------------------------

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
                self._growth.lookahead(self._lane.time() - self._job_started)
            self._apply(Warmed(job_id))

    def job_failed(self, job_id: int, error: Exception, length: int) -> None:
        """The job's transformation failed; the agent goes on, at worst as slow as without us."""
        with self._lock:
            if self._job is not None and self._job.id == job_id:
                self._observer.wasted(self._job.prefilled)
                self._job = None
            self._apply(Failed(job_id, length))
            self.ledger.add(failures=1)
        if isinstance(error, SmoothAgentError):
            self._observer.say_once("lookahead", f"a lookahead failed, the history is kept: {error}")
        else:
            log.warning("a lookahead failed, the history is kept", exc_info=error)

    def job_prefilled(self, usage: Usage) -> None:
        """Tokens were prefilled ahead."""
        self.ledger.add(prefilled_tokens=usage.prompt_tokens - (usage.cached_tokens or 0))

    def prefill_failed(self, error: Exception) -> None:
        """Warming failed; the transformation alone runs ahead."""
        self.ledger.add(failures=1)
        self._observer.say_once("prefill", f"warming failed, the transformation alone runs ahead: {error}")

    # ---- what a main request tells -------------------------------------------------------------

    def request_started(self) -> dict[str, Any]:
        """Mark and route the agent's own call; lookahead gives way."""
        self._observer.request_started()
        if self.backend is None:
            return {}
        self._lane.call(self.backend.main_arrived, self.session)
        return self.backend.route(self.session, Stream.MAIN)

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        self._observer.first_token()
        if self.backend is not None:
            self._lane.call(self.backend.main_first_token, self.session)

    def request_usage(self, usage: Usage) -> None:
        """Calibrate the counter, settle the last commit."""
        with self._lock:
            counted = self._fixed + self._view.total
            if isinstance(self._tokens, EstimateCounter):
                self._calibrate(self._tokens, counted, usage.prompt_tokens)
            self._observer.usage(usage, self._view.messages)

    def _calibrate(self, counter: EstimateCounter, counted: int, actual: int) -> None:
        before = counter.factor
        counter.observe(counted, actual)
        self._drift *= counter.factor / before
        # Counting all again costs; within 2% it would change no decision.
        if abs(self._drift - 1) > 0.02:
            self._drift = 1.0
            self._input.recount()
            self._spliced.recount()
            self._prompt_seen = None
            self._look()

    def request_done(self) -> None:
        """Tool time begins."""
        if self.backend is not None:
            self._lane.call(self.backend.main_done, self.session)

    # ---- waiting -------------------------------------------------------------------------------

    @staticmethod
    def _advance(steps: Generator[_Wait, tuple[str, Any], list[M]], kind: str, outcome: Any) -> _Wait:
        return steps.send((kind, outcome))

    def _block(self, wait: _Wait) -> tuple[str, Any]:
        try:
            return "ok", self._lane.wait(wait.future, wait.timeout)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            return "timeout", error
        except Exception as error:
            return "failed", error

    async def _pause(self, wait: _Wait) -> tuple[str, Any]:
        future = _wrapped(wait.future)
        # asyncio.wait neither cancels the future when we are cancelled nor when time is up.
        done, _ = await asyncio.wait({future}, timeout=wait.timeout)
        if not done or future.cancelled():
            return "timeout", TimeoutError("the lookahead was not ready in time")
        error = future.exception()
        if error is None:
            return "ok", future.result()
        if isinstance(error, Exception):
            return "failed", error
        raise error


def _wrapped(future: concurrent.futures.Future[Any]) -> asyncio.Future[Any]:
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda f: f.cancelled() or f.exception())
    return wrapped


async def _finished(work: Any, twin: LookaheadStrategy) -> LookaheadStrategy:
    await work
    return twin


async def _transformed(twin: LookaheadStrategy) -> LookaheadStrategy:
    work = twin.transform()
    if work is not None:
        await work
    return twin


async def _quietly(work: Any) -> None:
    try:
        await work
    except BackendError as error:
        log.debug("promotion failed: %s", error)
