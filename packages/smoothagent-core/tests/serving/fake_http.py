"""The one seam of these tests: an HTTP transport that answers in-process, so that no test needs a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai import AsyncOpenAI

BASE = "http://fake:8080/v1"


@dataclass
class Seen:
    """One request the server got, and whether its client stayed to the end."""

    method: str
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    ended: bool = False
    broken: bool = False


class Events(httpx2.AsyncByteStream):
    """Server-sent events; closing the stream stops the generator, as a closed connection stops a server."""

    def __init__(self, events: AsyncGenerator[Mapping[str, Any]], seen: Seen) -> None:
        self._events = events
        self._seen = seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
        self._seen.ended = True

    async def aclose(self) -> None:
        self._seen.broken = not self._seen.ended
        await self._events.aclose()


Reply = tuple[int, Any] | AsyncGenerator[Mapping[str, Any]]


@dataclass
class FakeServer(httpx2.AsyncBaseTransport):
    """Answers by method and path; `faults` come first, one a request to that path.

    A fault is a status with a body, an exception to raise, or ``"hang"``.
    """

    seen: list[Seen] = field(default_factory=list[Seen])
    faults: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    headers: dict[str, str] = field(default_factory=dict[str, str])

    async def handle(self, seen: Seen) -> Reply:
        raise NotImplementedError

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        raw = await request.aread()
        path = request.url.path + (f"?{request.url.query.decode()}" if request.url.query else "")
        seen = Seen(request.method, path, json.loads(raw) if raw else {}, dict(request.headers))
        self.seen.append(seen)
        faults = self.faults.get(path, [])
        if faults:
            fault: Any = faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            if isinstance(fault, str):
                await asyncio.Event().wait()
                raise AssertionError("woken")
            status: int = fault[0]
            return _whole(status, fault[1], self.headers)
        try:
            reply = await self.handle(seen)
        except asyncio.CancelledError:
            seen.broken = True
            raise
        if isinstance(reply, tuple):
            seen.ended = True
            status, body = reply
            return _whole(status, body, {})
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Events(reply, seen))

    def client(self, base_url: str = BASE) -> AsyncOpenAI:
        """An openai client whose every request comes here."""
        http: Any = httpx2.AsyncClient(transport=self)  # older clients take these, too, and do not say so
        return AsyncOpenAI(base_url=base_url, api_key="x", http_client=http)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Bodies of all requests to a path."""
        return [s.body for s in self.seen if s.path == path]


def _whole(status: int, body: Any, headers: Mapping[str, str]) -> httpx2.Response:
    if isinstance(body, str):
        return httpx2.Response(status, text=body, headers=headers)
    return httpx2.Response(status, json=body, headers=headers)


Handler = Callable[[Seen], Reply]
