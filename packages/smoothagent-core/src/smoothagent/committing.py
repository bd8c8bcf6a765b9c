"""What ``on_commit`` does: decide, transform where nothing is prepared, splice."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from smoothagent.errors import SmoothAgentError
from smoothagent.job import LookaheadJob, Natives
from smoothagent.lookahead import Lookahead
from smoothagent.machine import Command, CommitPoint, Committed, Do, Event, SynchronousFailed
from smoothagent.message import Message
from smoothagent.model import LaneModel
from smoothagent.record import CommitReport
from smoothagent.state import LookaheadState
from smoothagent.strategy import LookaheadStrategy
from smoothagent.waiting import Ended, Procedure, Wait

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_COLD = 16
"""Tokens that may be cold at a commit in any case; and
a twelfth of the new view, if that is more: prefilling that little costs less than another turn on the old one."""


class Commits(Generic[M]):
    """The commits of one conversation.

    Args:
        lookahead: what is prepared.
        wait: seconds to wait at most for a lookahead at the ceiling.

    Attributes:
        last: how the last one turned out.
        closed: the conversation is over, so a transformation that ends now changes nothing.
    """

    def __init__(self, lookahead: Lookahead[M], wait: float) -> None:
        self._lookahead = lookahead
        self._conversation = lookahead.conversation
        self._strategy = lookahead.strategy
        self.wait = wait
        self.last: CommitReport | None = None
        self.closed = False
        self._critical: concurrent.futures.Future[LookaheadStrategy] | None = None

    def close(self) -> None:
        """Free a caller that waits for a transformation on the critical path."""
        self.closed = True
        if self._critical is not None:
            self._critical.cancel()

    def procedure(self, messages: Sequence[M], follow: Callable[[], None]) -> Procedure[list[M]]:
        """The whole of ``on_commit``; ``follow`` takes the messages in and raises where they cannot be a history."""
        lookahead, conversation = self._lookahead, self._conversation
        clock = lookahead.lane.time
        started = clock()
        waited = 0.0
        with lookahead.lock:
            follow()
            conversation.growth.turn(started, conversation.tokens, conversation.view.assistants)
            commands = lookahead.apply(self._point(messages))
        while True:
            with lookahead.lock:
                outcome = self._decide(commands)
            if not isinstance(outcome, Wait):
                lookahead.observer.committed(self.last, clock() - started, waited)
                return outcome
            before = clock()
            ended = yield outcome
            waited += clock() - before
            with lookahead.lock:
                if commands[-1].do is Do.WAIT:
                    commands = lookahead.apply(self._point(messages, waited=True))
                    continue
                result = self._waited_for(ended)
                lookahead.observer.committed(self.last, clock() - started, waited)
                return result

    # ---- deciding ------------------------------------------------------------------------------

    def _decide(self, commands: Sequence[Command]) -> list[M] | Wait:
        """Carry out a commit point's commands; the last one is the decision."""
        for command in commands[:-1]:
            self._lookahead.carry_out(command)
        decision, job = commands[-1], self._lookahead.job
        match decision.do:
            case Do.COMMIT:
                return self._commit(decision.why)
            case Do.SYNCHRONOUS:
                return self._synchronous()
            case Do.WAIT if job is not None:
                return Wait(job.transformed, self.wait)
            case _:
                return self._as_it_is()

    def _point(self, messages: Sequence[M], *, waited: bool = False) -> CommitPoint:
        lookahead, conversation, strategy = self._lookahead, self._conversation, self._strategy
        due = lookahead.ask("should_commit")
        if due:
            lookahead.ceiling.due(conversation.tokens)
        job = lookahead.job
        at_ceiling = lookahead.ceiling.reached(conversation.tokens)
        decides = job is None or job.la is not None or waited or at_ceiling or (strategy.exact and not strategy.defer)
        if due and decides:
            # What cannot be committed yet need not be verified yet: that costs a pass over all messages.
            conversation.reverify(messages)
            due, at_ceiling = lookahead.ask("should_commit"), lookahead.ceiling.reached(conversation.tokens)
        tail, warm = ("ok", False) if job is None or not due else self._freshness(job)
        return CommitPoint(
            length=len(conversation.view),
            at_job=lookahead.at_job(),
            prompt=conversation.prompt_digest,
            due=due,
            tail=tail,
            defer=strategy.defer,
            at_ceiling=at_ceiling,
            waited=waited,
            exact=strategy.exact,
            warm=warm,
        )

    def _freshness(self, job: LookaheadJob[M]) -> tuple[str, bool]:
        """Whether what is prepared leaves the right tail, and whether what is cold of it matters little."""
        conversation, view = self._conversation, self._conversation.view
        if job.la is None:
            # A result that could not be committed when it comes is not worth waiting for.
            tail = sum(view.sizes[job.planned :])
            return self._strategy.tail_fits(tail, conversation.fixed + tail) if job.planned else "ok", False
        twin = self._strategy.snapshot(job.la)
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
        return fits, warmth.known - warmth.warmed <= max(_COLD, view_tokens // 12)

    # ---- doing ---------------------------------------------------------------------------------

    def _commit(self, why: str) -> list[M] | Wait:
        job = self._lookahead.job
        assert job is not None, "only a job can be committed"
        twin = self._strategy.snapshot(job.la)
        if twin.extend_inline and not twin.exact:
            return self._transformed_inline(twin)
        return self._splice(twin, "late" if why else "lookahead")

    def _synchronous(self) -> list[M] | Wait:
        twin = self._strategy.snapshot(LookaheadState())
        if twin.exact:
            return self._splice(twin, "sync")
        twin.bind(LaneModel(self._lookahead, self._learned(), lookahead=False))
        return self._transformed_inline(twin)

    def _transformed_inline(self, twin: LookaheadStrategy) -> list[M] | Wait:
        """Run ``transform`` on the critical path: here, or on the lane where it has to wait for a model."""
        try:
            work = twin.transform()
        except Exception as error:
            return self._waited_for(Ended(error=error))
        if work is None:
            return self._waited_for(Ended(twin))
        lane = self._lookahead.lane
        self._critical = lane.spawn(_finished(work, twin))
        self._critical.add_done_callback(lambda _: lane.call(_discard, work))
        return Wait(self._critical, None)

    def _waited_for(self, ended: Ended) -> list[M]:
        """The end of a transformation on the critical path."""
        if ended.error is None and ended.in_time:
            return self._splice(ended.value, "lookahead" if self._lookahead.job is not None else "sync")
        return self._failed(ended.error)

    def _failed(self, error: Exception | None) -> list[M]:
        """A transformation on the critical path failed: the agent goes on with the history as it is."""
        if self.closed:
            return self._as_it_is()
        session, observer = self._lookahead.session, self._lookahead.observer
        if error is None or isinstance(error, SmoothAgentError):
            observer.say_once("transform", f"the transformation failed, the history is kept: {error}")
        else:
            log.warning("session %s: the transformation failed, the history is kept", session, exc_info=error)
        self._lookahead.ledger.add(failures=1)
        return self._unchanged(SynchronousFailed(len(self._conversation.view)), "failed")

    def _splice(self, twin: LookaheadStrategy, kind: str) -> list[M]:
        """Replace the prefix of the view by what was prepared; a commit that saves too little is not made."""
        conversation, view, job = self._conversation, self._conversation.view, self._lookahead.job
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
            self._lookahead.observer.say_once("saving", f"a transformation is not made: {refusal}")
            return self._unchanged(Committed(len(view), worthwhile=False), "saves too little")
        natives = job.natives if job is not None else self._learned()
        result = conversation.splice(done, natives)
        self._finish(CommitReport(kind, before, after, messages, len(result), done.covered, *warmth))
        return list(result)

    def _finish(self, report: CommitReport) -> None:
        lookahead = self._lookahead
        job = lookahead.take()
        warmed: Sequence[Message] = job.warmed if job is not None else ()
        if report.warmed_tokens < self._conversation.count(warmed):
            lookahead.ledger.add(mispredictions=1)
        lookahead.apply(Committed(len(self._conversation.view)))
        lookahead.ceiling.committed()
        self.last = report
        lookahead.observer.spliced(report, type(self._strategy).__name__, warmed)

    def _unchanged(self, event: Event, why: str) -> list[M]:
        self._lookahead.drop(why)
        self._lookahead.apply(event)
        return self._as_it_is()

    def _as_it_is(self) -> list[M]:
        return list(self._conversation.view.natives)

    def _learned(self) -> Natives[M]:
        natives: Natives[M] = Natives(self._lookahead.codec)
        natives.learn(self._conversation.view.messages, self._conversation.view.natives)
        return natives


async def _finished(work: Awaitable[None], twin: LookaheadStrategy) -> LookaheadStrategy:
    await work
    return twin


def _discard(work: Awaitable[None]) -> None:
    """Close what was cancelled before it began, or it would be reported as never awaited."""
    if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()
