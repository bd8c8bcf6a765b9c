"""The model server's HTTP API, as it is reached from here.

aiohttp and not httpx, which the rest of the suite has: of a stream of many small pieces each costs a fifth of the time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from smoothagent_gateway.asgi import Headers, RefusedError
from smoothagent_gateway.settings import Settings

log = logging.getLogger("smoothagent.gateway")

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
"""Headers of one connection (RFC 9110, 7.6.1)."""
_OURS = frozenset({b"host", b"content-length", b"expect"})
"""Request headers that are made anew."""
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 4.0
"""Seconds that an unused connection is kept; uvicorn and others close theirs after five."""


class BrokenError(Exception):
    """An answer broke off after it had begun: the client has to see that, as it would without the gateway."""


class Upstream:
    """One client for all requests. An answer may take as long as its client waits.

    Args:
        settings: where it is.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def url(self, path: str, query: str = "") -> str:
        """Where a path of the gateway's lies upstream: ``/v1/…`` in the API, all else beside it."""
        base = self._settings.base + path.removeprefix("/v1") if path.startswith("/v1/") else self._settings.root + path
        return f"{base}?{query}" if query else base

    def opened(self, method: str, url: str, headers: Headers, content: bytes | AsyncIterator[bytes] | None) -> Opened:
        """A request; enter it to send it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                auto_decompress=False,
                read_bufsize=2**18,
                max_line_size=2**16,
                max_field_size=2**16,
                # What it would say of itself is the client's to say.
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return Opened(self._session, method, url, headers, content)

    def request_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """A client's headers as they go on: its connection's stay here, and so does the gateway's own token."""
        settings = self._settings
        # A client says which others are its connection's.
        named = {token.strip().lower() for k, v in headers if k == b"connection" for token in v.split(b",")}
        dropped = HOP_BY_HOP | _OURS | named
        if settings.token is not None or settings.api_key is not None:
            dropped |= {b"authorization"}
        kept = [(k, v) for k, v in headers if k not in dropped]
        if settings.api_key is not None:
            kept.append((b"authorization", b"Bearer " + settings.api_key.encode()))
        return kept


class Opened:
    """A request that was sent, for as long as its answer is read.

    One that breaks off before anything was answered is sent once more, where its body is still there: the server may
    have closed a connection at the moment it was used again, which its client would not have had.

    Raises, on entering:
        RefusedError: nothing answers there.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes | AsyncIterator[bytes] | None,
    ) -> None:
        self._session, self._method, self._content = session, method, content
        self._url = URL(url, encoded=True)
        self._headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers]
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> Self:
        try:
            try:
                self._response = await self._sent()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                again = not isinstance(error, aiohttp.ClientConnectorError)
                if not again or not (self._content is None or isinstance(self._content, bytes)):
                    raise
                self._response = await self._sent()
        except aiohttp.ClientConnectorError as error:
            raise RefusedError(
                502,
                f"the upstream {self._where} cannot be reached ({error.strerror or error}): start it, or pass its URL "
                "as --upstream",
                "upstream_unreachable",
            ) from error
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise RefusedError(
                504,
                f"the upstream {self._where} took no connection within {_CONNECT_SECONDS:.0f} s",
                "upstream_timeout",
            ) from error
        except aiohttp.InvalidURL as error:
            raise RefusedError(400, "the request's path is none that could be asked for", "invalid_path") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RefusedError(
                502, f"the upstream {self._where} broke off before it answered: {error!r}", "upstream_broken"
            ) from error
        return self

    async def _sent(self) -> aiohttp.ClientResponse:
        return await self._session.request(
            self._method, self._url, headers=self._headers, data=self._content, allow_redirects=False
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            # One that was read to its end has given its connection back; else this closes it, and the server stops.
            self._response.close()

    @property
    def _where(self) -> str:
        return str(self._url.origin())

    @property
    def status(self) -> int:
        """HTTP status."""
        assert self._response is not None
        return self._response.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The answer's headers, without those of the connection; names in lower case."""
        assert self._response is not None
        raw = [(k.lower(), v) for k, v in self._response.raw_headers]
        return [(k, v) for k, v in raw if k not in HOP_BY_HOP]

    def named(self, name: bytes) -> bytes | None:
        """One of them."""
        return next((v for k, v in self.headers if k == name), None)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The body as it comes, undecoded.

        Raises:
            BrokenError: it breaks off.
        """
        assert self._response is not None
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            log.info("the upstream broke off in the middle of an answer: %r", error)
            raise BrokenError from error
