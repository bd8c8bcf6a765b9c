"""SGLang, plain and with our lookahead-aware scheduler."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from smoothagent.errors import BackendProtocolError, BackendRefusedError, RateLimitedError
from smoothagent.serving import chat
from smoothagent.serving.backend import Caps, Stream, Wire
from smoothagent.serving.connection import Connection
from smoothagent.serving.dialects.base import Ask, Options, mapping, rows, whole
from smoothagent.serving.dialects.streamed import Events
from smoothagent.serving.dialects.textual import Textual, flags, named_priority, priority_below
from smoothagent.serving.others import Load

T = TypeVar("T")

CAPABILITY = "lookahead"
"""Key in the server's info that says our scheduler runs there, and in ``custom_params`` that marks a request."""
PROMOTE = "lookahead_promote"
"""Key of ``set_internal_state`` that raises the request with the given number."""
DEADLINE = "deadline"
"""Key in ``custom_params``: seconds from the request's arrival until its result is predicted to be committed."""
NUMBER = "lookahead_id"
"""Key in ``custom_params``: the number `PROMOTE` names the request by."""
ABORT_WITHIN = 1.0
"""Seconds that a cancelled request waits at most for the server to be told."""
RID_DIGITS = 18
"""Digits of a number in a ``rid``; all equally long, so that no rid is a prefix of another (abort matches prefixes)."""


