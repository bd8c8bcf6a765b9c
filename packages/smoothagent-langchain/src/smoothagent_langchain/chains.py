"""The next prompt of a chain with a memory, warmed ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from smoothagent import upcoming
from smoothagent.harmless import harmless
from smoothagent.lane import Lane
from smoothagent.prompt import prompt_of
from smoothagent_langchain.aside import AsideBackend
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.models import backend_for, to_wire_of
from smoothagent_langchain.seen import SEEN
from smoothagent_langchain.shape import History, Shape, shape_of
from smoothagent_langchain.watch import is_of

_WATCHED = 60.0
"""Seconds after which a call is not taken any more for the one that a history was loaded for."""


class Upcoming(upcoming.Upcoming[BaseMessage]):
    """The next prompt of one memory's chain: what is certain of it is prefilled before the user has spoken.

    A chain tells its memory nothing of its prompt, so it is looked at as it is sent: a callback handler that all
    models of the process find (see `smoothagent_langchain.seen`) knows the call by the history in it.

    Args:
        lane: where it is done.
        heard: called with each answer to such a call.
    """

    def __init__(self, lane: Lane | None = None, *, heard: Callable[[BaseMessage], None] | None = None) -> None:
        super().__init__(lane)
        self._heard = heard
        self._model: BaseChatModel | None = None
        self._history: History = ""
        self._shape: Shape | None = None
        self._watched_at = 0.0
        self._calls = 0

    def watch(self, history: History, model: object, *, warm: bool | None) -> None:
        """The chain is about to send ``history``; ``model`` is the one it will send it to, as far as is known."""
        with harmless("a chain's next prompt"):
            self._watch(history, model, warm=warm)

    def _watch(self, history: History, model: object, *, warm: bool | None) -> None:
        if isinstance(model, BaseChatModel) and model is not self._model:
            self._model, self._shape = model, None
            backend = backend_for(model, warm=warm)
            # Where nothing is prefilled the calls need not be looked at.
            idle = isinstance(backend, AsideBackend) and not backend.prefills
            self.serve(backend, LangChainCodec(to_wire_of(model)), prefills=not idle)
        self._history = list(history) if isinstance(history, list) else history
        self._watched_at = time.monotonic()
        if self.backend is not None and not self.off:
            SEEN.watch(self)

    def expect(self, history: History) -> None:
        """The chain's next prompt will hold ``history``."""
        if self.off:
            return
        if self._shape is None or self.backend is None:
            self._say_why()
            return
        with harmless("a chain's next prompt"):
            self.warm(self._shape.prompt, self._shape.opening(history))

    def forget(self) -> None:
        """The conversation is over."""
        SEEN.forget(self)
        super().forget()

    def _say_why(self) -> None:
        self._calls += 1
        if self.backend is None:
            self.say_once(
                "model", "nothing is warmed: the memory does not know the chain's chat model; give it as llm=…"
            )
        elif self._calls > 1:
            self.say_once(
                "seen",
                "nothing is warmed: no call of the memory's llm was seen that holds its history once",
            )

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
