"""One lookahead on the lane: transform, prefill, extend, until it is committed or cancelled."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from smoothagent.answers import Answer
from smoothagent.blocking import blocking
from smoothagent.codec import Codec
from smoothagent.lane import Lane
from smoothagent.message import Message
from smoothagent.model import LaneModel, ModelHost
from smoothagent.natives import Natives, Snapshot
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Backend, Caps, Usage
from smoothagent.state import LookaheadState, MainState
from smoothagent.strategy import LookaheadStrategy
from smoothagent.telemetry import Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_STEP_CHARS = 400
"""Characters a step of warming covers at least: about a hundred tokens."""
_LINKS = 32
"""Spans of one lookahead that a commit links to."""


class Host(ModelHost, Protocol):
    """What a job tells its runtime."""

    @property
    def telemetry(self) -> Telemetry:
        """Where spans go."""
        ...

    def server_known(self, caps: Caps) -> None:
        """What the server can do."""
        ...

    def job_transformed(self, job_id: int, la: LookaheadState, digest: str) -> None:
        """The transformation is ``la``, bound to the messages it covers by their digest; publishes it."""
        ...

    def job_warmed(self, job_id: int) -> None:
        """Nothing is left to prefill."""
        ...

    def job_failed(self, job_id: int, error: Exception, length: int) -> None:
        """The transformation failed."""
        ...

    def job_prefilled(self, usage: Usage) -> None:
        """Tokens were prefilled."""
        ...

    def prefill_failed(self, error: Exception) -> None:
        """Warming failed; the transformation alone stands."""
        ...

    def job_cut_short(self, spent: Usage, *, wasted: bool) -> None:
        """A request of the job's ended without a result, after it had computed and generated this."""
        ...


