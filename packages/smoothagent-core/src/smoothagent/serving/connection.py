"""JSON over HTTP to one model server, on the official openai client, with this package's errors."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

import openai
from openai import AsyncOpenAI, AsyncStream
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from smoothagent.errors import (
    BackendError,
    BackendProtocolError,
    BackendRefusedError,
    BackendUnreachableError,
    ConfigurationError,
    PromptTooLongError,
    RateLimitedError,
)
from smoothagent.waiting import wrapped

T = TypeVar("T")

_CLOSE_WITHIN = 5.0
"""Seconds that closing a client on another loop may take."""
LONGEST_PAUSE = 300.0
"""Seconds; the most that background calls are suspended after a 429 without ``Retry-After``."""

DROPS = frozenset({"RemoteProtocolError", "ReadError", "WriteError", "CloseError"})
"""What httpx and httpx2 call a connection that broke, as against one that was never made."""

TOO_LONG = re.compile(
    r"exceed_context_size|context[_ ](length|size|window)|maximum context|longer than the model|prompt is too long",
    re.IGNORECASE,
)
AGENT_MARKED = re.compile(r"^https://([a-z0-9-]+\.)*githubcopilot\.com(/|$)", re.IGNORECASE)
MODEL_MISSING = re.compile(r"model.{0,200}(not exist|not found|unknown)|model_not_found", re.IGNORECASE | re.DOTALL)


_sent_with: ContextVar[Mapping[str, str]] = ContextVar("smoothagent_sent_with", default=MappingProxyType({}))


@contextlib.contextmanager
def sent_with(headers: Mapping[str, str]) -> Generator[None]:
    """What is asked inside, and in tasks begun there, has these headers too: whose it is, where one serves several."""
    token = _sent_with.set(headers)
    try:
        yield
    finally:
        _sent_with.reset(token)


class DroppedError(BackendUnreachableError):
    """The connection broke before the server answered anything; such a request is sent once more."""


class Connection:
    """One server at one base URL.

    Background calls stop at the first 429 and are refused here, without asking the server, until the
    time it named (or 2, 4, 8 … seconds) is over.

    Args:
        base_url: the API's URL, ending in ``/v1`` for all servers we know.
        client: a client to use instead of an own one; bound to the loop it was first used on, never closed here.
        api_key: for the own client.
        timeout: seconds a request may take, and between two events of a stream.
        headers: sent with every request.
    """

    def __init__(
        self,
        base_url: str | None,
        client: AsyncOpenAI | None,
        api_key: str,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if base_url is None and client is None:
            raise ConfigurationError(
                "OpenAIBackend needs a server: pass base_url='http://host:port/v1' or client=AsyncOpenAI(...)"
            )
        if timeout <= 0:
            raise ConfigurationError(f"timeout must be positive seconds, not {timeout!r}")
        self.base_url = str(base_url if client is None else client.base_url).rstrip("/")
        self.root = self.base_url.removesuffix("/v1")
        self.timeout = timeout
        self.close_each = False
        """Send ``Connection: close``: the server drops kept-alive connections."""
        # copilot-cli#2068: the one API known to tell an agent's own requests from its user's.
        own = {"X-Initiator": "agent"} if AGENT_MARKED.search(self.base_url) else {}
        self._headers = {**own, **(headers or {})}
        self._api_key = api_key
        self._given = client
        self._own: dict[asyncio.AbstractEventLoop, AsyncOpenAI] = {}
        if client is None:
            # One that is dropped without `aclose` must not leave connections open.
            weakref.finalize(self, _let_go, self._own).atexit = False
        self._suspended_until = float("-inf")
        self._strikes = 0

    # -- calls -----------------------------------------------------------------------------

    async def get(self, path: str, *, timeout: float | None = None) -> object:
        """GET ``path``; JSON is parsed, other bodies come as text."""

        async def call() -> object:
            return await self._open().get(self._url(path), cast_to=object, options=self._options())

        return await self._whole("GET", path, call, timeout)

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout: float | None = None, background: bool = True
    ) -> Mapping[str, Any]:
        """POST JSON and return the JSON object that answers.

        Raises:
            BackendError: as the error tree tells; `RateLimitedError` also while background calls are suspended.
        """
        if background:
            self._check_suspended()

        async def call() -> object:
            try:
                return await send(dict(body))
            except UnicodeEncodeError:
                return await send(sendable(body))

        async def send(body: object) -> object:
            return await self._open().post(self._url(path), body=body, cast_to=object, options=self._options())

        answer = await self._whole("POST", path, call, timeout)
        self._strikes = 0
        return expect_object(answer, f"POST {self._url(path, shown=True)}")

    async def post_quietly(self, path: str, body: Mapping[str, Any]) -> None:
        """POST for its effect; whatever is answered, text or an error, is of no interest."""
        with contextlib.suppress(BackendError):
            await self._whole(
                "POST",
                path,
                lambda: self._open().post(self._url(path), body=dict(body), cast_to=object, options=self._options()),
                None,
            )

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], *, background: bool = True
    ) -> AsyncGenerator[AsyncIterator[Mapping[str, Any]]]:
        """POST and read server-sent events; leaving the block closes the connection, which stops the request."""
        if background:
            self._check_suspended()

        async def call() -> AsyncStream[object]:
            try:
                return await send({**body, "stream": True})
            except UnicodeEncodeError:
                return await send(sendable({**body, "stream": True}))

        async def send(body: object) -> AsyncStream[object]:
            return await self._open().post(
                self._url(path),
                body=body,
                cast_to=object,
                options=self._options(),
                stream=True,
                stream_cls=AsyncStream[object],
            )

        stream = await self._whole("POST", path, call, None)
        self._strikes = 0
        events = self._events(stream, path)
        try:
            yield events
        finally:
            await events.aclose()
            await stream.close()

    async def aclose(self) -> None:
        """Close the own clients, each on the loop it lives on; one that was given stays open."""
        clients = dict(self._own)
        self._own.clear()
        if self._given is not None:
            return
        for loop, client in clients.items():
            if loop is asyncio.get_running_loop():
                await client.close()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(client.close(), loop)
                await asyncio.wait({wrapped(closing)}, timeout=_CLOSE_WITHIN)

    def forget(self) -> None:
        """Leave open connections alone, as in a forked child."""
        self._own.clear()

    # -- inside ----------------------------------------------------------------------------

    def _open(self) -> AsyncOpenAI:
        # Connections belong to the loop they were made on; usually there is one, the lane's.
        loop = asyncio.get_running_loop()
        client = self._own.get(loop)
        if client is None:
            for gone in [known for known in self._own if known.is_closed()]:
                del self._own[gone]
            if self._given is not None:
                client = self._given.with_options(max_retries=0)
            else:
                client = AsyncOpenAI(base_url=self.base_url, api_key=self._api_key, max_retries=0, timeout=None)
            self._own[loop] = client
        return client

    def _url(self, path: str, *, shown: bool = False) -> str:
        """Paths with ``~`` in front stand at the server's root, beside ``/v1``."""
        if path.startswith("~"):
            return self.root + path[1:]
        return self.base_url + path if shown else path

    def _options(self) -> Any:
        headers = {**self._headers, **({"Connection": "close"} if self.close_each else {}), **_sent_with.get()}
        return {"headers": headers} if headers else {}

    async def _whole(self, method: str, path: str, call: Callable[[], Awaitable[T]], timeout: float | None) -> T:
        what = f"{method} {self._url(path, shown=True)}"

        async def once() -> T:
            try:
                async with asyncio.timeout(timeout or self.timeout):
                    return await call()
            except (openai.OpenAIError, TimeoutError, ValueError, RuntimeError) as error:
                self._translate(error, what, timeout or self.timeout)

        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(2), retry=retry_if_exception_type(DroppedError), reraise=True
        ):
            with attempt:
                return await once()
        raise AssertionError("tenacity reraises")

    async def _events(self, stream: AsyncStream[object], path: str) -> AsyncGenerator[Mapping[str, Any]]:
        what = f"POST {self._url(path, shown=True)}"
        iterator = aiter(stream)
        while True:
            try:
                async with asyncio.timeout(self.timeout):
                    event = await anext(iterator)
            except StopAsyncIteration:
                return
            except (openai.OpenAIError, TimeoutError, ValueError) as error:
                self._translate(error, what, self.timeout)
            yield expect_object(event, what)

    def _check_suspended(self) -> None:
        left = self._suspended_until - asyncio.get_running_loop().time()
        if left > 0:
            raise RateLimitedError(
                f"background calls to {self.base_url} are suspended for another {left:.0f} s: the server answered 429",
                retry_after=left,
            )

    def _suspend(self, retry_after: float | None) -> float:
        self._strikes += 1
        pause = min(LONGEST_PAUSE, 2.0**self._strikes) if retry_after is None else retry_after
        self._suspended_until = asyncio.get_running_loop().time() + pause
        return pause

    def _translate(self, error: Exception, what: str, timeout: float) -> NoReturn:
        match error:
            case BackendError():
                raise error
            case TimeoutError() | openai.APITimeoutError():
                raise BackendUnreachableError(
                    f"no answer to {what} within {timeout:.0f} s: the server hangs or is overloaded"
                ) from error
            case openai.APIConnectionError():
                cause = type(error.__cause__).__name__
                if cause in DROPS:
                    raise DroppedError(f"the connection broke during {what} ({cause})") from error
                raise BackendUnreachableError(
                    f"nothing answers at {self.base_url} ({what}: {error.__cause__ or error}). "
                    "Start the server or correct base_url."
                ) from error
            case openai.RateLimitError():
                after = retry_after(error.response.headers)
                pause = self._suspend(after)
                raise RateLimitedError(
                    f"{what} answered 429; background calls are suspended for {pause:.0f} s", retry_after=after
                ) from error
            case openai.APIStatusError():
                raise refusal(what, error.status_code, error.body, error.message) from error
            case RuntimeError():
                raise BackendUnreachableError(
                    f"{what} could not be made ({error}): was the client closed, or its event loop?"
                ) from error
            case openai.APIError():
                raise refusal(what, _code(error.body), error.body, error.message) from error
            case _:
                raise BackendProtocolError(
                    f"{what} did not answer in JSON ({error}); is this the right server?"
                ) from error


