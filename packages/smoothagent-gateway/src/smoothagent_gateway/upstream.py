"""The model server's HTTP API, as it is reached from here.

aiohttp and not httpx, which the rest of the suite has: of a stream of many small pieces each costs a fifth of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from smoothagent_gateway.asgi import Headers, RefusedError
from smoothagent_gateway.credentials import NAMES
from smoothagent_gateway.settings import Settings

log = logging.getLogger("smoothagent.gateway")

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
"""Headers of one connection (RFC 9110, 7.6.1)."""
_OURS = frozenset({b"host", b"content-length", b"expect", b"x-smoothagent-session"})
"""Request headers that are made anew, or are for the gateway alone."""
_CONNECT_SECONDS = 10.0
_AT_ONCE_SECONDS = 0.25
"""Seconds within which a connection breaks that had been closed already."""
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

    def credentials(self, given: Mapping[str, str]) -> dict[str, str]:
        """What a client is let in with upstream, of what it has given here."""
        settings = self._settings
        if settings.api_key is not None:
            return {"Authorization": f"Bearer {settings.api_key}"}
        return {k: v for k, v in given.items() if settings.token is None or k != "Authorization"}

    def request_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """A client's headers as they go on: its connection's stay here, and so does the gateway's own token."""
        settings = self._settings
        # A client says which others are its connection's.
        named = {token.strip().lower() for k, v in headers if k == b"connection" for token in v.split(b",")}
        dropped = HOP_BY_HOP | _OURS | named
        if settings.token is not None or settings.api_key is not None:
            dropped |= {b"authorization"} if settings.api_key is None else set(NAMES)
        kept = [(k, v) for k, v in headers if k not in dropped]
        if settings.api_key is not None:
            kept.append((b"authorization", b"Bearer " + settings.api_key.encode()))
        return kept


class Opened:
    """A request that was sent, for as long as its answer is read.

    A POST whose connection is closed at once, before anything was answered, is sent once more: the server may have
    closed it at the moment it was used again, which its client would not have had. (aiohttp does so for the methods
    that may be repeated.)

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
        try:
            self._url = URL(url, encoded=True)
        except ValueError as error:
            raise RefusedError(400, "the request's path is none that could be asked for", "invalid_path") from error
        self._headers = [(k.decode("latin-1"), _text(v)) for k, v in headers]
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        try:
            try:
                self._response = await self._sent()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if not self._may_be_repeated(error, time.monotonic() - began):
                    raise
                self._response = await self._sent()
        except aiohttp.ClientConnectorError as error:
            raise RefusedError(
                502,
                f"the upstream {self._where} cannot be reached ({error.strerror or type(error).__name__}): start it, "
                "or pass its URL as --upstream",
                "upstream_unreachable",
            ) from error
        except TimeoutError as error:
            raise RefusedError(
                504,
                f"the upstream {self._where} took no connection within {_CONNECT_SECONDS:.0f} s",
                "upstream_timeout",
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # No more than the kind: what aiohttp says holds the request's headers.
            raise RefusedError(
                502,
                f"the upstream {self._where} broke off before it answered, or answered no HTTP "
                f"({type(error).__name__})",
                "upstream_broken",
            ) from error
        if not 100 <= self._response.status <= 599:
            raise RefusedError(
                502, f"the upstream {self._where} answered with the status {self._response.status}", "upstream_broken"
            )
        return self

    def _may_be_repeated(self, error: Exception, seconds: float) -> bool:
        """Whether the server has not begun to work on it."""
        if self._method != "POST" or not isinstance(self._content, bytes) or seconds > _AT_ONCE_SECONDS:
            return False
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return isinstance(error.message, str)  # else a part of an answer has come
        return not isinstance(error, aiohttp.ClientConnectorError)

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
            read = self._response.content.readany
            while chunk := await read():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            log.info("the upstream broke off in the middle of an answer: %s", type(error).__name__)
            raise BrokenError from error


def _text(value: bytes) -> str:
    """A header's value as aiohttp, which writes UTF-8, sends the same bytes; other bytes it cannot send."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
