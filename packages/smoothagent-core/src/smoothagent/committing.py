"""What ``on_commit`` does: decide, transform where nothing is prepared, splice."""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from smoothagent.errors import SmoothAgentError
from smoothagent.job import LookaheadJob
from smoothagent.lookahead import Lookahead
from smoothagent.machine import Command, CommitPoint, Committed, Do, Event, SynchronousFailed
from smoothagent.message import Message, shared
from smoothagent.model import LaneModel
from smoothagent.natives import Natives
from smoothagent.record import CommitReport
from smoothagent.state import LookaheadState
from smoothagent.strategy import Commit, LookaheadStrategy
from smoothagent.waiting import Ended, Procedure, Wait

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_COLD = 16
"""Tokens that may be cold at a commit in any case, or a twelfth of the new view, if that is more: prefilling that
little costs less than another turn on the old one."""
_MUCH_LESS = 0.6
"""What may be cold a turn later, over what is cold now, for the turn to be worth waiting."""


class _Inline(NamedTuple):
    """A transformation to be made on the critical path."""

    twin: LookaheadStrategy


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
        self._started = 0.0
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
        started, waited = clock(), 0.0
        with lookahead.lock:
            self._started = started
            follow()
            conversation.growth.turn(started, conversation.tokens, conversation.view.assistants)
            outcome = self._decide(lookahead.apply(self._point(messages)))
            seen = conversation.view.last_digest
        while not isinstance(outcome, list):
            if isinstance(outcome, Wait):
                before = clock()
                ended = yield outcome
                waited += clock() - before
            else:
                # A user's code: without the lock, which the lane's loop takes, too.
                ended = self._begun(outcome)
            if isinstance(ended, Wait):
                outcome = ended
                continue
            with lookahead.lock:
                self._started = started  # another hook may have been called meanwhile
                outcome = self._go_on(outcome, ended, seen, messages, follow)
                seen = conversation.view.last_digest
        lookahead.observer.committed(self.last, clock() - started, waited)
        return outcome

    def _go_on(
        self, was: Wait | _Inline, ended: Ended, seen: str, messages: Sequence[M], follow: Callable[[], None]
    ) -> list[M] | Wait | _Inline:
        """The outcome after a wait, or after a transformation on the critical path."""
        if self.closed:
            return self._as_it_is()
        # Other hooks may have been called meanwhile, from a tool's thread with a shorter history: this call's counts.
        follow()
        if isinstance(was, Wait) and was.future is not self._critical:
            return self._decide(self._lookahead.apply(self._point(messages, waited=True)))
        self._critical = None
        if self._conversation.view.last_digest != seen:
            return self._as_it_is()  # committed meanwhile, by a call that should not have been made beside this one
        return self._waited_for(ended)

    # ---- deciding ------------------------------------------------------------------------------

    def _decide(self, commands: Sequence[Command]) -> list[M] | Wait | _Inline:
        """Carry out a commit point's commands; the last one is the decision."""
        for command in commands[:-1]:
            self._lookahead.carry_out(command)
        decision, job = commands[-1], self._lookahead.job
        try:
            match decision.do:
                case Do.COMMIT:
                    return self._commit(decision.why)
                case Do.SYNCHRONOUS:
                    return self._synchronous()
                case Do.WAIT if job is not None:
                    return Wait(job.transformed, self.wait)
                case _:
                    return self._as_it_is()
        except Exception as error:  # of a strategy's own methods
            return self._failed(error)

    def _point(self, messages: Sequence[M], *, waited: bool = False) -> CommitPoint:
        lookahead, conversation, strategy = self._lookahead, self._conversation, self._strategy
        due = lookahead.ask("should_commit")
        if due:
            lookahead.ceiling.due(conversation.tokens)
        job = lookahead.job
        at_ceiling = lookahead.ceiling.reached(conversation.tokens)
        decides = job is None or job.la is not None or waited or at_ceiling or strategy.exact
        if due and decides:
            # What cannot be committed yet need not be verified yet: that costs a pass over all messages.
            conversation.reverify(messages)
            due, at_ceiling = lookahead.ask("should_commit"), lookahead.ceiling.reached(conversation.tokens)
        exact = strategy.exact or (due and lookahead.ask("computed_anew"))
        if exact and not strategy.exact:
            # Nothing is waited for that the earlier stages, whose trigger it is, do not need.
            at_ceiling = strategy.hard is not None and conversation.tokens >= strategy.hard + strategy.hard // 4
        tail, warm, pays = ("ok", False, False) if job is None or not due else self._freshness(job, exact)
        return CommitPoint(
            length=len(conversation.view),
            at_job=lookahead.at_job(),
            prompt=conversation.prompt_digest,
            due=due,
            tail=tail,
            defer=strategy.defer,
            at_ceiling=at_ceiling,
            waited=waited,
            exact=exact,
            warm=warm,
            pays=pays,
            follows=lookahead.follows_answers,
        )

    def _freshness(self, job: LookaheadJob[M], exact: bool) -> tuple[str, bool, bool]:
        """Whether what is prepared leaves the right tail, what is cold of it matters little, and waiting pays."""
        try:
            return self._judge(job, exact)
        except Exception:
            return "ok", True, False  # the commit itself will say what is wrong

    def _judge(self, job: LookaheadJob[M], exact: bool) -> tuple[str, bool, bool]:
        conversation, view = self._conversation, self._conversation.view
        if job.la is None and not exact:
            # A result that could not be committed when it comes is not worth waiting for.
            tail = sum(view.sizes[job.planned :])
            fits = self._strategy.tail_fits(tail, conversation.fixed + tail, job.planned) if job.planned else "ok"
            return fits, False, True
        twin = self._strategy.snapshot(job.la or LookaheadState())
        done = twin.commit(conversation.settled_view)
        if done is None:
            return "long", True, False  # not what is due now: made anew, as a stale one
        after = conversation.count(done.head) + sum(view.sizes[done.covered :])
        view_tokens = conversation.fixed + after
        prepared = job.la.transformed if job.la is not None else ()
        fits = twin.tail_fits(after - conversation.count(prepared), view_tokens, twin.la.last_segment_end)
        if not job.prefills or self._lookahead.backend is None:
            return fits, True, False
        warmth = conversation.warmth(job.warmed, done, conversation.settled())
        warm = warmth.known - warmth.warmed <= max(_COLD, view_tokens // 12)
        if exact and not self._strategy.exact and job.la is None:
            return fits, warm, True  # a summary is being written, which a commit now would make useless
        return fits, warm, not warm and (not exact or self._waiting_pays(job, done))

    def _waiting_pays(self, job: LookaheadJob[M], done: Commit) -> bool:
        """Whether the next turn's commit could leave much less cold than this one, the coming turn included.

        So it is where what is warm was meant for the next turn, and where most of what is cold now will still be in
        the next turn's view, to be warmed by then. A cut that moves on with every turn overtakes its warmth
        instead: then this is the best moment there will be.
        """
        messages, warmed = self._conversation.settled_view, job.warmed
        now = [*done.head, *messages[done.covered :]]
        # Where a transformation costs a model call, the one at hand tells what is planned.
        twin = self._strategy.snapshot(LookaheadState() if self._strategy.exact else job.la)
        work = twin.transform() if self._strategy.exact else None
        if work is not None:
            _discard(work)
            return False
        later = twin.warmable(messages)
        warm_by_then = max(shared(warmed, later), shared(now, later))
        conversation = self._conversation
        # The results that have just come are cold either way.
        fresh = len(messages) - min(len(messages), conversation.settled())
        cold_now = conversation.count(now[shared(warmed, now) : len(now) - fresh])
        cold_by_then = conversation.count(later[warm_by_then : len(later) - fresh]) + conversation.growth.per_turn
        return cold_by_then <= _MUCH_LESS * cold_now

    # ---- doing ---------------------------------------------------------------------------------

    def _commit(self, why: str) -> list[M] | _Inline:
        job = self._lookahead.job
        if job is None:  # it ended between the decision and now
            return self._as_it_is()
        twin = self._strategy.snapshot(job.la)
        twin.main.strategy_data["now"] = True
        if twin.extend_inline and not twin.exact:
            if self._lookahead.backend is not None:
                twin.bind(LaneModel(self._lookahead, job.natives, lookahead=False))
            return _Inline(twin)
        return self._splice(twin, "late" if why else "lookahead")

    def _synchronous(self) -> list[M] | _Inline:
        twin = self._strategy.snapshot(LookaheadState())
        twin.main.strategy_data["now"] = True
        if twin.exact:
            return self._splice(twin, "sync")
        twin.bind(LaneModel(self._lookahead, self._learned(), lookahead=False))
        return _Inline(twin)

    def _begun(self, inline: _Inline) -> Ended | Wait:
        """Run ``transform`` on the critical path: here, or on the lane where it has to wait for a model."""
        try:
            work = inline.twin.transform()
        except Exception as error:
            return Ended(error=error)
        if work is None:
            return Ended(inline.twin)
        lane = self._lookahead.lane
        critical = self._critical = lane.spawn(_finished(work, inline.twin))
        critical.add_done_callback(lambda _: lane.call(_discard, work))
        if self.closed:
            critical.cancel()
        return Wait(critical, None)

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
        # Strategies and codecs are users' code: whatever they raise, nothing is changed before the splice.
        try:
            done = twin.commit(conversation.settled_view)
            if done is None or not 0 < done.covered <= len(view):
                return self._unchanged(SynchronousFailed(len(view)), "unfit")
            before, messages = conversation.tokens, len(view)
            warmth = conversation.warmth(job.warmed if job is not None else (), done, conversation.known)
            after = before - sum(view.sizes[: done.covered]) + conversation.count(done.head)
            if len(done.head) == done.covered and shared(done.head, conversation.settled_view) == done.covered:
                # Nothing would change: the cut could not get past a call that still waits for its result.
                return self._unchanged(Committed(len(view), worthwhile=False), "changes nothing")
            refusal = twin.refuse(before, after)
            if refusal is not None:
                self._lookahead.observer.say_once("saving", f"a transformation is not made: {refusal}")
                return self._unchanged(Committed(len(view), worthwhile=False), "saves too little")
            new = [*done.head, *conversation.settled_view[done.covered :]]
            same = conversation.count(new[: shared(conversation.settled_view, new)])
            result = conversation.splice(done, job.natives if job is not None else self._learned())
        except Exception as error:
            return self._failed(error)
        shared_tokens = conversation.fixed + same
        self._finish(
            CommitReport(kind, before, after, messages, len(result), done.covered, *warmth, shared_tokens),
            warmer=warmth.warmed > same,
        )
        return list(result)

    def _finish(self, report: CommitReport, *, warmer: bool) -> None:
        lookahead = self._lookahead
        job = lookahead.take(warmer=warmer)
        warmed: Sequence[Message] = job.warmed if job is not None else ()
        if report.warmed_tokens < self._conversation.count(warmed):
            lookahead.ledger.add(mispredictions=1)
        lookahead.apply(Committed(len(self._conversation.view)))
        lookahead.ceiling.committed()
        self.last = report
        hard, growth = self._strategy.waits_for, self._conversation.growth.per_turn
        if hard is not None and report.after_tokens + growth >= hard:
            lookahead.observer.say_once(
                "room",
                f"a transformation left {report.after_tokens} tokens and a turn adds about {growth:.0f}, so the "
                f"trigger at {hard} is reached again at once: raise it, or let less stay",
            )
        generated = job.model.generated if job is not None else 0
        lookahead.observer.spliced(
            report,
            type(self._strategy).__name__,
            warmed,
            generated,
            links=list(job.links) if job is not None else (),
            since=max(0.0, lookahead.lane.time() - self._started),
        )

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