_closing: set[asyncio.Task[None]] = set()


def _let_go(clients: Mapping[asyncio.AbstractEventLoop, AsyncOpenAI]) -> None:
    """Close the clients of a connection that was dropped; called by the garbage collector, anywhere."""

    def close(client: AsyncOpenAI) -> None:
        task = asyncio.ensure_future(client.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    for loop, client in tuple(clients.items()):
        with contextlib.suppress(RuntimeError):  # closed
            if loop.is_running():
                loop.call_soon_threadsafe(close, client)


def refusal(what: str, status: int, body: object, message: str) -> BackendError:
    """The error for an answer with an error status, with the server's own words."""
    words = f"{message} {body if isinstance(body, str) else ''}"
    details: Mapping[str, Any] = cast("Mapping[str, Any]", body) if isinstance(body, Mapping) else {}
    if status in (400, 413, 422, 500) and TOO_LONG.search(f"{words} {details.get('type')}"):
        sizes = _sizes(details, words)
        return PromptTooLongError(
            f"{sizes} Lower the strategy's limits (hard, ceiling) or start the server with a larger context. It was "
            "refused",
            status=status,
            said=message,
        )
    return BackendRefusedError(f"{what} answered {status}", status=status, said=message[:500])


def _sizes(details: Mapping[str, Any], words: str) -> str:
    n, window = details.get("n_prompt_tokens"), details.get("n_ctx")
    if n is None or window is None:
        # "… maximum context length is 8192 tokens. However, you requested 9000 tokens": largest is the prompt.
        numbers = sorted({int(x) for x in re.findall(r"\b(\d{2,9})\b(?= tokens|\)| input|\.)", words)})
        if len(numbers) < 2:
            return "The prompt exceeds the server's context window."
        n, window = numbers[-1], numbers[0]
    return _exceeds(n, window)


def _exceeds(n: object, window: object) -> str:
    return f"The prompt of {n} tokens exceeds the server's context window of {window}."


def too_long(n: int, window: int) -> PromptTooLongError:
    """The error for a prompt that need not be sent to know that it is too long."""
    return PromptTooLongError(
        f"{_exceeds(n, window)} Lower the strategy's limits (hard, ceiling) or start the server with a larger context.",
        status=400,
    )


def _code(body: object) -> int:
    code = cast("Mapping[str, Any]", body).get("code") if isinstance(body, Mapping) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds a 429 asks to wait (``Retry-After`` as seconds or a date, ``retry-after-ms``), or None."""
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, float(headers["retry-after-ms"]) / 1000) if "retry-after-ms" in headers else _header(headers)
    return None


def _header(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        at = email.utils.parsedate_to_datetime(value)
        return max(0.0, (at - datetime.now(UTC)).total_seconds())


def sendable(value: object) -> object:
    """``value`` with lone surrogates replaced: JSON in UTF-8 cannot carry them, and no server accepts them."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {k: sendable(v) for k, v in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [sendable(v) for v in cast("list[object]", value)]
    return value


def expect_object(answer: object, what: str) -> Mapping[str, Any]:
    """``answer`` if it is a JSON object.

    Raises:
        BackendProtocolError: it is something else, such as a web page.
    """
    if isinstance(answer, Mapping):
        return cast("Mapping[str, Any]", answer)
    raise BackendProtocolError(
        f"{what} answered {type(answer).__name__} {str(answer)[:80]!r} where a JSON object was due; "
        "is this the right server?"
    )
