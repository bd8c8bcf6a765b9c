"""A chat completion on its way through: its conversation, its commit, and what its answer tells."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from smoothagent import HistoryError, MainRequest, SmoothAgentError
from smoothagent.harmless import harmless
from smoothagent.prompt import prompt_of
from smoothagent_gateway.answer import Answer, Events, is_usage_alone
from smoothagent_gateway.asgi import Receive, RefusedError, Scope, Send, header, path_of, read_body, while_connected
from smoothagent_gateway.figures import Figures
from smoothagent_gateway.sessions import Session, Sessions, Turn, Wire, space_of
from smoothagent_gateway.settings import Settings
from smoothagent_gateway.upstream import Opened, Upstream

log = logging.getLogger("smoothagent.gateway")

_KINDS = {"lookahead": "hit", "late": "late", "sync": "sync"}
"""How a commit is told (`smoothagent.CommitReport`)."""
Call = dict[str, Any]


@dataclass(slots=True)
class Planned:
    """A completion as it goes on.

    Attributes:
        body: what is sent.
        headers: more of them, for the server.
        commit: how it is a commit.
        session: whose it is; None where it is nobody's.
        asked: the gateway has asked for usage.
    """

    body: bytes
    headers: Mapping[str, str]
    commit: str = "none"
    session: Session | None = None
    asked: bool = False


class Completions:
    """``POST /v1/chat/completions``.

    Args:
        settings: the gateway's.
        upstream: where completions go.
        sessions: the conversations.
        figures: where they are counted.
    """

    def __init__(self, settings: Settings, upstream: Upstream, sessions: Sessions, figures: Figures) -> None:
        self._settings, self._upstream, self._sessions, self._figures = settings, upstream, sessions, figures
        self._said: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one. Raises RefusedError, GoneError."""
        arrived = time.perf_counter()
        body = await read_body(scope, receive, self._settings.max_body_bytes)
        call = _parsed(body)
        await while_connected(receive, self._answer(scope, send, arrived, body, call))

    async def _answer(self, scope: Scope, send: Send, arrived: float, body: bytes, call: Call) -> None:
        messages = call.get("messages")
        if not _is_history(messages):
            await self._forward(scope, send, arrived, Planned(body, {}))
            return
        space = space_of(header(scope, b"authorization"), self._named(scope))
        try:
            session, given = await self._sessions.find(space, cast("list[Wire]", messages))
        except Exception as error:
            self._say_once("history", f"a request goes on as it is: {_without_text(error)}")
            await self._forward(scope, send, arrived, Planned(body, {}))
            return
        with self._sessions.using(session, given, len(body)):
            await self._turn(scope, send, arrived, body, call, session, given)

    async def _turn(
        self, scope: Scope, send: Send, arrived: float, body: bytes, call: Call, session: Session, given: list[Wire]
    ) -> None:
        runtime, before, follows = session.runtime, session.runtime.last_commit, True
        prompt = session.told(prompt_of(_as_client_gives(call)))
        view = given
        try:
            view = await runtime.aon_commit(given, prompt=prompt)
        except Exception as error:
            # Impossible for us, but perhaps not for the server, which says so itself.
            follows = False
            self._say_once(
                type(error).__name__, f"conversation {session.name} goes on as it is: {_without_text(error)}"
            )
        report = runtime.last_commit
        commit = "none" if report is None or report is before else _KINDS[report.kind]
        if commit != "none":
            self._sessions.remember(session)
        reading: Reading | None = None
        try:
            async with runtime.main_request() as request:
                planned = _planned(body, call, given, view, request.extras, ask=self._settings.ask_usage)
                planned.commit, planned.session = commit, session
                reading = Reading(arrived, request, hide_usage=planned.asked)
                try:
                    await self._forward(scope, send, arrived, planned, reading)
                finally:
                    reading.ended()
        finally:
            # Clients leave as soon as they have what they want, and may be noticed to before all of this is done.
            if reading is not None and reading.heard:
                self._answered(session, reading, commit)
                message = reading.answer.message()
                if message is not None and follows:
                    end = len(given) - min(session.tail or 0, len(given))
                    with harmless("a conversation's next prompt"):
                        runtime.on_segment_boundary([*given[:end], message, *given[end:]], prompt=prompt)

    def _answered(self, session: Session, reading: Reading, commit: str) -> None:
        usage = reading.answer.usage
        turn = Turn(_number(usage, "prompt_tokens"), _cached(usage), reading.ttft, commit)
        session.turns.append(turn)
        self._figures.turn(turn)

    # ---- on to the server and back -------------------------------------------------------------

    async def _forward(
        self, scope: Scope, send: Send, arrived: float, planned: Planned, reading: Reading | None = None
    ) -> None:
        """Send it on, and what it answers back."""
        headers = self._upstream.request_headers(scope["headers"])
        headers = [(k, v) for k, v in headers if k != b"accept-encoding"]  # it has to be read on its way
        headers += [(b"accept-encoding", b"identity")]
        headers += [(k.lower().encode(), v.encode()) for k, v in planned.headers.items()]
        url = self._upstream.url(path_of(scope), scope["query_string"].decode("latin-1"))
        self._figures.sent(time.perf_counter() - arrived)
        async with self._upstream.opened("POST", url, headers, planned.body) as opened:
            self._figures.request("completion", opened.status)
            if opened.status != 200 or opened.named(b"content-encoding") is not None:
                reading = None
            kind = (opened.named(b"content-type") or b"").split(b";")[0].strip().lower()
            await self._start(send, opened, planned)
            if reading is not None and kind == b"text/event-stream":
                await pass_on(send, reading.stream(opened))
            elif reading is not None and kind == b"application/json":
                await pass_on(send, reading.whole(opened))
            else:
                await pass_on(send, opened.chunks())

    async def _start(self, send: Send, opened: Opened, planned: Planned) -> None:
        headers = opened.headers
        if planned.session is not None:
            headers.append((b"x-smoothagent-session", planned.session.name.encode()))
            headers.append((b"x-smoothagent-commit", planned.commit.encode()))
        await send({"type": "http.response.start", "status": opened.status, "headers": headers})

    def _named(self, scope: Scope) -> str | None:
        for name in self._settings.session_headers:
            if (value := header(scope, name.encode("latin-1"))) is not None:
                return f"{name}={value}"
        return None

    def _say_once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s", text)


