"""The next prompt that a context is part of, warmed ahead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from autogen_core.models import ChatCompletionClient, LLMMessage

from smoothagent import Backend, Delegation, MainRequest, Usage, upcoming
from smoothagent.blocking import in_daemon_thread
from smoothagent.harmless import harmless
from smoothagent.lane import Lane
from smoothagent_autogen.aside import AsideBackend
from smoothagent_autogen.codec import AutoGenCodec
from smoothagent_autogen.flat import Flattening
from smoothagent_autogen.models import backend_for, given_for, to_wire_of
from smoothagent_autogen.seen import SEEN, Asked
from smoothagent_autogen.shape import AfterResults, Shape, ends_with, shape_of

After = Literal["results", "said"]
"""What the newest messages before a call are: results of tools, or what somebody said."""

Expected = tuple[After, list[list[LLMMessage]]]
"""What the newest messages will be, and windows of those before them, the likeliest first."""

WATCHED = 60.0
"""Seconds after which a call is not taken any more for the one that a view was given for."""


class Upcoming(upcoming.Upcoming[LLMMessage]):
    """The next prompt of one context's agent: what is certain of it is prefilled before it is asked for.

    Args:
        lane: where it is done.

    Attributes:
        last_usage: token counts of the last call, where its client tells them.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._turning = threading.RLock()
        super().__init__(lane)
        self.last_usage: Usage | None = None
        self._view: list[LLMMessage] = []
        self._after: After = "said"
        self._at = 0.0
        self._warms: bool | None = None
        self._given: Backend | None = None
        self._client: ChatCompletionClient | None = None
        self._last: Shape | None = None
        self._after_said: Shape | None = None
        self._after_results = AfterResults()
        self._flat = Flattening()
        self._unseen = 0
        self._called = False
        self._turn = 0
        self._finding: concurrent.futures.Future[Any] | None = None

    def _start_afresh(self) -> None:
        super()._start_afresh()
        # Held where a call begins, and where what a thread has found out is warmed: one of them comes first.
        self._turning = threading.RLock()

    @property
    def idle(self) -> bool:
        """Whether nothing is warmed: no call was seen yet, or its server is not prefilled."""
        return self._last is None or self.off

    def watch(self, view: Sequence[LLMMessage], after: After, *, warm: bool | None, given: Backend | None) -> None:
        """An agent is about to send ``view``; ``given`` is its server, where the user has made a backend of it."""
        self._view, self._after, self._at = list(view), after, time.monotonic()
        self._next_turn()
        self._warms, self._given = warm, given
        self._unseen += 1
        if self._unseen > 2 and self._last is None:
            self.say_once("seen", "nothing is warmed: no call of a model client was seen that ends with what it gave")
        SEEN.watch(self)

    def expect(self, after: After, *windows: Sequence[LLMMessage]) -> None:
        """The agent's next prompt will hold one of these windows, the likeliest first.

        What is in the cache as it is, is left alone: a window that has not moved, in a call like the last one.
        """
        last, shape = self._last, self._after_said if after == "said" else self._after_results.next
        shape = shape or last
        if shape is None or last is None or self.off:
            return
        same = shape is last or (shape.bare == last.bare and shape.systems == last.systems)
        wanted = [w for w in windows if w and not (same and self._goes_on(w))]
        if wanted:
            if isinstance(self.backend, AsideBackend):
                self.backend.call = shape.call
            # What is taken apart here is not what the call takes apart: it may be another thread's.
            self.warm(shape.prompt(wanted[0]), *(Flattening().flat(shape.opening(w)) for w in wanted))

    def find_out(self, windows: Callable[[Callable[[], bool]], Expected]) -> None:
        """`expect` what is found out in a thread, since it takes long: too late, where the next call has come."""
        turn = self._next_turn()

        def still() -> bool:
            return turn == self._turn

        def find() -> None:
            with harmless("a context's next prompt"):
                after, found = windows(still)
                with self._turning:
                    if still():
                        self.expect(after, *found)

        self._finding = self.lane.spawn(in_daemon_thread(find, "a context's next prompt is not warmed"))

    def _next_turn(self) -> int:
        with self._turning:
            self._turn += 1
            return self._turn

    def answered(self) -> bool:
        """Whether the agent has called its model since this was asked last: an answer that comes now is that call's."""
        called, self._called = self._called, False
        return called

    def _goes_on(self, window: Sequence[LLMMessage]) -> bool:
        """Whether it is in the cache as it is."""
        return all(a is b for a, b in zip(self._view, window, strict=False))

    def forget(self) -> None:
        """The conversation is over."""
        SEEN.forget(self)
        self._view = []
        self._next_turn()
        super().forget()

    def used(self, usage: Usage) -> None:
        """Token counts of the last call."""
        super().used(usage)
        self.last_usage = usage

    # ---- what is seen --------------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether the call with the view may still come."""
        return bool(self._view) and time.monotonic() <= self._at + WATCHED

    def is_in(self, asked: Asked) -> bool:
        """Whether a call ends with the view."""
        return ends_with(asked, self._view)

    def begins(self, asked: Asked, delegation: Delegation[LLMMessage] | None) -> MainRequest:
        """The agent calls its model."""
        shape = self._last = shape_of(asked, self._view)
        self._called = True
        self._next_turn()
        if self._after == "said":
            self._after_said = shape
        else:
            self._after_results.add(shape)
        if asked.client is not self._client:
            self._client = asked.client
            backend = given_for(self._given, asked.client) or backend_for(asked.client, warm=self._warms)
            idle = isinstance(backend, AsideBackend) and not backend.prefills
            self.serve(backend, AutoGenCodec(to_wire_of(asked.client)), prefills=not idle)
        if isinstance(self.backend, AsideBackend):
            self.backend.loop = asyncio.get_running_loop()
        if delegation is not None:
            self.go_on_from(delegation)
        return self.request(shape.prompt(self._view), self._flat.flat(shape.opening(self._view)))
