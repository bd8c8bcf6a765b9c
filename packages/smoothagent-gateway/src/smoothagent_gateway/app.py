"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
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

from smoothagent import (
    BackendError,
    ConfigurationError,
    Ledger,
    LookaheadRuntime,
    MainRequest,
    OpenAIBackend,
    ReadOffloaded,
)
from smoothagent.harmless import harmless
from smoothagent.lane import process_lane
from smoothagent.quoting import quote_nothing
from smoothagent.request import Aside
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
from smoothagent_gateway.credentials import AsClient
from smoothagent_gateway.figures import Figures
from smoothagent_gateway.records import Records
from smoothagent_gateway.sessions import Sessions, Space, Wire
from smoothagent_gateway.settings import Settings, is_loopback
from smoothagent_gateway.strategies import made_with
from smoothagent_gateway.summaries import Summaries
from smoothagent_gateway.upstream import BrokenError, Upstream

log = logging.getLogger("smoothagent.gateway")

OWN = "/smoothagent"
"""Where the gateway's own pages are; all else is the upstream's."""
_SWEEP_SECONDS = 10.0
"""Seconds between looks for what is idle."""
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
        quote_nothing()  # what is logged here is read by others than those who talk
        self._records = Records(settings.state, made_with(settings.strategy(), settings.base))
        self._upstream = Upstream(settings)
        # One for all: it shares out the server's slots, and all lookahead work gives way to every client's requests.
        self._backend = OpenAIBackend(
            settings.base,
            warm=settings.warm,
            dialect=settings.dialect,
            slots=settings.slots,
            lookahead_url=settings.lookahead_url,
        )
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
                Route(f"{OWN}/summary", _Endpoint(Summaries(settings, self._backend, self.sessions)), methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )
        completions = Completions(settings, self._upstream, self._backend, self.sessions, self.figures)
        refused = self.figures.request
        ways = Ways(
            pages,
            _Endpoint(self._counted(completions), lambda status: refused("completion", status)),
            _Endpoint(self._counted(self._pass_through), lambda status: refused("other", status)),
        )
        self.app: Handler = Guard(settings, ways)

    async def aclose(self) -> None:
        """End all conversations and connections, and write what is left."""
        self.sessions.close()
        await self._backend.aclose()
        await self._upstream.aclose()
        await asyncio.to_thread(self._records.close)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        # What kind of server it is takes a while to find out, the first time: not the first request's.
        process_lane().spawn(self._find_out())
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await self.aclose()

    async def _find_out(self) -> None:
        try:
            await AsClient(self._backend, self._upstream.credentials({})).caps()
        except BackendError:  # it may still be starting, or want a client's own key
            return
        except ConfigurationError as error:
            log.warning("nothing is prepared ahead: %s", error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            with harmless("a conversation that is over"):
                self.sessions.sweep()

    def _runtime(self, space: Space, name: str) -> LookaheadRuntime[Wire]:
        return LookaheadRuntime(
            self.settings.strategy,
            backend=AsClient(self._backend, space.credentials),
            session=name,
            lookahead=self.settings.lookahead,
            ledger=Ledger(parent=self.ledger),
        )

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
        work = scope["method"] == "POST"
        if length in (None, "0") and header(scope, b"transfer-encoding") is None:
            await while_connected(receive, self._passed(send, scope, url, headers, None, work=work))
            return
        # The body goes on as it comes, so that nothing large is held.
        headers += [(b"content-length", length.encode())] if length is not None else []
        after = asyncio.Event()
        body = _body(receive, after)
        await while_connected(receive, self._passed(send, scope, url, headers, body, work=work), after=after)

    async def _passed(
        self,
        send: Send,
        scope: Scope,
        url: str,
        headers: list[tuple[bytes, bytes]],
        content: AsyncIterator[bytes] | None,
        *,
        work: bool,
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            request: MainRequest | None = None
            if work:  # for the server; lookahead gives way to it
                aside = Aside(AsClient(self._backend, {}), "gateway")
                request = await stack.enter_async_context(MainRequest(aside))
            opened = await stack.enter_async_context(self._upstream.opened(scope["method"], url, headers, content))
            self.figures.request("other", opened.status)
            await send({"type": "http.response.start", "status": opened.status, "headers": opened.headers})
            await pass_on(send, _told(opened.chunks(), request))

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
        text = await asyncio.to_thread(ReadOffloaded(store).run, json.dumps(arguments))
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
        elif path.rstrip("/").endswith("/chat/completions") and scope["method"] == "POST":
            await self._completions(scope, receive, send)
        else:
            await self._others(scope, receive, send)


class Guard:
    """Who may come in: whoever has the token; without one, whoever is on this machine and means it.

    A web page that a user of this machine looks at can make their browser send requests here, which says whose page it
    is; or under a name of its own that leads here, which is none of this machine's.

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
        if not self._local:
            return None
        if not is_loopback(_host(header(scope, b"host") or "")):
            return RefusedError(
                421,
                "this gateway answers to this machine's own names only: use 127.0.0.1, or start it with a token",
                "host",
            )
        origin = header(scope, b"origin")
        of_another = origin is not None and not is_loopback(_host(origin.rpartition("//")[2]))
        if of_another or (origin is None and header(scope, b"sec-fetch-site") == "cross-site"):
            return RefusedError(
                403, "a web page of another site has sent this: start the gateway with a token to let it in", "origin"
            )
        return None


class _Endpoint:
    """A handler whose refusals are answers, and are counted."""

    def __init__(self, handler: Handler, refused: Callable[[int], None] | None = None) -> None:
        self._handler, self._refused = handler, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        def sending(event: Any) -> Awaitable[None]:  # no coroutine of its own: every piece of an answer passes it
            nonlocal begun
            begun = True
            return send(event)

        try:
            await self._handler(scope, receive, sending)
        except RefusedError as error:
            if not begun:
                await self._refuse(send, error)
        except (GoneError, BrokenError):
            return  # without an end the server breaks the connection off
        except Exception as error:
            log.exception("a request failed in the gateway")
            if not begun:
                failed = RefusedError(500, f"the gateway failed: {type(error).__name__}", "gateway_failed")
                await self._refuse(send, failed)

    async def _refuse(self, send: Send, error: RefusedError) -> None:
        if self._refused is not None:
            self._refused(error.status)
        await refuse(send, error)


def _host(value: str) -> str:
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].lower()


async def _body(receive: Receive, after: asyncio.Event) -> AsyncGenerator[bytes]:
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise GoneError
        if event.get("body"):
            yield event["body"]
        if not event.get("more_body", False):
            after.set()
            return


async def _told(chunks: AsyncGenerator[bytes], request: MainRequest | None) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if request is not None:
                request.first_token()
            yield chunk
