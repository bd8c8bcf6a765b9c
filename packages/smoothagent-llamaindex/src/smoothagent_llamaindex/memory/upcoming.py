"""The next prompt that a memory is part of, warmed ahead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM

from smoothagent import Backend, upcoming
from smoothagent.blocking import in_daemon_thread
from smoothagent.harmless import harmless
from smoothagent.lane import Lane
from smoothagent_llamaindex.aside import AsideBackend
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike
from smoothagent_llamaindex.llm import has_strategy
from smoothagent_llamaindex.models import backend_for, given_for, prompt_for, to_wire_of
from smoothagent_llamaindex.seen import SEEN, Shape

_WATCHED = 60.0
"""Seconds after which a call is not taken any more for the one that a history was given for."""
_SILENT = 120.0
"""Seconds after which a call that nothing is heard of is taken to be over: a stream may never be read."""


class Upcoming(upcoming.Upcoming[ChatMessage]):
    """The next prompt of one memory's agent: what is certain of it is prefilled before the user has spoken.

    A memory is told nothing of the prompt, so the call is looked at as it is made (`smoothagent_llamaindex.seen`): it
    is known by the history in it. It is also what the work here gives way to.

    Args:
        lane: where it is done.

    Attributes:
        shape: the last call, where one was seen.
        finding: what is found out in a thread.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        super().__init__(lane)
        self.shape: Shape | None = None
        self.finding: concurrent.futures.Future[None] | None = None
        self._history: list[ChatMessage] = []
        self._watched_at = 0.0
        self._warms: bool | None = None
        self._given: Backend | None = None
        self._llm: LLM | None = None
        self._gets = 0
        self._waiting: concurrent.futures.Future[None] | None = None
        self._steady = True
        self._lasting = False

    def watch(self, history: Sequence[ChatMessage], *, warm: bool | None, given: Backend | None = None) -> None:
        """An agent is about to send ``history``; ``given`` is its server, where the user has made a backend of it."""
        self._history, self._warms, self._given = list(history), warm, given
        self._watched_at = time.monotonic()
        SEEN.watch(self)

    @property
    def idle(self) -> bool:
        """Whether nothing is warmed: no call was seen yet, its server is not prefilled, or its beginning changes."""
        return self.shape is None or self.off or not self._steady

    def expect(self, *histories: Sequence[ChatMessage], lasting: bool = False) -> None:
        """The agent's next prompt will hold one of these histories, the likeliest first.

        Args:
            histories: what is known of them.
            lasting: it will be given only when it is warm, so calls that do not hold it yet do not end the work.
        """
        if self.shape is None:
            self._gets += 1
            if self._gets > 1:
                self.say_once("seen", "nothing is warmed: no call of an LLM was seen that holds what the memory gave")
            return
        if not self._steady:
            return
        self._lasting = lasting
        with harmless("a memory's next prompt"):
            self.warm(self.shape.prompt, *map(self.shape.opening, histories))

    def is_ready(self, history: Sequence[ChatMessage]) -> bool:
        """Whether a prompt with this history would find it warm, or nothing can be warmed."""
        shape = self.shape
        return shape is None or self.idle or self.is_warm(shape.prompt, shape.opening(history))

    def find_out(self, expect: Callable[[], None]) -> None:
        """Do what leads to `expect` in a thread of its own, since tokens are counted, and a database may be asked."""
        self.finding = self.lane.spawn(in_daemon_thread(expect, "a memory's next prompt is not warmed"))

    def forget(self) -> None:
        """The conversation is over."""
        SEEN.forget(self)
        self.shape = None
        super().forget()

    # ---- what is seen --------------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether the call with the history may still come."""
        return time.monotonic() <= self._watched_at + _WATCHED

    def shape_in(self, llm: LLM, messages: Sequence[ChatMessage], params: Mapping[str, Any]) -> Shape | None:
        """Where the history stands in a call; None where the call is not the agent's, or it stands there twice."""
        history = self._history
        if not history:
            return None
        starts = [
            start
            for start in range(len(messages) - len(history) + 1)
            if all(map(alike, history, messages[start : start + len(history)]))
        ]
        if len(starts) != 1:
            return None
        return Shape(llm, list(messages[: starts[0]]), prompt_for(llm, params), dict(params))

    def sent(self, shape: Shape) -> None:
        """The agent has called its LLM."""
        if shape.llm is not self._llm:
            self._llm = shape.llm
            backend = given_for(self._given, shape.llm) or backend_for(shape.llm, warm=self._warms)
            idle = isinstance(backend, AsideBackend) and not backend.prefills
            # An agent with a strategy sends another view, and has it warmed itself.
            idle = idle or has_strategy(shape.llm)
            self.serve(backend, LlamaIndexCodec(to_wire_of(shape.llm)), prefills=not idle)
        before, self.shape = self.shape, shape
        if before is not None and before.prompt.tools and not shape.prompt.tools and before.before == shape.before:
            # An early stop, or a title: the next turn has tools again.
            self.shape = before
        if isinstance(self.backend, AsideBackend):
            self.backend.params = shape.params
        # Engines that put what they have found into the system text begin anew on every turn.
        same = before is None or [m.content for m in before.before] == [m.content for m in shape.before]
        self._steady = same
        if not same:
            self.say_once(
                "before", "nothing is warmed after a turn that began with another text than the one before it"
            )
        self._take_over(shape)
        self.hold()
        if self.backend is not None:
            self.backend.main_arrived(self.session)
            self._waiting = self.lane.spawn(self._give_up_waiting())

    def _take_over(self, shape: Shape) -> None:
        """What was warmed for this call is the agent's own from now on."""
        prompt = shape.opening(self._history)
        if self._lasting and not self.expects(shape.prompt, prompt):
            return  # it is for a later call
        self._lasting = False
        self.found(shape.prompt, prompt)
        # It is not waited for: the call is under way, so nothing can be brought to it.
        self.delivered()

    def first_token(self) -> None:
        """It is being answered."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self.backend is not None:
            waiting.cancel()
            self.backend.main_first_token(self.session)

    def ended(self, answer: ChatMessage | None) -> None:
        """It has ended."""
        del answer
        self.first_token()
        if self.backend is not None:
            self.backend.main_done(self.session)
            self.rest()

    async def _give_up_waiting(self) -> None:
        await asyncio.sleep(_SILENT)
        self.ended(None)
