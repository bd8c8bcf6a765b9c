"""A context manager around the agent's own model call: marks, paces and measures it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import TracebackType
from typing import Any, Protocol, Self

from smoothagent.serving.backend import Backend, Stream, Usage
from smoothagent.waiting import wrapped

_ROUTE_WAIT = 1.0
"""Seconds a conversation's first request waits for the server to say what it is (else its KV lands anywhere), and the
first after a commit for its KV to be handed over."""


class RequestHost(Protocol):
    """What a main request tells its runtime."""

    def request_opens(self) -> concurrent.futures.Future[Any] | None:
        """It is about to be made; returns what to wait for, shortly, before it can be routed."""
        ...

    def request_may_block(self) -> bool:
        """Whether what `request_opens` returned gets done while the running loop is blocked."""
        ...

    def request_started(self) -> dict[str, Any]:
        """It is about to be sent; returns the extras for the call."""
        ...

    def request_first_token(self) -> None:
        """Its first token is there."""
        ...

    def request_text(self, text: str) -> None:
        """More of its answer's text is there."""
        ...

    def request_usage(self, usage: Usage) -> None:
        """Its token counts are known."""
        ...

    def request_done(self) -> None:
        """It has ended, one way or another."""
        ...


class MainRequest:
    """Use with ``with`` or ``async with`` around the call that answers the user.

    Attributes:
        extras: keyword arguments for the openai client's ``create`` (``extra_body`` …); merge them
            with your own.
    """

    def __init__(self, host: RequestHost, owner: object = None) -> None:
        self._host = host
        self._owner = owner  # must not be collected while its call runs
        self._first = False
        self.extras: dict[str, Any] = {}

    def first_token(self) -> None:
        """Tell that the first token has arrived; calling it again does nothing."""
        if not self._first:
            self._first = True
            self._host.request_first_token()

    def text(self, text: str) -> None:
        """Tell more of the answer's text as it streams: what the next prompt is known to hold is prefilled already."""
        if text:
            self.first_token()
            self._host.request_text(text)

    def call(self, delta: Any) -> None:
        """Tell a piece of a tool call as it streams; nothing is made of it here."""

    def usage(self, usage: Any) -> None:
        """Tell the final usage: an openai ``CompletionUsage``, a mapping, `Usage`, or None."""
        read = read_usage(usage)
        if read is not None:
            self._host.request_usage(read)

    def __enter__(self) -> Self:
        ready = self._host.request_opens()
        if ready is not None and (not _in_loop() or self._host.request_may_block()):
            concurrent.futures.wait([ready], _ROUTE_WAIT)
        return self._start()

    def _start(self) -> Self:
        self.extras = self._host.request_started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            # Without streaming nobody told: the answer is there, so its first token was.
            self.first_token()
        self._host.request_done()

    async def __aenter__(self) -> Self:
        ready = self._host.request_opens()
        if ready is not None:
            await asyncio.wait({wrapped(ready)}, timeout=_ROUTE_WAIT)
        return self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class Aside:
    """A call of the agent's that is not its conversation: a title, a classification.

    Lookahead gives way to it as to any request, and that is all: it has another prompt, so it is kept off the
    conversations' slots and not taken for the request that follows a commit.
    """

    def __init__(self, backend: Backend | None, session: str) -> None:
        self._backend, self._session = backend, f"{session}\0aside"

    def request_opens(self) -> None:
        """Nothing is waited for."""

    def request_may_block(self) -> bool:
        """Nothing is waited for."""
        return False

    def request_started(self) -> dict[str, Any]:
        """Lookahead gives way; the server is told where it does no harm."""
        if self._backend is None:
            return {}
        self._backend.main_arrived(self._session)
        return self._backend.route(self._session, Stream.ASIDE)

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        if self._backend is not None:
            self._backend.main_first_token(self._session)

    def request_text(self, text: str) -> None:
        """Is none of the conversation's."""

    def request_usage(self, usage: Usage) -> None:
        """Says nothing of the conversation."""

    def request_done(self) -> None:
        """It is over."""
        if self._backend is not None:
            self._backend.main_done(self._session)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def read_usage(usage: Any) -> Usage | None:
    """Token counts from whatever a client reports; None where there are none."""
    if usage is None or isinstance(usage, Usage):
        return usage
    prompt = _get(usage, "prompt_tokens")
    if not isinstance(prompt, int):
        return None
    details = _get(usage, "prompt_tokens_details")
    cached = _get(details, "cached_tokens") if details is not None else None
    completion = _get(usage, "completion_tokens")
    return Usage(prompt, completion if isinstance(completion, int) else 0, cached if isinstance(cached, int) else None)


def _get(source: Any, key: str) -> Any:
    return source.get(key) if isinstance(source, dict) else getattr(source, key, None)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
