"""The model calls of this process, for contexts: they have a history on its way to one, and are told of none."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, cast

from autogen_core.models import ChatCompletionClient, CreateResult, LLMMessage

from smoothagent import Delegation, MainRequest
from smoothagent.forks import after_fork
from smoothagent.harmless import harmless
from smoothagent.unseen import is_unseen
from smoothagent.wrap import wrap
from smoothagent_autogen.aside import inner_of
from smoothagent_autogen.models import OPENAI, speaks_chat

log = logging.getLogger("smoothagent")


class Asked(NamedTuple):
    """A call of a model client.

    Attributes:
        client: which one.
        messages: what is sent.
        call: the other arguments.
        streams: whether its answer comes in pieces.
    """

    client: ChatCompletionClient
    messages: Sequence[LLMMessage]
    call: Mapping[str, Any]
    streams: bool = False


class Watching(Protocol):
    """Whoever knows a call by the history in it."""

    def waits(self) -> bool:
        """Whether its call may still come."""
        ...

    def is_in(self, asked: Asked) -> bool:
        """Whether the call ends with its history."""
        ...

    def begins(self, asked: Asked, delegation: Delegation[LLMMessage] | None) -> MainRequest:
        """Its call is made; what marks, paces and measures it.

        Args:
            asked: the call.
            delegation: what was warmed for it, where it is a sub-agent's first; it goes on there.
        """
        ...


class Listening(Protocol):
    """Whoever hears what a call is answered."""

    def begins(self, asked: Asked) -> Ear | None:
        """A call is made; who hears its answer."""
        ...

    def started(self, asked: Asked) -> Delegation[LLMMessage] | None:
        """What was warmed for a call that is a sub-agent's first."""
        ...


class Ear(Protocol):
    """Hears one answer."""

    def piece(self, delta: Any) -> None:
        """A piece of a tool call has come."""
        ...


class Seen:
    """Sees the calls of all model clients of this process, for whoever has a history on its way to one.

    A context is told of no call, an agent and its context may each load a client of their own from one configuration,
    and clients are wrapped in others. So it is the classes' methods that tell: ``create`` and ``create_stream`` of
    every `ChatCompletionClient` there is. A call of nobody's passes through as it is.
    """

    def __init__(self) -> None:
        self._watching: weakref.WeakKeyDictionary[Watching, weakref.ref[Any] | None] = weakref.WeakKeyDictionary()
        self._listening: Listening | None = None
        self._said: set[str] = set()
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        # Reentrant: a garbage collection that ends a stream, and so tells us, may find it taken.
        self._lock = threading.RLock()

    def get_ready(self) -> None:
        """A history will be on its way to some client: whoever takes hold of a method before that has the right one."""
        with self._lock, harmless("a context's view"):
            _tell_of_calls()

    def watch(self, one: Watching) -> None:
        """Its history is on its way; it is the running task's that will call."""
        with self._lock:
            _tell_of_calls()
            self._watching[one] = _running_task()
        _given.set(weakref.ref(one))

    def listen(self, one: Listening) -> None:
        """Every call is told of."""
        with self._lock:
            _tell_of_calls()
            self._listening = one

    def forget(self, one: Watching) -> None:
        """It has none any more."""
        with self._lock:
            self._watching.pop(one, None)

    def listens(self) -> bool:
        """Whether a call that is made here may be somebody's."""
        return not is_unseen() and _inside.get() is None and bool(self._watching or self._listening is not None)

    def begin(self, asked: Asked | None) -> Call | None:
        """The call that is about to be made; None where it is nobody's. It must not fail."""
        if asked is None or not self.listens():
            return None
        try:
            ear = self._listening.begins(asked) if self._listening is not None else None
            delegation = self._listening.started(asked) if self._listening is not None else None
            one = self._known(asked)
            if one is not None:
                request = one.begins(asked, delegation)
            else:
                request = delegation.main_request() if delegation is not None else None
            return None if request is None and ear is None else Call(asked, request, ear)
        except Exception as error:
            kind = f"{type(asked.client).__name__} {type(error).__name__}"
            if kind not in self._said:
                self._said.add(kind)
                log.warning("calls of %s are not followed: %r", type(asked.client).__name__, error, exc_info=error)
            return None

    def _known(self, asked: Asked) -> Watching | None:
        if not self._watching:
            return None
        with self._lock:
            for gone in [one for one in self._watching if not one.waits()]:
                del self._watching[gone]
            known = [one for one in self._watching if one.is_in(asked)]
            given = _given.get()
            last = given() if given is not None else None
            if last not in known:
                # Histories of several agents look the same, such as one with nothing but the task. A context that a
                # task has asked which still runs is that task's; else its call may come from anywhere.
                known = [one for one in known if not _runs(self._watching[one])]
                last = known[0] if len(known) == 1 else None
            if last is not None:
                del self._watching[last]
            return last


SEEN = Seen()

_given: ContextVar[weakref.ref[Watching] | None] = ContextVar("smoothagent_autogen_given", default=None)
_inside: ContextVar[Call | None] = ContextVar("smoothagent_autogen_inside", default=None)


def _running_task() -> weakref.ref[Any] | None:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return None if task is None else weakref.ref(task)


def _runs(task: weakref.ref[Any] | None) -> bool:
    """Whether a task has not ended."""
    found = task() if task is not None else None
    return found is not None and not found.done()


def on_the_wire(asked: Asked) -> bool:
    """Whether a call's request is seen as the official client makes it."""
    if not speaks_chat(asked.client):
        return False
    own: dict[str, Any] = dict(getattr(inner_of(asked.client), "_create_args", None) or {})
    structured = any(isinstance(v, type) for v in (asked.call.get("json_output"), own.get("response_format")))
    # It makes those that stream a structured answer in a way of its own.
    return not (structured and asked.streams)


