"""A chat completion on its way through: its conversation, its commit, and what its answer tells."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from smoothagent import HistoryError, MainRequest, OpenAIBackend, Prompt, SmoothAgentError
from smoothagent.harmless import harmless
from smoothagent.prompt import prompt_of
from smoothagent.request import Aside
from smoothagent_gateway.answer import LONGEST, Answer, Events, is_usage_alone
from smoothagent_gateway.asgi import (
    GoneError,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    path_of,
    read_body,
    while_connected,
)
from smoothagent_gateway.body import Body
from smoothagent_gateway.credentials import AsClient, credentials_in
from smoothagent_gateway.figures import Figures
from smoothagent_gateway.sessions import Session, Sessions, Turn, Wire, space_of, system_apart
from smoothagent_gateway.settings import Settings
from smoothagent_gateway.upstream import BrokenError, Opened, Upstream

log = logging.getLogger("smoothagent.gateway")

_KINDS = {"lookahead": "hit", "late": "late", "sync": "sync"}
"""How a commit is told (`smoothagent.CommitReport`)."""
_NOT_ASKED = (400, 422)
"""Statuses of servers that do not know ``stream_options``."""
_MOST = 2**48
"""Tokens beyond which a count is none."""
_MESSAGE_BYTES = 1000
"""Bytes that a message takes besides its text."""
Call = dict[str, Any]


@dataclass(slots=True)
class Planned:
    """A completion as it goes on.

    Attributes:
        body: what is sent.
        headers: more of them, for the server.
        told: more of them, for the client.
        unasked: makes the same without the usage that only the gateway asks for; None where it does not.
    """

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    told: Headers = ()
    unasked: Callable[[], bytes] | None = None


class Completions:
    """``POST /v1/chat/completions``.

    Args:
        settings: the gateway's.
        upstream: where completions go.
        backend: the same, for lookahead.
        sessions: the conversations.
        figures: where they are counted.
    """

    def __init__(
        self, settings: Settings, upstream: Upstream, backend: OpenAIBackend, sessions: Sessions, figures: Figures
    ) -> None:
        self._settings, self._upstream, self._backend = settings, upstream, backend
        self._sessions, self._figures = sessions, figures
        self._asks_usage = settings.ask_usage
        self._said: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one. Raises RefusedError, GoneError."""
        data = await read_body(scope, receive, self._settings.max_body_bytes)
        arrived = time.perf_counter()
        if header(scope, b"content-encoding") not in (None, "identity"):
            body = Body(b"{}")  # it is the server's to read
            body.data = data
        else:
            body = self._sessions.read(data)
        await while_connected(receive, self._answer(scope, send, arrived, body))

    async def _answer(self, scope: Scope, send: Send, arrived: float, body: Body) -> None:
        call, own = body.call, credentials_in(scope["headers"])
        credentials = self._upstream.credentials(own)
        try:
            if body.items is None or not _is_history(call.get("messages")):
                raise HistoryError("no list of messages")
            prompt = prompt_of(_as_client_gives(call))
            messages = cast("list[Wire]", call["messages"])
            space = space_of(own, self._named(scope), credentials)
            lead = system_apart(messages)
            if lead:
                prompt = replace(prompt, system=lead[0]["content"])
            session, given = await self._sessions.find(space, messages[len(lead) :], prompt.system)
        except Exception as error:  # the server may make something of it, or say itself what is wrong
            self._say_once("history", f"a request goes on as it is: {_without_text(error)}")
            await self._aside(scope, send, arrived, body, credentials)
            return
        exchange = Exchange(session, given, prompt, lead)
        with self._sessions.using(session, exchange):
            await self._turn(scope, send, arrived, body, exchange)

    async def _aside(
        self, scope: Scope, send: Send, arrived: float, body: Body, credentials: Mapping[str, str]
    ) -> None:
        """One that is no conversation's: it is kept off theirs."""
        async with MainRequest(Aside(AsClient(self._backend, credentials), "gateway")) as request:
            legible = bool(body.call)
            planned = _planned(body, (), (), request.extras, ask=False) if legible else Planned(body.data)
            await self._forward(scope, send, arrived, planned, Reading(arrived, request, planned, _nothing))

    async def _turn(self, scope: Scope, send: Send, arrived: float, body: Body, exchange: Exchange) -> None:
        session, given, runtime = exchange.session, exchange.given, exchange.session.runtime
        first = runtime.record is None
        view = await self._view(exchange)
        exchange.sent = len(exchange.lead) + len(view)
        if exchange.follows:
            # Once as it came, and once as it was read.
            size = 2 * len(body.data) + _MESSAGE_BYTES * len(given)
            self._sessions.take(session, given, size, body.kept())
        if exchange.commit != "none":
            self._figures.committed(exchange.commit)
            self._sessions.remember(session, first=first)
        async with contextlib.AsyncExitStack() as stack:
            request = await stack.enter_async_context(runtime.main_request())
            ask = self._asks_usage and self._backend.server != "llama.cpp"  # which tells as much in any case
            planned = _planned(body, [*exchange.lead, *given], [*exchange.lead, *view], request.extras, ask=ask)
            planned.told = (
                (b"x-smoothagent-conversation", session.name.encode()),
                (b"x-smoothagent-commit", exchange.commit.encode()),
            )
            over = stack.pop_all()
            ended = False

            async def end(reading: Reading) -> None:
                """The answer is there: its client may go on at once, before the server has closed the stream."""
                nonlocal ended
                if ended:
                    return
                ended = True  # whatever comes of it
                reading.ended()
                await over.__aexit__(*((None, None, None) if reading.heard else (GoneError, GoneError(), None)))
                with harmless("a conversation's next prompt"):
                    self._answered(exchange, reading)
                self._sessions.free(session, exchange)

            reading = Reading(arrived, request, planned, end)
            try:
                await self._forward(scope, send, arrived, planned, reading)
            finally:
                # Clients leave as soon as they have what they want, and may be noticed to before all of this is done.
                await end(reading)

    async def _view(self, exchange: Exchange) -> list[Wire]:
        """What is sent of a history; says in ``exchange`` how it is a commit."""
        session, given, runtime = exchange.session, exchange.given, exchange.session.runtime
        before, prompt = runtime.last_commit, session.told(exchange.prompt)
        try:
            view = await runtime.aon_commit(given, prompt=prompt)
        except Exception as error:
            # Impossible for us, but perhaps not for the server, which says so itself.
            exchange.follows = False
            kind = type(error).__name__
            self._say_once(kind, f"conversation {session.name} is not transformed: {_without_text(error)}")
            try:
                return runtime.view(given)  # what earlier commits have left of it
            except Exception:
                return given
        report = runtime.last_commit
        if report is not None and report is not before:
            exchange.commit, exchange.known = _KINDS[report.kind], report.known_tokens or None
        return view

    def _answered(self, exchange: Exchange, reading: Reading) -> None:
        if not reading.heard:
            return
        session, usage = exchange.session, reading.answer.usage
        turn = Turn(
            *(_number(usage, "prompt_tokens"), _cached(usage), reading.ttft),
            commit=exchange.commit,
            known_tokens=exchange.known,
            messages=exchange.sent,
        )
        session.turns.append(turn)
        self._figures.turn(turn, streamed=reading.streamed)
        message = reading.answer.message()
        if message is not None and exchange.follows:
            given = exchange.given
            end = len(given) - min(session.tail, len(given))
            if end == len(given):
                session.answer = message
            session.runtime.on_segment_boundary([*given[:end], message, *given[end:]], prompt=session.prompt)

    # ---- on to the server and back -------------------------------------------------------------

    async def _forward(self, scope: Scope, send: Send, arrived: float, planned: Planned, reading: Reading) -> None:
        """Send it on, and what it answers back."""
        headers = self._upstream.request_headers(scope["headers"])
        headers = [(k, v) for k, v in headers if k != b"accept-encoding"]  # it has to be read on its way
        headers += [(b"accept-encoding", b"identity")]
        headers += [(k.lower().encode(), v.encode()) for k, v in planned.headers.items()]
        url = self._upstream.url(path_of(scope), scope["query_string"].decode("latin-1"))
        self._figures.sent(time.perf_counter() - arrived)
        async with self._upstream.opened("POST", url, headers, planned.body) as opened:
            if planned.unasked is None or opened.status not in _NOT_ASKED:
                await self._back(send, opened, planned, reading)
                return
        # It may be what the gateway has added that is not known there.
        async with self._upstream.opened("POST", url, headers, planned.unasked()) as opened:
            self._asks_usage = self._asks_usage and opened.status in _NOT_ASKED
            planned.unasked = None
            await self._back(send, opened, planned, reading)

    async def _back(self, send: Send, opened: Opened, planned: Planned, reading: Reading) -> None:
        self._figures.request("completion", opened.status)
        kind = (opened.named(b"content-type") or b"").split(b";")[0].strip().lower()
        legible = opened.status == 200 and opened.named(b"content-encoding") is None
        streams = legible and kind == b"text/event-stream"
        headers = opened.headers
        if streams and planned.unasked is not None:
            headers = [(k, v) for k, v in headers if k != b"content-length"]  # an event is taken out
        await send({"type": "http.response.start", "status": opened.status, "headers": [*headers, *planned.told]})
        if streams:
            await pass_on(send, reading.stream(opened))
        elif legible and kind == b"application/json":
            await pass_on(send, reading.whole(opened))
        else:
            await pass_on(send, opened.chunks())

    def _named(self, scope: Scope) -> str | None:
        for name in self._settings.session_headers:
            if (value := header(scope, name.encode("latin-1"))) is not None:
                return f"{name}={value}"
        return None

    def _say_once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s", text)


