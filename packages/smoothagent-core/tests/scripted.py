"""A model server in memory with a prefix cache, a script of faults, and virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httpx2

from smoothagent import Caps, Generated, Prompt, Stream, Usage
from smoothagent.serving.backend import Wire


def tokens_of(wires: Sequence[Wire]) -> list[str]:
    """A token list that extends exactly when the messages extend: one token per message field's word."""
    out: list[str] = []
    for wire in wires:
        made = cast("list[dict[str, Any]]", wire.get("tool_calls") or [])
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in made]
        out += [f"<{wire['role']}>", *json.dumps([wire.get("content"), calls]).split(" "), "</>"]
    return out


WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
"""Set it in the caller's context: what runs on the lane must not see it."""

HANG = math.inf
"""A pause that never ends."""


@dataclass(frozen=True)
class Sent:
    """One request as the server saw it arrive."""

    kind: str
    conversation: str
    messages: list[Wire]
    prompt: Prompt
    lookahead: bool
    who: str


@dataclass
class ScriptedBackend:
    """Answers after ``delay`` virtual seconds; ``fault(kind, n)`` may return an exception to raise.

    Kinds are ``prefill``, ``generate``, ``synchronous`` (generate on the critical path) and ``promote``.
    ``pause(kind, n)`` overrides the delay of the n-th prefill or generation, `HANG` for ever;
    A cancelled request takes ``unwind`` seconds to let go of the server.
    ``generated(n, answer)`` overrides the n-th answer. Threads that have no clock may use ``delay=0``.
    """

    delay: float = 1.0
    per_token: float = 0.0
    answer: Callable[[Sequence[Wire]], str] = lambda wires: f"summary of {len(wires) - 1} messages"
    finish_reason: str = "stop"
    tool_calls: bool = False
    fault: Callable[[str, int], Exception | None] = lambda kind, n: None
    classes: bool = True
    warms: bool = True
    pause: Callable[[str, int], float | None] = lambda kind, n: None
    generated: Callable[[int, Generated], Generated] = lambda n, answer: answer
    arrived: Callable[[Sent], None] = lambda sent: None
    counts: Callable[[Sequence[Wire]], int | None] = lambda wires: None
    counted: int = 0
    sent: list[Sent] = field(default_factory=list[Sent])
    unwind: float = 0.0
    cancelled: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    requests: list[tuple[str, list[Wire], bool]] = field(default_factory=list[tuple[str, list[Wire], bool]])
    warm: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    computed: Counter[str] = field(default_factory=Counter[str])
    written: Counter[str] = field(default_factory=Counter[str])
    prefills: int = 0
    generations: int = 0
    promotions: int = 0
    commits: int = 0
    elsewhere: bool = False
    arrives: bool = True
    follows: bool = True
    called_back: list[str] = field(default_factory=list[str])
    delivered: list[str] = field(default_factory=list[str])
    hurried: set[str] = field(default_factory=set[str])
    released: list[str] = field(default_factory=list[str])
    running: int = 0
    events: list[str] = field(default_factory=list[str])

    async def caps(self) -> Caps:
        """Everything, unless ``classes`` or ``warms`` say otherwise."""
        return Caps(
            "scripted",
            prefill=self.warms,
            classes=self.classes,
            cached_tokens=True,
            follows_answers=self.follows,
        )

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """A marker."""
        return {"extra_body": {"stream_of": f"{conversation}:{stream}"}}

    async def prefill(
        self, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, partial: bool = False
    ) -> Usage:
        """Warm after a while; a cancelled prefill warms nothing."""
        self.prefills += 1
        self._note("prefill", conversation, messages, prompt, lookahead=True)
        tokens = tokens_of(messages)
        before = self.warm.get(conversation, [])
        cached = 0
        while cached < min(len(before), len(tokens)) and before[cached] == tokens[cached]:
            cached += 1
        # As if all of it were computed at once: one that is cut short has cost as much.
        self.computed[conversation] += len(tokens) - cached
        await self._work("prefill", self.prefills)
        self.warm[conversation] = tokens
        self.requests.append(("prefill", list(messages), True))
        return Usage(len(tokens), 0, cached)

    async def generate(
        self,
        conversation: str,
        messages: Sequence[Wire],
        prompt: Prompt,
        *,
        max_tokens: int,
        lookahead: bool,
        extends_main: bool = True,
    ) -> Generated:
        """Answer after a while."""
        self.generations += 1
        self.requests.append(("generate", list(messages), lookahead))
        self._note("generate", conversation, messages, prompt, lookahead=lookahead)
        nth = self.generations
        if lookahead:
            self.computed[conversation] += len(tokens_of(messages))
            self.written[conversation] += 5
        await self._work("generate" if lookahead else "synchronous", nth)
        text = self.answer(messages)
        usage = Usage(len(tokens_of(messages)), 5, 0)
        return self.generated(nth, Generated(text, self.finish_reason, self.tool_calls, usage))

    def spent(self, conversation: str) -> Usage:
        """What was asked of it."""
        return Usage(self.computed[conversation], self.written[conversation])

    async def promote(self, conversation: str) -> None:
        """Count."""
        self.promotions += 1
        self.hurried.add(conversation)
        error = self.fault("promote", self.promotions)
        if error is not None:
            raise error

    async def cancel(self, conversation: str) -> None:
        """Nothing runs apart from the coroutines."""

    def settle(self, conversation: str) -> None:
        """Note."""
        self.hurried.discard(conversation)

    def committed(self, conversation: str) -> bool:
        """Count."""
        self.commits += 1
        return self.elsewhere

    async def deliver(self, conversation: str) -> bool:
        """Note."""
        await self._work("deliver", self.commits)
        self.delivered.append(conversation)
        return self.arrives

    def undelivered(self, conversation: str) -> None:
        """Note."""
        self.called_back.append(conversation)

    def release(self, conversation: str) -> None:
        """Note."""
        self.released.append(conversation)

    def main_arrived(self, conversation: str) -> None:
        """Note."""
        self.events.append("arrived")

    def main_first_token(self, conversation: str) -> None:
        """Note."""
        self.events.append("first")

    def main_done(self, conversation: str) -> None:
        """Note."""
        self.events.append("done")

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """As ``counts`` says."""
        self.counted += 1
        return self.counts(messages)

    async def aclose(self) -> None:
        """Nothing to close."""

    def _note(self, kind: str, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, lookahead: bool) -> None:
        sent = Sent(kind, conversation, [dict(m) for m in messages], prompt, lookahead, WHO.get())
        self.sent.append(sent)
        self.arrived(sent)

    async def _work(self, kind: str, n: int) -> None:
        pause = self.pause(kind, n)
        self.running += 1
        try:
            if pause == HANG:
                await asyncio.Event().wait()
            await asyncio.sleep(self.delay if pause is None else pause)
            error = self.fault(kind, n)
            if error is not None:
                raise error
        except asyncio.CancelledError:
            self.cancelled.append((kind, n))
            if self.unwind:
                await asyncio.sleep(self.unwind)
            raise
        finally:
            self.running -= 1


class CharCounter:
    """One token per character: exact and easy to reason about."""

    def count(self, message: Any) -> int:
        """Characters of text and calls."""
        return len(message.text) + sum(len(c.name) + len(c.arguments) for c in message.tool_calls)

    def fixed(self, prompt: Prompt) -> int:
        """Characters of the system text."""
        return len(prompt.system or "")


def client_of(answer: Callable[[httpx2.Request], httpx2.Response]) -> Any:
    """What an openai client sends its requests with; older clients take it, too, and do not say so."""
    return httpx2.Client(transport=httpx2.MockTransport(answer))