def tells_deltas(asked: Asked) -> bool:
    """Whether the calls of its answer are heard as they are written."""
    return asked.streams and on_the_wire(asked)


class Call:
    """A call that is somebody's.

    Args:
        asked: the call.
        request: marks, paces and measures it.
        ear: hears its answer.
    """

    def __init__(self, asked: Asked, request: MainRequest | None, ear: Ear | None) -> None:
        self._request = request
        self._on_the_wire = on_the_wire(asked)
        self._heard = _Heard(request, ear) if self._on_the_wire else None

    def client(self, openai: Any) -> Any:
        """The official client, which marks the request that it makes."""
        heard = self._heard
        return openai if heard is None else wrap(openai, lambda _: heard)

    @contextlib.asynccontextmanager
    async def around(self) -> AsyncGenerator[None]:
        """Where the request cannot be seen on the wire, the whole call is one."""
        if self._on_the_wire or self._request is None:
            yield
            return
        async with self._request:
            yield

    def said(self, piece: Any) -> None:
        """A piece of the answer, where only the client tells it."""
        if self._on_the_wire or self._request is None:
            return
        if isinstance(piece, str):
            self._request.text(piece)
        elif isinstance(piece, CreateResult):
            self._request.usage(piece.usage)

    @contextlib.contextmanager
    def within(self) -> Generator[None]:
        """What a client's own methods call is no other call."""
        token = _inside.set(self)
        try:
            yield
        finally:
            _inside.reset(token)


class _Silent:
    """The host of a call that only its ear is for."""

    def request_opens(self) -> None:
        """Nothing is waited for."""

    def request_may_block(self) -> bool:
        """Nothing is waited for."""
        return False

    def request_started(self) -> dict[str, Any]:
        """Nothing is marked."""
        return {}

    def request_first_token(self) -> None:
        """Nothing is paced."""

    def request_text(self, text: str) -> None:
        """Nothing follows it."""

    def request_usage(self, usage: Any) -> None:
        """Nothing is counted."""

    def request_done(self) -> None:
        """It is over."""


class _Heard(MainRequest):
    """A request whose tool calls are heard as they are written."""

    def __init__(self, request: MainRequest | None, ear: Ear | None) -> None:
        host = request._host if request is not None else _Silent()
        super().__init__(host, request)
        self._ear = ear

    def call(self, delta: Any) -> None:
        """A piece of a tool call."""
        if self._ear is not None:
            self._ear.piece(delta)


# ---- what tells of calls ---------------------------------------------------------------------------


def _tell_of_calls() -> None:
    """Let the methods of every class of model clients tell of their calls; what tells already is left alone."""
    classes: list[type[ChatCompletionClient]] = [ChatCompletionClient]
    for one in classes:
        classes += one.__subclasses__()
        for name, telling in (("create", _creating), ("create_stream", _streaming)):
            method = one.__dict__.get(name)
            if method is None or getattr(method, "__isabstractmethod__", False) or hasattr(method, "_smoothagent"):
                continue
            told = telling(method)
            told._smoothagent = True
            setattr(one, name, told)
    if OPENAI in sys.modules:
        base = importlib.import_module(OPENAI).BaseOpenAIChatCompletionClient
        if "_client" not in base.__dict__:
            base._client = property(_get_client, _set_client)


def _creating(own: Callable[..., Any]) -> Any:
    @functools.wraps(own)
    async def create(self: ChatCompletionClient, *args: Any, **kwargs: Any) -> Any:
        call = SEEN.begin(_asked(self, args, kwargs, streams=False))
        if call is None:
            return await own(self, *args, **kwargs)
        async with call.around():
            with call.within():
                result = await own(self, *args, **kwargs)
            call.said(result)
        return result

    return create


def _streaming(own: Callable[..., Any]) -> Any:
    @functools.wraps(own)
    def create_stream(self: ChatCompletionClient, *args: Any, **kwargs: Any) -> Any:
        pieces = own(self, *args, **kwargs)
        # Where nobody listens it is what it was, whatever that is.
        asked = _asked(self, args, kwargs, streams=True) if SEEN.listens() else None
        return pieces if asked is None else _followed(asked, pieces)

    return create_stream


_END = object()


async def _followed(asked: Asked, pieces: Any) -> AsyncGenerator[Any]:
    call, stream = SEEN.begin(asked), aiter(pieces)
    try:
        if call is None:
            async for piece in stream:
                yield piece
            return
        async with call.around():
            while True:
                # Whoever reads must not find himself inside of the call.
                with call.within():
                    piece = await anext(stream, _END)
                if piece is _END:
                    break
                call.said(piece)
                yield piece
    finally:
        if hasattr(stream, "aclose"):
            await stream.aclose()


def _asked(
    client: ChatCompletionClient, args: tuple[Any, ...], kwargs: dict[str, Any], *, streams: bool
) -> Asked | None:
    """A call, however its messages are passed; None where there are none."""
    messages = args[0] if args else kwargs.get("messages")
    if not isinstance(messages, (list, tuple)):
        return None
    call = {name: value for name, value in kwargs.items() if name != "messages"}
    return Asked(client, cast("Sequence[LLMMessage]", messages), call, streams)


def _get_client(self: Any) -> Any:
    try:
        openai = self.__dict__["_client"]
    except KeyError:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute '_client'") from None
    call = _inside.get()
    return openai if call is None or openai is None else call.client(openai)


def _set_client(self: Any, openai: Any) -> None:
    self.__dict__["_client"] = openai
