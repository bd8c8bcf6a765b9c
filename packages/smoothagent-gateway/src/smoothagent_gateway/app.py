"""The gateway as an ASGI application."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.routing import Route

from smoothagent import Ledger, LookaheadRuntime, OpenAIBackend, ReadOffloaded, SmoothAgentError
from smoothagent.lane import process_lane
from smoothagent_gateway.asgi import (
    GoneError,
    Receive,
    RefusedError,
    Scope,
    Send,
    header,
    path_of,
    refuse,
    respond,
    while_connected,
)
from smoothagent_gateway.completions import Completions, pass_on
from smoothagent_gateway.figures import Figures
from smoothagent_gateway.records import Records
from smoothagent_gateway.sessions import Sessions, Space, Wire
from smoothagent_gateway.settings import LOOPBACK, Settings, is_loopback
from smoothagent_gateway.upstream import BrokenError, Upstream

log = logging.getLogger("smoothagent.gateway")

OWN = "/smoothagent"
"""Where the gateway's own pages are; all else is the upstream's."""
_BACKENDS = 64
"""Clients with keys of their own, whose lookahead is asked for with these."""
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gateway:
    """An OpenAI-compatible proxy that runs a strategy of the core's on every conversation that passes through.

    ``gateway.app`` is the ASGI application; it serves until its lifespan ends.

    Args:
        settings: see `Settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self._records = Records(settings.state) if settings.state is not None else None
        self._upstream = Upstream(settings)
        self._backends: dict[str, OpenAIBackend] = {}
        self.sessions = Sessions(
            self._runtime,
            records=self._records,
            limit=settings.conversations,
            idle_seconds=settings.idle_seconds,
            memory_bytes=settings.memory_bytes,
            tail=settings.volatile_tail,
        )
        self.figures = Figures(self.sessions, self.ledger)
        pages = Starlette(
            routes=[
                Route(OWN, _Endpoint(self._page)),
                Route(f"{OWN}/state", _Endpoint(self._state)),
                Route(f"{OWN}/metrics", _Endpoint(self._metrics)),
                Route(f"{OWN}/offloaded/{{ref}}", _Endpoint(self._offloaded)),
            ],
            lifespan=self._lifespan,
        )
        completions = Completions(settings, self._upstream, self.sessions, self.figures)
        ways = Ways(pages, _Endpoint(self._counted(completions)), _Endpoint(self._counted(self._pass_through)))
        self.app: Handler = Guard(settings, ways)

    async def aclose(self) -> None:
        """End all conversations and connections, and write what is left."""
        self.sessions.close()
        for backend in self._backends.values():
            await backend.aclose()
        await self._upstream.aclose()
        if self._records is not None:
            self._records.close()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        # What kind of server it is takes a while to find out, the first time: not the first request's.
        process_lane().spawn(self._find_out())
        try:
            yield
        finally:
            await self.aclose()

    async def _find_out(self) -> None:
        with contextlib.suppress(SmoothAgentError):  # it may still be starting, or want a client's own key
            await self._backend("").caps()

    def _runtime(self, space: Space, name: str) -> LookaheadRuntime[Wire]:
        return LookaheadRuntime(
            self.settings.strategy,
            backend=self._backend(space.key),
            session=name,
            lookahead=self.settings.lookahead,
            ledger=Ledger(parent=self.ledger),
        )

    def _backend(self, key: str) -> OpenAIBackend:
        """The server, as one client of the gateway's is let in there."""
        settings = self.settings
        if settings.api_key is not None or settings.token is not None:
            key = settings.api_key or ""
        backend = self._backends.get(key)
        if backend is None:
            if len(self._backends) >= _BACKENDS:
                self._backends.pop(next(iter(self._backends)))
            backend = self._backends[key] = OpenAIBackend(
                settings.base,
                api_key=key or "x",
                warm=settings.warm,
                dialect=settings.dialect,
                slots=settings.slots,
                lookahead_url=settings.lookahead_url,
            )
        return backend

    def _counted(self, handler: Handler) -> Handler:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            self.figures.open += 1
            try:
                await handler(scope, receive, send)
            finally:
                self.figures.open -= 1

        return handle

    # ---- what is not a completion --------------------------------------------------------------

    async def _pass_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Anything else, as it is."""
        url = self._upstream.url(path_of(scope), scope["query_string"].decode("latin-1"))
        headers = self._upstream.request_headers(scope["headers"])
        length = header(scope, b"content-length")
        if length is None and header(scope, b"transfer-encoding") is None:
            await while_connected(receive, self._passed(send, scope["method"], url, headers, None))
            return
        # The body goes on as it comes, so that nothing large is held; who sends one hears of its end by that.
        headers += [(b"content-length", length.encode())] if length is not None else []
        await self._passed(send, scope["method"], url, headers, _body(receive))

    async def _passed(
        self,
        send: Send,
        method: str,
        url: str,
        headers: list[tuple[bytes, bytes]],
        content: AsyncIterator[bytes] | None,
    ) -> None:
        async with self._upstream.opened(method, url, headers, content) as opened:
            self.figures.request("other", opened.status)
            await send({"type": "http.response.start", "status": opened.status, "headers": opened.headers})
            await pass_on(send, opened.chunks())

    # ---- its own pages -------------------------------------------------------------------------

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        page = resources.files("smoothagent_gateway").joinpath("page.html").read_bytes()
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
        await respond(send, 200, page, headers)

    async def _state(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        told = json.dumps(self.figures.state()).encode()
        await respond(send, 200, told, {"content-type": "application/json", "cache-control": "no-store"})

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await respond(send, 200, self.figures.metrics(), {"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _offloaded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A page of an output that was offloaded, for whoever answers the agent's ``read_offloaded`` calls."""
        del receive
        store = self.settings.store
        if store is None:
            raise RefusedError(404, "this gateway's strategy offloads nothing", "no_store")
        asked = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode("latin-1")).items()}
        arguments: dict[str, Any] = {"ref": scope["path_params"]["ref"]}
        arguments |= {name: asked[name] for name in ("offset", "limit") if name in asked}
        text = ReadOffloaded(store).run(json.dumps(arguments))
        await respond(send, 200, text.encode("utf-8", "surrogatepass"), {"content-type": "text/plain; charset=utf-8"})


class Ways:
    """Which of three ways a request goes. By hand, since every piece of an answer would pass a framework's layers.

    Args:
        pages: the gateway's own.
        completions: chat completions.
        others: what passes through.
    """

    def __init__(self, pages: Any, completions: Handler, others: Handler) -> None:
        self._pages, self._completions, self._others = pages, completions, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path == OWN or path.startswith(f"{OWN}/"):
            await self._pages(scope, receive, send)
        elif path == "/v1/chat/completions" and scope["method"] == "POST":
            await self._completions(scope, receive, send)
        else:
            await self._others(scope, receive, send)


class Guard:
    """Who may come in: whoever has the token; without one, whoever is on this machine and means it.

    A web page that a user of this machine looks at can make their browser send requests here, under a name of its
    own that leads here: such a name is not this machine's.

    Args:
        settings: with the token, or none.
        app: what is guarded.
    """

    def __init__(self, settings: Settings, app: Any) -> None:
        self._app = app
        self._token = settings.token.encode() if settings.token else None
        self._local = self._token is None and is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "http":
            refused = self._refused(scope)
            if refused is not None:
                await refuse(send, refused)
                return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> RefusedError | None:
        if self._token is not None:
            if scope["path"] == OWN:
                return None  # the page holds nothing; what it shows it asks for with the token
            given = (header(scope, b"authorization") or "").encode("latin-1")
            kind, _, told = given.partition(b" ")
            if kind.lower() == b"bearer" and hmac.compare_digest(told.strip(), self._token):
                return None
            return RefusedError(
                401, "this gateway asks for its token: send 'Authorization: Bearer TOKEN' (as api_key)", "unauthorized"
            )
        if self._local and _host(header(scope, b"host") or "") not in LOOPBACK:
            return RefusedError(
                421,
                "this gateway answers to this machine's own names only: use 127.0.0.1, or start it with a token",
                "host",
            )
        return None


class _Endpoint:
    """A handler whose refusals are answers."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(event: Any) -> None:
            nonlocal begun
            begun = True
            await send(event)

        try:
            await self._handler(scope, receive, sending)
        except RefusedError as error:
            if not begun:
                await refuse(send, error)
        except (GoneError, BrokenError):
            return  # without an end the server breaks the connection off
        except Exception as error:
            log.exception("a request failed in the gateway")
            if not begun:
                await refuse(send, RefusedError(500, f"the gateway failed: {type(error).__name__}", "gateway_failed"))


def _host(value: str) -> str:
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].lower()


async def _body(receive: Receive) -> AsyncGenerator[bytes]:
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise GoneError
        if event.get("body"):
            yield event["body"]
        if not event.get("more_body", False):
            return