class SGLang(Textual):
    """Dialect of SGLang."""

    server = "sglang"
    continues = True

    def __init__(self, link: Connection, options: Options, served: Sequence[str]) -> None:
        super().__init__(link, options, served)
        self._classes = False
        self._window: int | None = None
        self._priorities = False
        self._default_priority: int | None = None
        self._low_first = False
        self._tells_load = True
        self._counts = True
        self._numbers = itertools.count(secrets.randbelow(10**12) * 10**4)
        self._running: dict[str, set[str]] = {}
        self._aborts: set[asyncio.Future[None]] = set()

    @staticmethod
    async def info(link: Connection) -> Mapping[str, Any]:
        """The server's description of itself; empty where it is no SGLang."""
        for path in ("~/server_info", "~/get_server_info"):
            try:
                answer = mapping(await link.get(path))
            except RateLimitedError:
                raise
            except (BackendRefusedError, BackendProtocolError):
                continue
            if "internal_states" in answer or "model_path" in answer:
                return answer
        return {}

    async def probe(self) -> None:
        """Read the server's arguments."""
        info = await self.info(self.link)
        if not info:
            raise BackendRefusedError(f"{self.link.root} has no SGLang server_info", status=404)
        states = rows(info.get("internal_states"))
        self._classes = CAPABILITY in info or any(CAPABILITY in s for s in states)
        self._window = whole(info.get("max_req_input_len")) or whole(info.get("context_length"))
        report, priorities, no_cache, low_first = flags(
            info,
            "enable_cache_report",
            "enable_priority_scheduling",
            "disable_radix_cache",
            "schedule_low_priority_values_first",
        )
        self.reports_cached = bool(report)
        self._priorities, self._low_first = bool(priorities), bool(low_first)
        default = info.get("default_priority_value")
        self._default_priority = default if isinstance(default, int) else None
        self.least = whole(info.get("page_size")) or 1
        if no_cache:
            self.hits = False
            self.notes["cache"] = "SGLang: --disable-radix-cache is set, so nothing can be warmed. Start without it."
        if not report:
            self.notes["report"] = "SGLang: cached tokens are not reported. Start with --enable-cache-report."
        if not self._classes and not self._priorities:
            self.notes["priority"] = (
                "SGLang: no lookahead-aware scheduler and no priorities, so lookahead work is paced from here. Start "
                "with --enable-priority-scheduling."
            )
        elif not self._classes and self._default_priority is None:
            self.notes["default_priority"] = (
                "SGLang: without --default-priority-value 0, requests that name no priority come last, lookahead "
                "requests among them; main requests are sent with priority 0."
            )

    def caps(self) -> Caps:
        """What is known now."""
        return Caps(
            server=self.server,
            prefill=self.options.warm is not False and self.hits,
            classes=self._classes,
            promote=self._classes,
            tokenize=False,
            cached_tokens=bool(self.reports_cached),
            window=self._window,
            notes=tuple(self.notes.values()),
        )

    @property
    def paced(self) -> bool:
        """Our scheduler needs no pacing."""
        return not self._classes

    async def load(self, own: int) -> Load | None:
        """``/get_load``: running and waiting requests; which of the running ones decode it does not tell."""
        if not self._tells_load:
            return None
        try:
            answer = await self.link.get("~/get_load")
        except BackendRefusedError:
            self._tells_load = False
            self.notes["blind"] = (
                "SGLang: the server does not tell its load, so other clients' requests are not seen when lookahead "
                "work is paced."
            )
            return None
        ranks = rows(answer) or rows(mapping(answer).get("loads"))
        waiting = sum(whole(r.get("num_waiting_reqs")) or 0 for r in ranks)
        everything = sum(whole(r.get("num_reqs")) or whole(r.get("num_running_reqs")) or 0 for r in ranks)
        return Load(waiting=waiting, decoding=max(0, everything - waiting - own))

    # -- what marks a request --------------------------------------------------------------

    def extras(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """Main requests name their priority where unnamed ones would come last."""
        del conversation, stream
        if self._priorities and not self._classes and self._default_priority is None:
            return {"extra_body": {"priority": 0}}
        return {}

    def marks(self, ask: Ask) -> dict[str, Any]:
        """A rid to abort by; class and deadline for our scheduler; a low priority where the server has priorities."""
        number = next(self._numbers)
        out: dict[str, Any] = {"rid": _rid(number)}
        if self._classes:
            params: dict[str, Any] = {CAPABILITY: 1, NUMBER: number}
            if ask.deadline is not None:
                params[DEADLINE] = ask.deadline
            out["custom_params"] = params
        elif self._priorities:
            # Sent only where it is on: the server may be told to abort requests that name one in vain.
            default = 0 if self._default_priority is None else self._default_priority
            out["priority"] = priority_below(named_priority(ask.prompt, default), low_first=self._low_first)
        return out

    def suppress_tools(self) -> dict[str, Any]:
        """Nothing: ``tool_choice: none`` drops the tools from the template and with them the prefix."""
        return {"tool_choice": "auto"}

    # -- requests --------------------------------------------------------------------------

    async def send(self, ask: Ask, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """As `Textual.send`; a cancelled request is aborted by its rid before its connection is closed."""
        with self._noted(ask, body):
            return await self._stoppable(super().send(ask, body), body)

    @asynccontextmanager
    async def streaming(self, ask: Ask, body: Mapping[str, Any], *, background: bool) -> AsyncGenerator[Events]:
        """As `Textual.streaming`, and as `send`."""
        with self._noted(ask, body):
            stream = super().streaming(ask, body, background=background)
            # Opening it takes until the first token, which is most of a short answer's time.
            events = await self._stoppable(stream.__aenter__(), body)
            try:
                yield self._stoppable_events(events, body)
            except BaseException as error:
                if not await stream.__aexit__(type(error), error, error.__traceback__):
                    raise
            else:
                await stream.__aexit__(None, None, None)

    async def _stoppable_events(self, events: Events, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        while True:
            event = await self._stoppable(_next(events), body)
            if event is None:
                return
            yield event

    async def _stoppable(self, step: Coroutine[Any, Any, T], body: Mapping[str, Any]) -> T:
        """Wait for ``step``; where that is cancelled, tell the server first and cancel the step then.

        In this order: a closed connection makes the server forget the rid at once, and stop only seconds later.
        """
        if "rid" not in body:
            return await step
        task = asyncio.ensure_future(step)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            try:
                if not task.done():
                    await self._abort(body)
            finally:  # whoever was cancelled may be cancelled again meanwhile
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()  # taken, or asyncio would report it
            raise

    @contextmanager
    def _noted(self, ask: Ask, body: Mapping[str, Any]) -> Generator[None]:
        """The request is on the server."""
        rid = body.get("rid")
        if not isinstance(rid, str):
            yield  # the agent waits for it itself
            return
        running = self._running.setdefault(ask.conversation, set())
        running.add(rid)
        try:
            yield
        finally:
            running.discard(rid)
            if not running and self._running.get(ask.conversation) is running:
                del self._running[ask.conversation]

    async def _abort(self, body: Mapping[str, Any]) -> None:
        """Stop a request whose caller has been cancelled; takes a moment at most."""
        telling = asyncio.ensure_future(self.link.post_quietly("~/abort_request", {"rid": body["rid"]}))
        self._aborts.add(telling)
        telling.add_done_callback(self._aborts.discard)
        # Whoever was cancelled may be cancelled again: the server is told all the same.
        await asyncio.wait({telling}, timeout=ABORT_WITHIN)

    async def count(self, ask: Ask) -> int | None:
        """``/v1/tokenize`` with messages, where the version has it."""
        if not self._counts:
            return None
        fields = chat.fields(ask.prompt, sampling=False)
        messages: list[Wire] = list(ask.messages)
        try:
            answer = await self.link.post(
                "/tokenize", {**fields, "model": self.model(ask.prompt), "messages": messages}
            )
        except RateLimitedError:
            raise
        except BackendRefusedError:
            self._counts = False
            return None
        return whole(answer.get("count"))

    async def promote(self, conversation: str) -> None:
        """Raise the conversation's requests in the scheduler's queue."""
        if self._classes:
            for rid in sorted(self._running.get(conversation, ())):
                await self.link.post_quietly("~/set_internal_state", {"server_args": {PROMOTE: _number(rid)}})

    async def cancel(self, conversation: str) -> None:
        """Abort the conversation's requests by their rids, the newest first."""
        for rid in sorted(self._running.get(conversation, ()), reverse=True):
            await self.link.post_quietly("~/abort_request", {"rid": rid})


def _rid(number: int) -> str:
    return f"smoothagent-{number:0{RID_DIGITS}d}"


def _number(rid: str) -> int:
    return int(rid.rpartition("-")[2])


async def _next(events: Events) -> Mapping[str, Any] | None:
    """The next event; None after the last, since a task cannot end with StopAsyncIteration."""
    return await anext(events, None)
