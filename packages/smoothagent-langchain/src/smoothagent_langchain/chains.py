"""The next prompt of a chain with a memory, warmed ahead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from smoothagent import Backend, Prompt
from smoothagent.forks import after_fork
from smoothagent.lane import Lane, process_lane
from smoothagent_langchain.aside import AsideBackend
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.harmless import harmless
from smoothagent_langchain.models import backend_for, to_wire_of
from smoothagent_langchain.seen import SEEN
from smoothagent_langchain.shape import History, Shape, shape_of
from smoothagent_langchain.unshared import Unshared
from smoothagent_langchain.watch import is_of, prompt_of

log = logging.getLogger("smoothagent")

_WATCHED = 60.0
"""Seconds after which a call is not taken any more for the one that a history was loaded for."""
_HELD = 120.0
"""Seconds for which what was warmed is held for a chain."""


class Upcoming(Unshared):
    """The next prompt of one memory's chain: what is certain of it is prefilled before the user has spoken.

    A chain tells its memory nothing of its prompt, so it is looked at as it is sent: a callback handler that all
    models of the process find (see `smoothagent_langchain.seen`) knows the call by the history in it.

    Args:
        lane: where it is done.
        heard: called with each answer to such a call.
    """

    def __init__(self, lane: Lane | None = None, *, heard: Callable[[BaseMessage], None] | None = None) -> None:
        self._lane, self._heard = lane or process_lane(), heard
        self._session = uuid.uuid4().hex
        self._model: BaseChatModel | None = None
        self._backend: Backend | None = None
        self._codec = LangChainCodec()
        self._history: History = ""
        self._shape: Shape | None = None
        self._future: concurrent.futures.Future[None] | None = None
        self._letting_go: concurrent.futures.Future[None] | None = None
        self._off = False
        self._watched_at = 0.0
        after_fork(self._start_afresh)
        self._said: set[str] = set()
        self._calls = 0

    def _start_afresh(self) -> None:
        """In a forked child nothing is being warmed."""
        self._future = self._letting_go = None

    @property
    def lane(self) -> Lane:
        """Where work runs ahead."""
        return self._lane

    def watch(self, history: History, model: object, *, warm: bool | None) -> None:
        """The chain is about to send ``history``; ``model`` is the one it will send it to, as far as is known."""
        with harmless("a chain's next prompt"):
            self._watch(history, model, warm=warm)

    def _watch(self, history: History, model: object, *, warm: bool | None) -> None:
        if isinstance(model, BaseChatModel) and model is not self._model:
            self._model, self._shape = model, None
            self._backend = backend_for(model, warm=warm)
            # Where nothing is prefilled the calls need not be looked at.
            self._off = isinstance(self._backend, AsideBackend) and not self._backend.prefills
            self._codec = LangChainCodec(to_wire_of(model))
            weakref.finalize(self, self._lane.later, self._backend.release, self._session).atexit = False
        self._history = list(history) if isinstance(history, list) else history
        self._watched_at = time.monotonic()
        if self._backend is not None and not self._off:
            SEEN.watch(self)

    def expect(self, history: History) -> None:
        """The chain's next prompt will hold ``history``."""
        shape, backend = self._shape, self._backend
        if self._off:
            return
        if shape is None or backend is None:
            self._say_why(backend)
            return
        with harmless("a chain's next prompt"):
            opening = shape.opening(history)
            self.stop()
            self._future = self._lane.spawn(self._warm(backend, opening, shape.prompt))

    def stop(self) -> None:
        """Nothing more is warmed; what is warm is held on for a while."""
        if self._future is not None:
            self._future.cancel()

    def forget(self) -> None:
        """The conversation is over."""
        SEEN.forget(self)
        self.stop()
        if self._backend is not None:
            self._lane.call(self._backend.release, self._session)

    def say_once(self, topic: str, text: str) -> None:
        """Tell, once a memory and topic."""
        if topic not in self._said:
            self._said.add(topic)
            log.info("memory %s: %s", self._session, text)

    def _say_why(self, backend: Backend | None) -> None:
        self._calls += 1
        if backend is None:
            self.say_once(
                "model", "nothing is warmed: the memory does not know the chain's chat model; give it as llm=…"
            )
        elif self._calls > 1:
            self.say_once(
                "seen",
                "nothing is warmed: no call of the memory's llm was seen that holds its history once",
            )

    async def _warm(self, backend: Backend, opening: Sequence[BaseMessage], prompt: Prompt) -> None:
        if self._letting_go is not None:
            self._letting_go.cancel()
        try:
            if not (await backend.caps()).prefill:
                self._off = True
                self.say_once("prefill", "nothing is warmed: the model's server is not known to keep prefixes")
                return
            await backend.prefill(self._session, [self._codec.wire(message) for message in opening], prompt)
        except Exception as error:  # whatever it was, the next call is as cold as without us
            self.say_once("warming", f"warming failed, the next call is cold: {error!r}")
        finally:
            if self._letting_go is not None:
                self._letting_go.cancel()  # of one that was stopped, and ended later than this one began
            self._letting_go = self._lane.spawn(self._let_go(backend))

    async def _let_go(self, backend: Backend) -> None:
        """Lease what is warm to nobody else for a while; a conversation that rests holds no slot."""
        await asyncio.sleep(_HELD)
        backend.release(self._session)

    # ---- what the handler sees -----------------------------------------------------------------

    def shape_in(
        self, messages: Sequence[BaseMessage], params: Mapping[str, Any], serialized: Mapping[str, Any] | None
    ) -> Shape | None:
        """Where the history stands in a call; None where the call is not the chain's."""
        if self._model is None or time.monotonic() > self._watched_at + _WATCHED:
            return None
        if not is_of(self._model, serialized, params):
            return None
        return shape_of(messages, self._history, prompt_of(params))

    def sent(self, shape: Shape) -> None:
        """The chain has called its model."""
        self._shape = shape
        self.stop()

    def answered(self, message: BaseMessage) -> None:
        """It has ended with ``message``."""
        if self._heard is not None:
            self._lane.call(self._heard, message)