@dataclass(slots=True)
class Exchange:
    """A request of a conversation's, and what became of it.

    Attributes:
        session: the conversation.
        given: its messages.
        prompt: what else shapes it.
        lead: the message with the system text that stands before these.
        follows: the conversation goes on with it.
        commit: how it is a commit.
        known: of a commit, tokens of its prompt that were known when its lookahead was made.
        sent: messages that go on to the server.
    """

    session: Session
    given: list[Wire]
    prompt: Prompt
    lead: Sequence[Wire] = ()
    follows: bool = True
    commit: str = "none"
    known: int | None = None
    sent: int = 0


class Reading:
    """An answer that is read while it passes through.

    Args:
        arrived: when its request came, by ``time.perf_counter``.
        request: who is told.
        planned: the request.
        done: awaited when a stream has said that it is done.

    Attributes:
        answer: what it has said.
        ttft: seconds until it said anything.
        heard: there was something to read.
        streamed: it came as a stream.
    """

    def __init__(
        self, arrived: float, request: MainRequest, planned: Planned, done: Callable[[Reading], Awaitable[None]]
    ) -> None:
        self._arrived, self._request, self._planned, self._done = arrived, request, planned, done
        self._parts, self._size = list[bytes](), 0
        self.answer = Answer()
        self.ttft: float | None = None
        self.heard = self.streamed = False

    async def stream(self, opened: Opened) -> AsyncGenerator[bytes]:
        """A stream's chunks; each goes on before it is read, unless a part of it has to be taken out."""
        events, hides = Events(), self._planned.unasked is not None
        self.streamed = True
        broken: BrokenError | None = None
        async with contextlib.aclosing(opened.chunks()) as chunks:
            try:
                async for chunk in chunks:
                    if not hides:
                        yield chunk
                    whole = events.feed(chunk)
                    for event in whole:
                        self._hear(event)
                    if hides and (kept := b"".join(event for event in whole if not is_usage_alone(event))):
                        yield kept
                    if self.answer.done:
                        # It was sent a moment ago, and its reader has not had a turn since.
                        await self._done(self)
            except BrokenError as error:
                broken = error
        if hides and events.rest:
            yield events.rest
        if broken is not None:
            raise broken  # after what was held back

    async def whole(self, opened: Opened) -> AsyncGenerator[bytes]:
        """An answer that comes at once."""
        async for chunk in opened.chunks():
            self._size += len(chunk)
            if self._size <= LONGEST:
                self._parts.append(chunk)
            yield chunk

    def ended(self) -> None:
        """Nothing more comes, or nobody is there for it."""
        with harmless("what an answer tells"):
            if self._parts and self._size <= LONGEST:
                text = self.answer.body(b"".join(self._parts))
                self._heard(text, self.answer.whole)
            if self.answer.usage is not None:
                self._request.usage(self.answer.usage)

    def _hear(self, event: bytes) -> None:
        with harmless("what an answer tells"):
            self._heard(*self.answer.event(event))

    def _heard(self, text: str, said: bool) -> None:
        self.heard = self.heard or said
        if said and self.ttft is None:
            self.ttft = time.perf_counter() - self._arrived
            self._request.first_token()
        if text:
            self._request.text(text)


