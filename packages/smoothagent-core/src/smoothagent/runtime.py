"""The thin shell around the state machine: two hooks in an agent's loop (paper section 3.2, Listing 2)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from smoothagent.calls import OwnCalls
from smoothagent.ceiling import Ceiling
from smoothagent.codec import Codec, OpenAICodec
from smoothagent.committing import Commits
from smoothagent.conversation import Conversation
from smoothagent.counting import ServerCount
from smoothagent.delegation import Delegation
from smoothagent.errors import ClosedError, ConfigurationError
from smoothagent.lane import Lane, process_lane
from smoothagent.learnt import LearntPrompt
from smoothagent.ledger import Ledger
from smoothagent.lookahead import Lookahead
from smoothagent.machine import Boundary
from smoothagent.prompt import Prompt
from smoothagent.record import CommitRecord, CommitReport
from smoothagent.request import Aside, MainRequest
from smoothagent.serving.backend import Backend, LoopBound
from smoothagent.strategy import LookaheadStrategy
from smoothagent.telemetry import Telemetry
from smoothagent.tokens import EstimateCounter, TokenCounter
from smoothagent.waiting import Procedure, adrive, drive, wrapped
from smoothagent.wrap import wrap

M = TypeVar("M")
C = TypeVar("C")

_STRANGE = 3
"""Calls in a row with other messages than the conversation's that are more than a title or a classification."""


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
        tokens: counts messages; default an estimate that the server's usage, or its own count, calibrates.
        lookahead: False transforms at the trigger only, on the critical path, as built-ins do.
        lane: where lookahead work runs; default the process's daemon thread.
        ledger: counts what lookahead cost and saved; default one of its own.
        wait: seconds to wait at most for a lookahead at the ceiling.

    Attributes:
        in_use: hooks that wait and calls that have not ended, for whoever frees what is idle.

    Raises:
        ConfigurationError: the strategy needs a model and there is no backend, the ceiling is below hard, or the
            strategy belongs to another runtime.
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
        self.strategy.belong_to(self)
        self.backend = backend
        self.codec: Codec[M] = codec or cast("Codec[M]", OpenAICodec())
        self.session = session or uuid.uuid4().hex
        self.lookahead = lookahead
        self.ledger = ledger or Ledger()
        self._lane: Lane = lane or process_lane()
        self._conversation = Conversation(self.codec, tokens or EstimateCounter(), self.strategy, prompt or Prompt())
        self._lookahead = Lookahead(
            self.session,
            self.strategy,
            self._conversation,
            self.codec,
            backend,
            self._lane,
            self.ledger,
            Ceiling(ceiling, self.strategy.waits_for),
        )
        self._commits = Commits(self._lookahead, wait)
        self._count = ServerCount(self._lookahead)
        self._observer = self._lookahead.observer
        self._observer.ahead = lookahead
        self._closed = False
        self._checked: Prompt | None = None
        self._delegations: weakref.WeakSet[Delegation[M]] = weakref.WeakSet()
        self._learnt = LearntPrompt(self._observer.say_once)
        self._asides = 0
        self._calls = OwnCalls(self._lookahead)
        self.in_use = self._calls.in_use
        # One that is dropped without `close` must not keep the server's slots, nor leave a task that nobody awaits.
        self._dropped = weakref.finalize(self, _let_go, self._lane, self._lookahead, weakref.ref(self._calls))
        self._dropped.atexit = False

    # ---- the two hooks -------------------------------------------------------------------------

    def on_commit(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> list[M]:
        """Call before each model call; returns what to send: a new list, never the one given.

        Untouched messages come back as the same objects. Blocks only where the law lets it.

        Raises HistoryError for a history no request could carry, ConfigurationError for a prompt the
        strategy cannot work with, ClosedError after ``close``.
        """
        if isinstance(self.backend, LoopBound) and self.backend.needs_this_loop():
            raise ConfigurationError(
                "on_commit was called on the event loop that the client passed as client=… lives on: it would block "
                "the requests it waits for. Call `await aon_commit(…)` there."
            )
        return drive(self._committing(messages, prompt), self._lane)

    async def aon_commit(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> list[M]:
        """`on_commit` for async agents. Cancelling it never cancels the lookahead."""
        return await adrive(self._committing(messages, prompt))

    def on_segment_boundary(self, messages: Sequence[M], *, prompt: Prompt | None = None) -> None:
        """Call when a segment is complete: best when the assistant's calls are known, before tools run.

        Never blocks; any number of times; calls may be pending. Raises as `on_commit`.
        """
        lookahead = self._lookahead
        with self._lookahead.lock:
            self._follow(messages, prompt)
            conversation, view = self._conversation, self._conversation.view
            conversation.known = len(view)
            self._count.boundary()
            busy = lookahead.job is not None
            wants = self.lookahead and not busy and self.ledger.allows() and lookahead.ask("should_lookahead")
            promote = busy and lookahead.ask("should_promote")
            digest = view.digest(len(view)) or ""
            event = Boundary(len(view), digest, lookahead.at_job(), conversation.prompt_digest, wants, promote)
            self._observer.boundary(self.strategy, wanted=wants or busy, lookahead=self.lookahead)
            for command in lookahead.apply(event):
                lookahead.carry_out(command)

    def view(self, messages: Sequence[M]) -> list[M]:
        """What becomes of ``messages`` without a commit: what earlier ones left of them, in a new list.

        For requests with a prompt of their own (a reflection without tools), which find nothing warm after a commit.
        Raises HistoryError for a history no request could carry, ClosedError after ``close``.
        """
        with self._lookahead.lock:
            if self._closed:
                raise ClosedError(f"the runtime of session {self.session!r} is closed: make a new one for it")
            self._conversation.follow(messages, None)
            return list(self._conversation.view.natives)

    def main_request(self, prompt: Prompt | None = None) -> MainRequest:
        """A context manager around the agent's own call: marks it, paces lookahead beside it, measures it."""
        if prompt is not None:
            with self._lookahead.lock:
                self._conversation.prompt = self._learnt.complete(prompt, self._conversation.prompt) or prompt
        return MainRequest(self._calls, self)

    def wrap(self, client: C) -> C:
        """An openai client whose ``chat.completions.create`` does what `main_request` does.

        A call whose messages do not begin with what the last hook returned is none of the conversation's: it is
        sent as it is. Tools are taken from the calls where the prompt names none.
        """
        return wrap(client, self._request_for)

    def delegate(self, *, prompt: Prompt, head: Sequence[M], instruction: Callable[[str], M]) -> Delegation[M]:
        """Hand a task to a sub-agent: warm its prompt now, its instruction as it is written.

        Args:
            prompt: the sub-agent's model and tools.
            head: the messages its first request begins with; `Delegation.extend` adds to them.
            instruction: makes the instruction message of a text.
        """
        self._calls.ask_server()
        closed = f"the runtime of session {self.session!r} is closed: make a new one for it"
        if self._closed:
            raise ClosedError(closed)
        delegation: Delegation[M] = Delegation(
            backend=self.backend,
            codec=self.codec,
            lane=self._lane,
            ledger=self.ledger,
            prompt=prompt,
            head=head,
            instruction=instruction,
            lookahead=self.lookahead,
        )
        with self._lookahead.lock:
            self._delegations.add(delegation)
            gone = self._closed
        if gone:  # meanwhile
            delegation.cancel()
            raise ClosedError(closed)
        return delegation

    def sub_agent(self, delegation: Delegation[M], strategy: LookaheadStrategy, **more: Any) -> LookaheadRuntime[M]:
        """A runtime for a delegated task that goes on for many turns, on the stream that was warmed for it.

        Its first request is the one that ``delegation.on_commit`` gave; from there on use its hooks and its
        ``main_request`` (or ``wrap``), and close it instead of the delegation.

        Args:
            delegation: of this runtime's, committed.
            strategy: for the sub-agent's own context.
            more: as the constructor takes.

        Raises:
            ConfigurationError: the delegation was not committed, or is over.
        """
        delegation.check_goes_on()  # before there is a runtime of its session, which would free that when it is dropped
        inherited: dict[str, Any] = {
            "backend": self.backend,
            "codec": self.codec,
            "lane": self._lane,
            "ledger": self.ledger,
            "lookahead": self.lookahead,
        }
        child: LookaheadRuntime[M] = LookaheadRuntime(
            strategy, prompt=delegation.prompt, session=delegation.session, **{**inherited, **more}
        )
        child.go_on_from(delegation)
        return child

    def go_on_from(self, delegation: Delegation[M]) -> None:
        """This runtime, made with a delegation's session, goes on with the stream that was warmed for it.

        Close this instead of the delegation.

        Raises:
            ConfigurationError: it was not committed, or is over, or has another session.
        """
        if delegation.session != self.session:
            raise ConfigurationError(
                f"a runtime of session {self.session!r} cannot go on from a delegation of session "
                f"{delegation.session!r}: make it with session=delegation.session"
            )
        self._lookahead.delivery = delegation.handed_on()
        self._calls.first_usage = delegation.request_usage

    # ---- records, closing ----------------------------------------------------------------------

    @property
    def last_commit(self) -> CommitReport | None:
        """How the last commit turned out, None before the first."""
        return self._commits.last

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def prompt(self) -> Prompt:
        """The prompt in force."""
        return self._conversation.prompt

    @property
    def record(self) -> CommitRecord[M] | None:
        """The last commit, for adapters that hand in raw history and persist it."""
        return self._conversation.record

    def restore(self, record: CommitRecord[M] | None) -> None:
        """Go on from a persisted record, which holds for inputs that match one of its chains; None forgets it.

        An adapter whose framework takes over each view that is returned needs no record, and forgets it: an older
        history that comes back (a fork, time travel) is then what it was, not what it once became.
        """
        with self._lookahead.lock:
            self._conversation.record = record

    @property
    def digests(self) -> list[str]:
        """Chain digests of the last history that a hook was given: of its first 1, 2, … messages."""
        with self._lookahead.lock:
            return self._conversation.digests()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The state machine's newest events, for `smoothagent.machine` to replay."""
        with self._lookahead.lock:
            return [event.encode() for event in self._lookahead.log]

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
        lookahead = self._lookahead
        with self._lookahead.lock:
            if self._closed:
                return None
            self._closed = self._calls.closed = True
            self._dropped.detach()
            self._commits.close()
            lookahead.drop("closed")
            lookahead.undelivered()
            self._observer.closing()
            left = [delegation for delegation in self._delegations if not delegation.committed]
        self._release()
        for delegation in left:
            delegation.cancel()
        return lookahead.previous

    def rest(self) -> None:
        """Free what the server holds and what is prepared, as for a conversation that has long been idle.

        Unlike after `close`, the next hook goes on, with the record of the last commit.
        """
        with self._lookahead.lock:
            if self.in_use.now:
                return  # it is not idle after all
            self._lookahead.drop("idle")
            self._lookahead.undelivered()
            self._lookahead.start_over()
        if self.backend is not None:
            self._lane.call(self._release_if_idle, self.backend)

    def _release_if_idle(self, backend: Backend) -> None:
        if not self.in_use.now:
            backend.release(self.session)

    def _release(self) -> None:
        """Free what the server holds, on the lane: behind the job's cancellation, or the job would lease slots anew."""
        if self.backend is not None:
            self._lane.call(self.backend.release, self.session)

    # ---- inside --------------------------------------------------------------------------------

    def _request_for(self, call: Mapping[str, Any]) -> MainRequest:
        with self._lookahead.lock:
            ours = self._conversation.is_sent_by(call.get("messages"))
            self._asides = 0 if ours else self._asides + 1
            if ours:
                system = self._conversation.system_before(call.get("messages"))
                self._conversation.prompt = self._learnt.from_call(call, system, self._conversation.prompt)
            elif self._asides == _STRANGE:
                self._observer.say_once(
                    "aside",
                    f"{_STRANGE} calls in a row through the wrapped client did not begin with the messages that "
                    "on_commit returned, so they are not taken for this conversation's and find nothing warm. Send "
                    "what it returns unchanged; more may stand after it, and system text before it",
                )
        return MainRequest(self._calls if ours else Aside(self.backend, self.session), self)

    def _committing(self, messages: Sequence[M], prompt: Prompt | None) -> Procedure[list[M]]:
        with self.in_use.during():
            return (yield from self._commits.procedure(messages, lambda: self._follow(messages, prompt)))

    def _follow(self, messages: Sequence[M], prompt: Prompt | None) -> None:
        if self._closed:
            raise ClosedError(f"the runtime of session {self.session!r} is closed: make a new one for it")
        self.in_use.noted()
        self._calls.ask_server()
        self._conversation.follow(messages, self._learnt.complete(prompt, self._conversation.prompt))
        prompt = self._conversation.prompt
        if prompt is not self._checked:
            self.strategy.check(prompt)
            self._checked = prompt


def _let_go(lane: Lane, lookahead: Lookahead[Any], calls: weakref.ref[OwnCalls[Any]]) -> None:
    """A runtime was dropped; called by the garbage collector, anywhere."""
    left = calls()
    if left is not None:
        left.closed = True  # somebody still has a request of it

    def on_the_lane() -> None:
        with lookahead.lock:
            lookahead.drop("the runtime was dropped")
            lookahead.undelivered()
        if lookahead.backend is not None:
            lookahead.backend.release(lookahead.session)

    lane.later(on_the_lane)


def _check(strategy: LookaheadStrategy, backend: Backend | None, ceiling: int | None) -> None:
    if strategy.needs_model and backend is None:
        name = type(strategy).__name__
        raise ConfigurationError(f"{name} needs a model: pass backend=OpenAIBackend(...) to LookaheadRuntime")
    hard = strategy.waits_for
    if ceiling is not None and hard is not None and ceiling < hard:
        raise ConfigurationError(f"ceiling is {ceiling} tokens and hard is {hard}: the ceiling must be at least hard")
