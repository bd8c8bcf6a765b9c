"""What the gateway needs of ASGI below Starlette: bodies with a limit, answers, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any

Event = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""


class RefusedError(Exception):
    """A request that is answered here.

    Args:
        status: HTTP status.
        message: what was wrong, and what to do.
        code: the same in a word, for programs.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class GoneError(Exception):
    """The client has left."""


def header(scope: Scope, name: bytes) -> str | None:
    """A request's header; ``name`` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def path_of(scope: Scope) -> str:
    """A request's path as it was sent, escapes and all."""
    raw = scope.get("raw_path")
    return raw.decode("latin-1").partition("?")[0] if isinstance(raw, bytes) else str(scope["path"])


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A request's body.

    Raises:
        RefusedError: it has more than ``limit`` bytes.
        GoneError: the client has left before its end.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts, size = list[bytes](), 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise GoneError
        part = event.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not event.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RefusedError:
    return RefusedError(
        413,
        f"the request's body has more than {limit} bytes: start the gateway with a larger max_body_bytes",
        "too_large",
    )


async def respond(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A whole answer."""
    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: RefusedError) -> None:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "upstream_error"
    told = {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
    headers = {"content-type": "application/json"}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    await respond(send, error.status, json.dumps(told).encode(), headers)


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, None], *, after: asyncio.Event | None = None
) -> None:
    """Do ``work``, and cancel it when the client leaves.

    Args:
        receive: the request's.
        work: what is done.
        after: set when the request's body has been read, where ``work`` reads it.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive, after))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await doing


async def _left(receive: Receive, after: asyncio.Event | None) -> None:
    if after is not None:
        await after.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
