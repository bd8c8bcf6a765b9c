"""The next prompt of somebody who tells what it will begin with, warmed ahead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from smoothagent.codec import Codec
from smoothagent.delegation import Delegation
from smoothagent.forks import after_fork
from smoothagent.lane import Lane, process_lane
from smoothagent.ledger import Ledger
from smoothagent.lookahead import deliver, settle_delivery
from smoothagent.message import alike
from smoothagent.prompt import Prompt
from smoothagent.request import MainRequest
from smoothagent.serving.backend import Backend, Stream, Usage
from smoothagent.unshared import Unshared

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_CANDIDATES = 2
"""Prompts that are warmed where it is not known which will come."""
_HELD = 120.0
"""Seconds for which what was warmed is held."""


class _Warming(NamedTuple, Generic[M]):
    """What is warmed for the next call.

    Attributes:
        prompt: what else shapes its tokens.
        opening: the messages it is expected to begin with.
        spent: tokens that the conversation had cost before.
    """

    prompt: Prompt
    opening: list[M]
    spent: Usage

    def goes_with(self, codec: Codec[M], prompt: Prompt, messages: Sequence[M]) -> bool:
        """Whether a call begins with it."""
        opening = self.opening
        if len(opening) > len(messages) or (self.prompt is not prompt and self.prompt.digest() != prompt.digest()):
            return False
        pairs = zip(opening, messages, strict=False)
        return all(a is b or alike(codec.decode(a), codec.decode(b)) for a, b in pairs)


class Upcoming(Unshared, Generic[M]):
    """What is certain of the next prompt is prefilled before the user has spoken.

    For adapters whose framework computes the next prompt by itself (memories): nothing is committed here.

    Args:
        lane: where it is done.

    Attributes:
        session: the conversation's key at the backend.
        ledger: counts what it cost.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane or process_lane()
        self.session = uuid.uuid4().hex
        self.ledger = Ledger()
        self._backend: Backend | None = None
        self._codec: Codec[M] | None = None
        self._future: concurrent.futures.Future[None] | None = None
        self._letting_go: concurrent.futures.Future[None] | None = None
        self._warming: _Warming[M] | None = None
        self._delivery: concurrent.futures.Future[bool] | None = None
        self._first_usage: Callable[[Usage], None] | None = None
        self._off = self._held = False
        self._said: set[str] = set()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        """In a forked child nothing is being warmed."""
        self._future = self._letting_go = self._delivery = None
        self._warming = None

    @property
    def lane(self) -> Lane:
        """Where work runs ahead."""
        return self._lane

    @property
    def backend(self) -> Backend | None:
        """The server that calls go to, as far as is known."""
        return self._backend

    @property
    def off(self) -> bool:
        """Whether nothing is prefilled there."""
        return self._off

    def serve(self, backend: Backend, codec: Codec[M], *, prefills: bool = True) -> None:
        """Calls go to another server from now on."""
        before, self._backend, self._codec, self._off = self._backend, backend, codec, not prefills
        if before is backend:
            return
        if before is not None:
            self.stop()
            self._warming = self._delivery = None
            self._lane.call(before.release, self.session)
        weakref.finalize(self, self._lane.later, backend.release, self.session).atexit = False

    def warm(self, prompt: Prompt, *openings: Sequence[M]) -> None:
        """The next request begins with one of ``openings``, the likeliest first.

        A server that keeps one prefix for a conversation, in a slot, gets the first; others get two.
        """
        if self._backend is None or self._codec is None or self._off:
            return
        self.stop()
        before, self._warming, self._future = self._warming, None, None
        if not self.ledger.allows():
            self.say_once("ledger", "nothing is warmed any more: the ledger's budget is spent")
            return
        if openings:
            # Here and not on the lane, where it might come after the call that it is for.
            spent = self._backend.spent(self.session)
            if before is not None and before.goes_with(self._codec, prompt, openings[0]):
                spent = before.spent  # it goes on, and what has come of it counts
            self._warming = _Warming(prompt, list(openings[0]), spent)
        self._future = self._lane.spawn(self._warm(self._backend, self._codec, prompt, openings))

    def stop(self) -> None:
        """Nothing more is warmed; what is warm is held on for a while."""
        if self._future is not None:
            self._future.cancel()

    def expects(self, prompt: Prompt, messages: Sequence[M]) -> bool:
        """Whether a call with ``messages`` begins with what is being warmed, or was."""
        warming, codec = self._warming, self._codec
        return warming is not None and codec is not None and warming.goes_with(codec, prompt, messages)

    def is_warm(self, prompt: Prompt, messages: Sequence[M]) -> bool:
        """Whether it does, and nothing is left to be done about it."""
        future = self._future
        return future is not None and future.done() and not future.cancelled() and self.expects(prompt, messages)

    def request(self, prompt: Prompt, messages: Sequence[M]) -> MainRequest:
        """The call that sends ``messages``, for adapters that can mark it: it goes to where its beginning is warm."""
        return MainRequest(_Call(self, prompt, list(messages)), self)

    def found(self, prompt: Prompt, messages: Sequence[M]) -> bool:
        """The next call has come: what was warmed for it is the main stream from now on, if it is what it begins with.

        What is warmed is so in parts, too: whatever has come of it is more than the last prompt and this one share.

        Returns:
            Whether it begins with something that was warmed.
        """
        self.stop()
        warming, self._warming = self._warming, None
        backend, codec = self._backend, self._codec
        if warming is None or backend is None or codec is None or backend.spent(self.session) == warming.spent:
            return False  # nothing has come of it
        if not warming.goes_with(codec, prompt, messages):
            self.ledger.add(mispredictions=1)
            return False
        if backend.committed(self.session):
            self._delivery = self._lane.spawn(deliver(backend, self.session))
        return True

    def arriving(self) -> concurrent.futures.Future[bool] | None:
        """What was warmed elsewhere is on its way to where the next call goes."""
        return self._delivery

    def delivered(self) -> None:
        """The next call is made, whether it has come or not."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None and self._backend is not None:
            settle_delivery(delivery, self._backend, self.session)

    def go_on_from(self, delegation: Delegation[M]) -> None:
        """This conversation is a sub-agent's, which goes on in the stream that was warmed for its first call.

        Raises:
            ConfigurationError: it was not committed, or is over.
        """
        delivery = delegation.handed_on()
        if self._backend is not None:
            self.stop()
            self._lane.call(self._backend.release, self.session)
            weakref.finalize(self, self._lane.later, self._backend.release, delegation.session).atexit = False
        self.session, self._delivery, self._warming = delegation.session, delivery, None
        self._first_usage = delegation.request_usage

    def hold(self) -> None:
        """What is warm is in use: it is not let go until `rest`."""
        self._held = True
        if self._letting_go is not None:
            self._letting_go.cancel()
        self.settle()

    def settle(self) -> None:
        """Nobody waits any more for what is being done here."""
        if self._backend is not None:
            self._lane.call(self._backend.settle, self.session)  # on the lane, so that it comes after `hurry`

    def rest(self) -> None:
        """It is in use no more, and is let go after a while."""
        self._held = False
        if self._backend is not None:
            self._let_go_later(self._backend)

    def hurry(self) -> None:
        """Somebody waits for what is being done here."""
        if self._backend is not None:
            self._lane.spawn(self._promote(self._backend))

    def forget(self) -> None:
        """The conversation is over."""
        self.stop()
        self._warming = self._delivery = None
        if self._letting_go is not None:
            self._letting_go.cancel()
        if self._backend is not None:
            self._lane.call(self._backend.release, self.session)

    def used(self, usage: Usage) -> None:
        """The token counts of a call that `request` gave."""
        first, self._first_usage = self._first_usage, None
        if first is not None:
            first(usage)

    def say_once(self, topic: str, text: str) -> None:
        """Tell, once a conversation and topic."""
        if topic not in self._said:
            self._said.add(topic)
            log.info("memory %s: %s", self.session, text)

    async def _warm(self, backend: Backend, codec: Codec[M], prompt: Prompt, openings: Sequence[Sequence[M]]) -> None:
        if self._letting_go is not None:
            self._letting_go.cancel()
        try:
            caps = await backend.caps()
            if not caps.prefill:
                self._off = True
                self.say_once("prefill", "nothing is warmed: the model's server is not known to keep prefixes")
                return
            for opening in openings[: 1 if caps.server == "llama.cpp" else _CANDIDATES]:
                usage = await backend.prefill(self.session, [codec.wire(message) for message in opening], prompt)
                reused = max(0, usage.cached_tokens or 0)
                self.ledger.add(prefilled_tokens=max(0, usage.prompt_tokens - reused), reused_tokens=reused)
        except Exception as error:  # whatever it was, the next call is as cold as without us
            self.say_once("warming", f"warming failed, the next call is cold: {error!r}")
        finally:
            self._let_go_later(backend)

    def _let_go_later(self, backend: Backend) -> None:
        if self._letting_go is not None:
            self._letting_go.cancel()  # of one that was stopped, and ended later than this one began
        if not self._held:
            self._letting_go = self._lane.spawn(_let_go(backend, self.session))

    async def _promote(self, backend: Backend) -> None:
        try:
            await backend.promote(self.session)
        except Exception as error:  # it only makes it faster
            log.debug("memory %s: promoting its work failed: %r", self.session, error)


async def _let_go(backend: Backend, session: str) -> None:
    """Lease what is warm to nobody else for a while; a conversation that rests holds no slot.

    It holds nothing of the conversation, whose messages would stay as long.
    """
    await asyncio.sleep(_HELD)
    backend.release(session)


class _Call(Generic[M]):
    """The host of a call that an adapter can mark (`smoothagent.request.RequestHost`)."""

    def __init__(self, upcoming: Upcoming[M], prompt: Prompt, messages: list[M]) -> None:
        self._upcoming, self._prompt, self._messages = upcoming, prompt, messages
        self._backend = upcoming.backend
        self._warm = False

    def request_opens(self) -> concurrent.futures.Future[bool] | None:
        """What was warmed elsewhere is waited for, shortly."""
        self._warm = self._upcoming.found(self._prompt, self._messages)
        return self._upcoming.arriving()

    def request_may_block(self) -> bool:
        """The lane goes on while a running loop stands still."""
        return self._upcoming.lane.threads

    def request_started(self) -> dict[str, Any]:
        """Lookahead gives way."""
        if self._backend is None:
            return {}
        self._upcoming.delivered()
        self._upcoming.hold()
        self._backend.main_arrived(self._upcoming.session)
        return self._backend.route(self._upcoming.session, Stream.MAIN)

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        if self._backend is not None:
            self._backend.main_first_token(self._upcoming.session)

    def request_text(self, text: str) -> None:
        """Nothing follows it."""

    def request_usage(self, usage: Usage) -> None:
        """What of it was cached."""
        if self._warm and usage.cached_tokens:
            self._upcoming.ledger.add(commits=1, saved_tokens=usage.cached_tokens)
        self._upcoming.used(usage)

    def request_done(self) -> None:
        """Tool time begins."""
        if self._backend is not None:
            self._backend.main_done(self._upcoming.session)
            self._upcoming.rest()
