"""Isolation: a task handed to a sub-agent whose prompt is warm before it starts (paper section 3.5)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from smoothagent.codec import Codec
from smoothagent.errors import ClosedError, ConfigurationError
from smoothagent.forks import after_fork
from smoothagent.jsonstream import FieldStream
from smoothagent.lane import Lane
from smoothagent.ledger import Ledger
from smoothagent.lookahead import deliver, settle_delivery
from smoothagent.prompt import Prompt
from smoothagent.request import MainRequest
from smoothagent.serving.backend import Backend, LoopBound, Stream, Usage
from smoothagent.telemetry import Telemetry
from smoothagent.waiting import wrapped

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_ABANDONED = 300.0
"""Seconds without a word after which a task that was not delegated is given up: it holds slots of the server's."""


class Delegation(Generic[M]):
    """One delegated task. Made by `LookaheadRuntime.delegate`; the parent's lane is untouched.

    The sub-agent's head is warmed at once; the instruction follows chunk by chunk as it is fed.
    ``on_commit`` gives the messages of the sub-agent's first request.

    Attributes:
        session: the sub-agent's conversation key.
        prefilled_tokens: tokens computed ahead so far.
        warmed_text: characters of the instruction that are warm.
    """

    def __init__(
        self,
        *,
        backend: Backend | None,
        codec: Codec[M],
        lane: Lane,
        ledger: Ledger,
        prompt: Prompt,
        head: Sequence[M],
        instruction: Callable[[str], M],
        lookahead: bool = True,
    ) -> None:
        self.session = uuid.uuid4().hex
        self.prompt = prompt
        self.prefilled_tokens = 0
        self.warmed_text = 0
        self.cached_tokens: int | None = None
        self._backend = backend
        self._codec = codec
        self._lane = lane
        self._ledger = ledger
        self._head = list(head)
        self._instruction = instruction
        self._text = ""
        self._fields: dict[str, FieldStream] = {}
        self._wake: asyncio.Event | None = None
        self._closed = False
        self._committed = False
        self._touched = False
        self._future: concurrent.futures.Future[None] | None = None
        self._delivery: concurrent.futures.Future[bool] | None = None
        self._telemetry = Telemetry()
        self._stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._running = self._given_up = self._let_go_at_end = False
        after_fork(self._start_afresh)
        if backend is not None:
            # One that is dropped after its sub-agent has run must not keep the server's slots.
            self._dropped = weakref.finalize(self, lane.later, backend.release, self.session)
            self._dropped.atexit = False
            if lookahead:
                self._future = lane.spawn(self._run(backend))

    def extend(self, messages: Sequence[M]) -> None:
        """More of the head is known, such as files read for the sub-agent before its instruction."""
        self._check()
        self._head = [*self._head, *messages]
        self._lane.call(self._more)

    def feed(self, text: str) -> None:
        """The next piece of the instruction's text. Never blocks."""
        self._check()
        if not self._text and text and self._future is not None and self._backend is not None and not self._given_up:
            # The hand-over is near: what is not warm by the end of the instruction stays cold.
            self._lane.spawn(self._hurry(self._backend))
        self._text += text
        self._lane.call(self._more)

    def feed_json(self, fragment: str, *, field: str) -> None:
        """The next fragment of a tool call's arguments; ``field`` holds the instruction.

        Half escapes are held back; arguments that turn out not to be JSON stop the warming, nothing else.
        """
        stream = self._fields.setdefault(field, FieldStream(field))
        text = stream.feed(fragment)
        if text:
            self.feed(text)

    def on_commit(self, instruction: str) -> list[M]:
        """The sub-agent's first messages: ``head ‖ instruction(text)``. Never waits."""
        self._check()
        first, self._committed = not self._committed, True
        if first and self._future is not None and not self._given_up:
            self._future.cancel()
            if self._backend is not None:
                self._lane.call(self._backend.settle, self.session)
            if self._backend is not None and self._touched:
                if not instruction.startswith(self._text):
                    self._ledger.add(mispredictions=1)
                if self._backend.committed(self.session):
                    self._delivery = self._lane.spawn(deliver(self._backend, self.session))
        return [*self._head, self._instruction(instruction)]

    async def aon_commit(self, instruction: str) -> list[M]:
        """`on_commit` for async agents."""
        return self.on_commit(instruction)

    @property
    def committed(self) -> bool:
        """Whether its sub-agent has begun."""
        return self._committed

    @property
    def waits(self) -> bool:
        """Whether its sub-agent may still begin, and finds warm what is warmed until then."""
        return not (self._committed or self._closed or self._given_up)

    def main_request(self) -> MainRequest:
        """A context manager around the sub-agent's own call."""
        return MainRequest(self)

    def check_goes_on(self) -> None:
        """Refuse to be gone on with, where it has not begun or is over. Raises ConfigurationError."""
        if self._closed or not self._committed:
            raise ConfigurationError(
                "a sub-agent goes on from a delegation that was committed and is open: call task.on_commit(…) first, "
                "and do not cancel it"
            )

    def settle(self) -> None:
        """The sub-agent's call is about to be made: what has not been handed over by now is not waited for."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None and self._backend is not None:
            settle_delivery(delivery, self._backend, self.session)

    def handed_on(self) -> concurrent.futures.Future[bool] | None:
        """Its stream is another's from now on, who frees what the server holds; what that has to wait for.

        Raises:
            ConfigurationError: it was not committed, or is over.
        """
        self.check_goes_on()
        delivery, self._delivery = self._delivery, None
        self._closed = True
        if self._backend is not None:
            self._dropped.detach()
            self._lane.call(self._has_stopped)
        return delivery

    def cancel(self) -> None:
        """The task is not delegated after all, or is over: stop and free what the server holds."""
        if self._closed:
            return
        self._closed = True
        for future in (self._future, self._delivery):
            if future is not None:
                future.cancel()
        self._waste()
        if self._backend is not None:
            self._dropped.detach()
            self._lane.call(self._let_go, self._backend)

    async def aclose(self) -> None:
        """`cancel`, waiting for the work to have stopped."""
        self.cancel()
        if self._future is not None:
            await asyncio.wait({wrapped(self._stopped)}, timeout=5.0)

    # ---- what a main request tells ---------------------------------------------------------------

    def request_opens(self) -> concurrent.futures.Future[Any] | None:
        """Done once what was warmed is where the call goes; what the server is was found out by the parent's calls."""
        return self._delivery

    def request_may_block(self) -> bool:
        """Whether the lane goes on while a running loop stands still."""
        return self._lane.threads and not (isinstance(self._backend, LoopBound) and self._backend.needs_this_loop())

    def request_started(self) -> dict[str, Any]:
        """Route the sub-agent's call."""
        if self._backend is None or self._closed:
            return {}
        self.settle()
        self._backend.main_arrived(self.session)
        return self._backend.route(self.session, Stream.MAIN)

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        if self._backend is not None and not self._closed:
            self._backend.main_first_token(self.session)

    def request_text(self, text: str) -> None:
        """Nothing is prepared for a sub-agent's later turns."""

    def request_usage(self, usage: Usage) -> None:
        """What the warm-up was worth."""
        if self.cached_tokens is None:
            self.cached_tokens = usage.cached_tokens
            if usage.cached_tokens and self.prefilled_tokens:
                self._ledger.add(commits=1, saved_tokens=usage.cached_tokens)

    def request_done(self) -> None:
        """Tool time begins."""
        if self._backend is not None:
            self._backend.main_done(self.session)

    # ---- on the lane -----------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the delegation is over: make a new one with runtime.delegate(...)")

    async def _hurry(self, backend: Backend) -> None:
        if self._committed or self._closed:
            return
        try:
            await backend.promote(self.session)
        except Exception as error:  # it only makes it faster
            log.debug("promoting the warming of a sub-agent failed: %s", error)

    def _start_afresh(self) -> None:
        """In a forked child there is no lane that does anything for it."""
        self._future = self._delivery = self._wake = None
        self._running = False

    def _waste(self) -> None:
        if not self._committed and self.prefilled_tokens and not self._given_up:
            self._ledger.add(wasted_tokens=self.prefilled_tokens)

    def _let_go(self, backend: Backend) -> None:
        """On the lane: free what the server holds, once what is under way has ended and is booked."""
        if self._running:
            self._let_go_at_end = True
            return
        backend.release(self.session)
        self._has_stopped()

    def _has_stopped(self) -> None:
        """On the lane: nothing is under way, or ever was, where it was ended before its first step."""
        if not self._running and not self._stopped.done():
            self._stopped.set_result(None)

    def _more(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _run(self, backend: Backend) -> None:
        self._running, before = True, backend.spent(self.session)
        try:
            await self._follow(backend)
        except Exception as error:  # whatever it was, the sub-agent starts as without us
            log.warning("warming a sub-agent failed, it starts cold: %s", error)
        finally:
            self._running = False
            self._settle_accounts(backend.spent(self.session), before)
            if self._let_go_at_end:
                backend.release(self.session)
            self._has_stopped()

    async def _follow(self, backend: Backend) -> None:
        if not (await backend.caps()).prefill:
            return
        self._wake = asyncio.Event()
        done: tuple[int, int] | None = None
        while not (self._committed or self._closed):
            now = (len(self._head), len(self._text))
            if now != done:
                self._wake.clear()
                await self._prefill(backend, *now)
                done = now
                continue
            try:
                # Not `wait_for`, which loses a cancellation that comes with the event.
                async with asyncio.timeout(_ABANDONED):
                    await self._wake.wait()
            except TimeoutError:
                log.debug("a task that nobody speaks of is not kept warm")
                self._waste()
                # It may still be delegated, and is cold then: nobody is to blame who only took time.
                self._given_up, self._let_go_at_end = True, True
                return
            self._wake.clear()

    def _settle_accounts(self, now: Usage, before: Usage) -> None:
        """Book what a request has cost that was still under way."""
        rest = now.prompt_tokens - before.prompt_tokens - self.prefilled_tokens
        if rest > 0:
            self._ledger.add(prefilled_tokens=rest, wasted_tokens=0 if self._committed else rest)

    async def _prefill(self, backend: Backend, head: int, chars: int) -> None:
        natives = list(self._head[:head])
        text = self._text[:chars]
        if text:
            natives.append(self._instruction(text))
        if not natives or not self._ledger.allows():
            return
        wires = [self._codec.wire(m) for m in natives]
        self._touched = True
        with self._telemetry.prefill(self.session, model=self.prompt.model) as span:
            usage = await backend.prefill(self.session, wires, self.prompt, partial=bool(text))
            span.usage(usage)
        computed = max(0, usage.prompt_tokens - (usage.cached_tokens or 0))
        self.prefilled_tokens += computed
        self.warmed_text = chars
        self._ledger.add(prefilled_tokens=computed, reused_tokens=max(0, usage.cached_tokens or 0))