@dataclass
class LookaheadJob(Generic[M]):
    """Runs on the lane; the runtime reads ``la``, ``warmed`` and ``natives`` under its lock.

    Attributes:
        la: result of the last transform, published by the host under its lock; None before the first.
        warmed: the messages prefilled so far, a prefix of the predicted view.
        prefilled: tokens of the new view computed ahead so far.
        prefills: warming works; False after it failed for good.
        planned: the cut it is going to make, 0 where that is not known.
        measured: how long it took to get ready was noted.
        dropped: what it prepared will not be used.
        links: the newest spans of its work.
        transformed: done when ``la`` is there or the job has failed.
    """

    id: int
    strategy: LookaheadStrategy
    snapshot: Snapshot[M]
    conversation: str
    prompt: Prompt
    lane: Lane
    backend: Backend | None
    codec: Codec[M]
    host: Host
    after: concurrent.futures.Future[None] | None = None
    la: LookaheadState | None = None
    warmed: list[Message] = field(default_factory=list[Message])
    prefilled: int = 0
    transformed: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future[None])
    future: concurrent.futures.Future[None] | None = None
    prefills: bool = True
    measured: bool = False
    dropped: bool = False
    planned: int = 0

    def __post_init__(self) -> None:
        self.natives: Natives[M] = Natives(self.codec)
        self.model = LaneModel(self.host, self.natives)
        self.stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._began = False
        self._more = False
        self._answer = Answer()
        self.links: deque[SpanContext] = deque(maxlen=_LINKS)
        self._wake: asyncio.Event | None = None

    @property
    def spent(self) -> int:
        """Tokens computed and generated ahead so far."""
        return self.prefilled + self.model.prefilled + self.model.generated

    def start(self) -> None:
        """Begin on the lane."""
        self.future = self.lane.spawn(self._run())

    def extend(self, snapshot: Snapshot[M]) -> None:
        """More of the history is known."""
        self.snapshot = snapshot
        self.lane.call(self._wake_up)

    def wants_answer(self, length: int) -> bool:
        """Whether an answer of ``length`` characters is worth another look."""
        return self._answer.wants(self.snapshot, length)

    def answering(self, length: int, text: str) -> None:
        """The model has answered ``text`` so far to a request of ``length`` messages."""
        snapshot = self.snapshot
        if len(snapshot.messages) == length:
            self._answer.hear(snapshot, text)
            self.lane.call(self._look)

    def cancel(self) -> None:
        """Stop, on the server too; ``stopped`` is done once that has happened."""
        if self.future is not None:
            self.future.cancel()
            self.lane.call(self._never_ran)
        if not self.transformed.done():
            self.transformed.cancel()

    def _wake_up(self) -> None:
        self._more = True
        self._look()

    def _look(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _never_ran(self) -> None:
        """A job cancelled before its first step has no end of its own."""
        if not self._began and not self.stopped.done():
            self.stopped.set_result(None)

    async def _run(self) -> None:
        self._began = True
        before = self._at_the_server()
        try:
            await self._work()
        except GeneratorExit:
            raise  # its loop is gone
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A transform that raises SystemExit, or CancelledError of its own, has failed like any other.
            self._failed(RuntimeError(f"the transformation raised {error!r}"))
        finally:
            self._settle_accounts(before)
            if not self.stopped.done():
                self.stopped.set_result(None)

    def _at_the_server(self) -> Usage:
        return self.backend.spent(self.conversation) if self.backend is not None else Usage()

    def _settle_accounts(self, before: Usage) -> None:
        """Book what a request has cost that was still under way."""
        now = self._at_the_server()
        booked = self.prefilled + self.model.prefilled
        prefilled = now.prompt_tokens - before.prompt_tokens - booked
        generated = now.completion_tokens - before.completion_tokens - self.model.generated
        rest = Usage(max(0, prefilled), max(0, generated))
        if rest != Usage():
            self.host.job_cut_short(rest, wasted=self.dropped)

    async def _work(self) -> None:
        if self.after is not None and not self.after.done():
            # One ordered lane a conversation: a cancelled job first lets go of the server.
            await asyncio.wait({asyncio.wrap_future(self.after)}, timeout=10.0)
        self._wake = asyncio.Event()
        try:
            await self._transform()
            self._settle()
            await self._follow(self._wake)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._settle()
        self.host.job_failed(self.id, error, len(self.snapshot.messages))

    async def _follow(self, wake: asyncio.Event) -> None:
        """Warm what is there, then what comes."""
        while True:
            await self._warm()
            if not self._more:
                self.host.job_warmed(self.id)
                await self._listen(wake)
            wake.clear()
            self._more = False
            if self._twin(self.snapshot).should_lookahead():
                await self._transform()

    async def _listen(self, wake: asyncio.Event) -> None:
        """Until more of the history is known. What the model is answering is warmed meanwhile."""
        while not self._more:
            await self._warm_answer()
            await wake.wait()
            wake.clear()

    def _settle(self) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled at this very moment
            self.transformed.set_result(None)

    async def _transform(self) -> None:
        snapshot = self.snapshot  # read once: another may come at any time
        twin = self._twin(snapshot)
        self.natives.learn(snapshot.messages, snapshot.natives)
        twin.bind(self.model)
        model = self.model
        before = model.prefilled, model.reused, model.generated
        span = self.host.telemetry.transform(self.conversation, strategy=type(twin).__name__, model=self.prompt.model)
        with span as done:
            self.links.append(done.link)
            try:
                work = await blocking(self.lane, lambda: self._transformed(twin, snapshot))
                if work is not None:
                    await work
                    await blocking(self.lane, lambda: self._count(twin, snapshot))
            finally:  # a summary that is rejected has cost what it has cost
                now = model.prefilled, model.reused, model.generated
                prefilled, reused, generated = (b - a for a, b in zip(before, now, strict=True))
                if prefilled or reused or generated:
                    done.usage(Usage(prefilled + reused, generated, reused))
        end = twin.la.last_segment_end
        self.host.job_transformed(self.id, twin.la, snapshot.digests[end - 1] if end else "")

    def _transformed(self, twin: LookaheadStrategy, snapshot: Snapshot[M]) -> Awaitable[None] | None:
        work = twin.transform()
        return work if work is not None else self._count(twin, snapshot)

    def _count(self, twin: LookaheadStrategy, snapshot: Snapshot[M]) -> None:
        """Have what is new counted here, where a tokenizer may take its time, and not at the commit."""
        known = set(map(id, snapshot.messages))
        with contextlib.suppress(Exception):  # a counter that fails does so at the commit, which says it
            for message in [*twin.la.transformed, *twin.warmable(snapshot.messages)]:
                if id(message) not in known:
                    twin.count(message)

    async def _warm(self) -> None:
        if self.backend is None or not self.prefills or self.la is None or not self.host.ledger.allows():
            return
        target = self._target(self.snapshot)
        if not target or _is_prefix(target, self.warmed):
            return
        try:
            caps = await self.backend.caps()
            self.host.server_known(caps)
            if not caps.prefill:
                self.prefills = False
                return
            for end in [len(target)] if caps.classes else self._steps(target):
                await self._prefill(self.backend, target[:end])
        except Exception as error:
            # Whatever it was, the transformation stands and need not wait for warmth that does not come.
            self.prefills = False
            self.host.prefill_failed(error)

    async def _warm_answer(self) -> None:
        """What the answer has of text by now, which will stand behind all that is warm."""
        if self.backend is None or not self.prefills or not self.host.ledger.allows():
            return
        snapshot = self.snapshot
        text = self._answer.take(snapshot)
        if text is None:
            return
        target = self._target(snapshot)
        # Only where the whole of the request is part of the next view, and was warmed.
        if not target or target[-1:] != snapshot.messages[-1:] or not _is_prefix(target, self.warmed):
            return
        try:
            await self._prefill(self.backend, target, Message("assistant", text))
        except Exception as error:
            # It is only ahead of what will be warmed anyway.
            log.debug("session %s: an answer was not followed: %r", self.conversation, error)
            self._answer.followed = False

    async def _prefill(self, backend: Backend, target: list[Message], partial: Message | None = None) -> None:
        wires = [self.natives.wire(m) for m in target]
        if partial is not None:
            wires.append(self.codec.wire(self.codec.encode(partial)))
        with self.host.telemetry.prefill(self.conversation, model=self.prompt.model) as span:
            usage = await backend.prefill(self.conversation, wires, self.prompt, partial=partial is not None)
            span.usage(usage)
            self.links.append(span.link)
        self.prefilled += max(0, usage.prompt_tokens - (usage.cached_tokens or 0))
        self.warmed = target
        self.host.job_prefilled(usage)

    def _steps(self, target: list[Message]) -> list[int]:
        """Where to stop and note how far it got, on a server where a commit may have to do with half of it."""
        same = 0
        while same < min(len(target), len(self.warmed)) and target[same] == self.warmed[same]:
            same += 1
        size, ends = 0, list[int]()
        for i in range(same, len(target)):
            size += len(target[i].text)
            if size >= _STEP_CHARS:
                size = 0
                ends.append(i + 1)
        return ends if ends and ends[-1] == len(target) else [*ends, len(target)]

    def _twin(self, snapshot: Snapshot[M]) -> LookaheadStrategy:
        """The strategy with a frozen ``main`` and a ``la`` of its own."""
        twin = self.strategy.snapshot(self.la if self.la is not None else LookaheadState())
        twin.main = MainState(list(snapshot.messages), dict(snapshot.facts))
        return twin

    def _target(self, snapshot: Snapshot[M]) -> list[Message]:
        assert self.la is not None
        self.natives.learn(snapshot.messages, snapshot.natives)
        return self._twin(snapshot).warmable(snapshot.messages)


def _is_prefix(messages: Sequence[Message], of: Sequence[Message]) -> bool:
    return len(messages) <= len(of) and all(a is b or a == b for a, b in zip(messages, of, strict=False))