async def _nothing(reading: Reading) -> None:
    """Nobody waits for its end."""


async def pass_on(send: Send, chunks: AsyncGenerator[bytes]) -> None:
    """Send what comes. Raises BrokenError where it broke off before its end."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


# ---- a call ------------------------------------------------------------------------------------


def _is_history(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(cast("list[object]", messages))
        and all(isinstance(m, dict) for m in cast("list[object]", messages))
    )


def _as_client_gives(call: Call) -> dict[str, Any]:
    """A request's body as the openai client's arguments: what it has no argument for stands in ``extra_body``."""
    extra = {k: v for k, v in call.items() if k in _EXTRA}
    return {**call, "extra_body": extra} if extra else call


_EXTRA = (
    "chat_template_kwargs",
    "add_generation_prompt",
    "chat_template",
    "documents",
    "guided_json",
    "reasoning_split",
)
"""Fields that servers take beside OpenAI's and that shape a prompt's tokens."""


def _planned(
    body: Body, given: Sequence[Wire], view: Sequence[Wire], extras: Mapping[str, Any], *, ask: bool
) -> Planned:
    """The request as it goes on: byte for byte what came, where nothing of it is to be changed."""
    call = body.call
    changed = len(view) != len(given) or any(a is not b for a, b in zip(view, given, strict=True))
    added = {k: v for k, v in dict(extras.get("extra_body") or {}).items() if k not in call}
    headers = dict(extras.get("extra_headers") or {})
    sent = view if changed else None

    def unasked() -> bytes:
        return body.changed(sent, given, added) if changed or added else body.data

    if not (ask and call.get("stream") is True and not _asks_usage(call)):
        return Planned(unasked(), headers)
    options = call.get("stream_options")
    told = {**(cast("Call", options) if isinstance(options, dict) else {}), "include_usage": True}
    return Planned(body.changed(sent, given, {**added, "stream_options": told}), headers, unasked=unasked)


def _asks_usage(call: Call) -> bool:
    options = call.get("stream_options")
    return isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage") is True


def _without_text(error: Exception) -> str:
    """What is wrong, without quoting a message: of a history no more than that it is none."""
    if isinstance(error, HistoryError):
        return "its messages are no history that a model could be sent (a result without its call, for instance)"
    return str(error) if isinstance(error, SmoothAgentError) else type(error).__name__


def _number(usage: Mapping[str, Any] | None, name: str) -> int | None:
    value = None if usage is None else usage.get(name)
    return value if isinstance(value, int) and 0 <= value < _MOST else None


def _cached(usage: Mapping[str, Any] | None) -> int | None:
    details = None if usage is None else usage.get("prompt_tokens_details")
    return _number(cast("dict[str, Any]", details), "cached_tokens") if isinstance(details, dict) else None