class Reading:
    """An answer that is read while it passes through.

    Args:
        arrived: when its request came, by ``time.perf_counter``.
        request: who is told.
        hide_usage: take out the chunk that only the gateway has asked for.

    Attributes:
        answer: what it has said.
        ttft: seconds until it said anything.
        heard: there was something to read.
    """

    def __init__(self, arrived: float, request: MainRequest, *, hide_usage: bool) -> None:
        self._arrived, self._request, self._hides = arrived, request, hide_usage
        self._parts = list[bytes]()
        self.answer = Answer()
        self.ttft: float | None = None
        self.heard = False

    async def stream(self, opened: Opened) -> AsyncGenerator[bytes]:
        """A stream's chunks; each goes on before it is read, unless a part of it has to be taken out."""
        events = Events()
        async for chunk in opened.chunks():
            if not self._hides:
                yield chunk
            whole = events.feed(chunk)
            for event in whole:
                self._hear(*self.answer.event(event))
            if self._hides and (kept := b"".join(event for event in whole if not is_usage_alone(event))):
                yield kept
        if self._hides and events.rest:
            yield events.rest

    async def whole(self, opened: Opened) -> AsyncGenerator[bytes]:
        """An answer that comes at once."""
        async for chunk in opened.chunks():
            self._parts.append(chunk)
            yield chunk

    def ended(self) -> None:
        """Nothing more comes, or nobody is there for it."""
        if self._parts:
            text = self.answer.body(b"".join(self._parts))
            self._hear(text, self.answer.whole)
        if self.answer.usage is not None:
            self._request.usage(self.answer.usage)

    def _hear(self, text: str, said: bool) -> None:
        self.heard = self.heard or said
        if said and self.ttft is None:
            self.ttft = time.perf_counter() - self._arrived
            self._request.first_token()
        if text:
            self._request.text(text)


async def pass_on(send: Send, chunks: AsyncGenerator[bytes]) -> None:
    """Send what comes. Raises BrokenError where it broke off before its end."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


# ---- a call ------------------------------------------------------------------------------------


def _parsed(body: bytes) -> Call:
    try:
        call = json.loads(body)
    except RecursionError:
        raise RefusedError(400, "the request's body is nested too deeply to be read", "invalid_json") from None
    except ValueError as error:
        raise RefusedError(400, f"the request's body is not JSON: {_where(error)}", "invalid_json") from None
    if not isinstance(call, dict):
        raise RefusedError(
            400, f"the request's body is a JSON {type(call).__name__}: a chat completion is an object", "invalid_json"
        )
    return cast("Call", call)


def _where(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number in it is too long"


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
    body: bytes, call: Call, given: Sequence[Wire], view: Sequence[Wire], extras: Mapping[str, Any], *, ask: bool
) -> Planned:
    """The request as it goes on: byte for byte what came, where nothing of it is to be changed."""
    changed = len(view) != len(given) or any(a is not b for a, b in zip(view, given, strict=True))
    added = {k: v for k, v in dict(extras.get("extra_body") or {}).items() if k not in call}
    asks = ask and call.get("stream") is True and not _asks_usage(call)
    headers = dict(extras.get("extra_headers") or {})
    if not (changed or added or asks):
        return Planned(body, headers)
    sent = {**call, **added}
    if changed:
        sent["messages"] = list(view)
    if asks:
        options = call.get("stream_options")
        sent["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return Planned(json.dumps(sent, separators=(",", ":")).encode(), headers, asked=asks)


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
    return value if isinstance(value, int) else None


def _cached(usage: Mapping[str, Any] | None) -> int | None:
    details = None if usage is None else usage.get("prompt_tokens_details")
    return _number(cast("dict[str, Any]", details), "cached_tokens") if isinstance(details, dict) else None
