"""The next prompt of somebody who tells what it will begin with, warmed ahead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import uuid
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

from smoothagent.codec import Codec
from smoothagent.forks import after_fork
from smoothagent.lane import Lane, process_lane
from smoothagent.ledger import Ledger
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Backend
from smoothagent.unshared import Unshared

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_CANDIDATES = 2
"""Prompts that are warmed where it is not known which will come."""
_HELD = 120.0
"""Seconds for which what was warmed is held."""


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
        self._off = self._held = False
        self._said: set[str] = set()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        """In a forked child nothing is being warmed."""
        self._future = self._letting_go = None

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
            self._lane.call(before.release, self.session)
        weakref.finalize(self, self._lane.later, backend.release, self.session).atexit = False

    def warm(self, prompt: Prompt, *openings: Sequence[M]) -> None:
        """The next request begins with one of ``openings``, the likeliest first.

        A server that keeps one prefix for a conversation, in a slot, gets the first; others get two.
        """
        if self._backend is None or self._codec is None or self._off:
            return
        self.stop()
        self._future = self._lane.spawn(self._warm(self._backend, self._codec, prompt, openings))

    def stop(self) -> None:
        """Nothing more is warmed; what is warm is held on for a while."""
        if self._future is not None:
            self._future.cancel()

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
        if self._backend is not None:
            self._lane.call(self._backend.release, self.session)

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
            self._letting_go = self._lane.spawn(self._let_go(backend))

    async def _promote(self, backend: Backend) -> None:
        try:
            await backend.promote(self.session)
        except Exception as error:  # it only makes it faster
            log.debug("memory %s: promoting its work failed: %r", self.session, error)

    async def _let_go(self, backend: Backend) -> None:
        """Lease what is warm to nobody else for a while; a conversation that rests holds no slot."""
        await asyncio.sleep(_HELD)
        backend.release(self.session)
