"""How a chain makes its prompt of a memory's history, seen in its own calls, and the next one warmed ahead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from smoothagent import Backend, Prompt
from smoothagent.forks import after_fork
from smoothagent.lane import Lane, process_lane
from smoothagent_langchain.aside import AsideBackend, is_unseen
from smoothagent_langchain.codec import LangChainCodec, alike
from smoothagent_langchain.models import backend_for, name_of, to_wire_of
from smoothagent_langchain.watch import name_in, prompt_of

log = logging.getLogger("smoothagent")

_WATCHED = 60.0
"""Seconds after which a call is not taken any more for the one that a history was loaded for."""
_HELD = 120.0
"""Seconds for which what was warmed is held for a chain."""

History = str | list[BaseMessage]
"""What a memory gives to its chain: a text, or messages."""


@dataclass(frozen=True)
class Shape:
    """Where in a prompt the history stands.

    Attributes:
        before: messages before it.
        message: the one whose text holds it; None where it is messages of its own.
        text: what stands before it in that text.
        prompt: what else shapes the tokens.
    """

    before: tuple[BaseMessage, ...]
    message: BaseMessage | None
    text: str
    prompt: Prompt

    def opening(self, history: History) -> list[BaseMessage]:
        """What a prompt with this history begins with, whatever the user asks next."""
        if isinstance(history, str):
            if self.message is None:
                return list(self.before)
            return [*self.before, self.message.model_copy(update={"content": self.text + history})]
        return [*self.before, *(history if self.message is None else ())]


def shape_of(sent: Sequence[BaseMessage], history: History, prompt: Prompt) -> Shape | None:
    """Where ``history`` stands in what was sent; None where it does not, or in several places."""
    if not history:
        return None
    found: list[Shape] = []
    if isinstance(history, str):
        for i, message in enumerate(sent):
            if isinstance(message.content, str) and message.content.count(history):
                found += [Shape(tuple(sent[:i]), message, message.content.partition(history)[0], prompt)]
                found *= message.content.count(history)
    else:
        for i in range(len(sent) - len(history) + 1):
            if all(map(alike, sent[i : i + len(history)], history)):
                found.append(Shape(tuple(sent[:i]), None, "", prompt))
    return found[0] if len(found) == 1 else None


class Upcoming:
    """The next prompt of one memory's chain: what is certain of it is prefilled before the user has spoken.

    A chain tells its memory nothing of its prompt, so it is looked at as it is sent: a callback handler that all
    models of the process find (see `_Seen`) knows the call by the history in it.

    Args:
        lane: where it is done.
        heard: called with each answer to such a call.
    """

    def __init__(self, lane: Lane | None = None, *, heard: Callable[[BaseMessage], None] | None = None) -> None:
        self._lane, self._heard = lane or process_lane(), heard
        self._session = uuid.uuid4().hex
        self._model: BaseChatModel | None = None
        self._backend: Backend | None = None
        self._codec = LangChainCodec()
        self._history: History = ""
        self._shape: Shape | None = None
        self._future: concurrent.futures.Future[None] | None = None
        self._letting_go: concurrent.futures.Future[None] | None = None
        self._off = False
        self._watched_at = 0.0
        after_fork(self._start_afresh)
        self._said: set[str] = set()
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied memory has a chain of its own to see."""
        return type(self)()

    def __reduce__(self) -> tuple[Callable[[], Upcoming], tuple[()]]:
        """Nothing of it is kept: another process sees its own calls."""
        return Upcoming, ()

    def __eq__(self, other: object) -> bool:
        """Two memories are equal whatever is being warmed for them."""
        return isinstance(other, Upcoming)

    __hash__ = object.__hash__

    def _start_afresh(self) -> None:
        """In a forked child nothing is being warmed."""
        self._future = self._letting_go = None

    @property
    def lane(self) -> Lane:
        """Where work runs ahead."""
        return self._lane

    def watch(self, history: History, model: object, *, warm: bool | None) -> None:
        """The chain is about to send ``history``; ``model`` is the one it will send it to, as far as is known."""
        with _harmless():
            self._watch(history, model, warm=warm)

    def _watch(self, history: History, model: object, *, warm: bool | None) -> None:
        if isinstance(model, BaseChatModel) and model is not self._model:
            self._model, self._shape = model, None
            self._backend = backend_for(model, warm=warm)
            # Where nothing is prefilled the calls need not be looked at.
            self._off = isinstance(self._backend, AsideBackend) and not self._backend.prefills
            self._codec = LangChainCodec(to_wire_of(model))
            weakref.finalize(self, self._lane.later, self._backend.release, self._session).atexit = False
        self._history = list(history) if isinstance(history, list) else history
        self._watched_at = time.monotonic()
        if self._backend is not None and not self._off:
            _SEEN.watch(self)

    def expect(self, history: History) -> None:
        """The chain's next prompt will hold ``history``."""
        shape, backend = self._shape, self._backend
        if self._off:
            return
        if shape is None or backend is None:
            self._say_why(backend)
            return
        with _harmless():
            opening = shape.opening(history)
            self.stop()
            self._future = self._lane.spawn(self._warm(backend, opening, shape.prompt))

    def stop(self) -> None:
        """Nothing more is warmed; what is warm is held on for a while."""
        if self._future is not None:
            self._future.cancel()

    def forget(self) -> None:
        """The conversation is over."""
        _SEEN.forget(self)
        self.stop()
        if self._backend is not None:
            self._lane.call(self._backend.release, self._session)

    def say_once(self, topic: str, text: str) -> None:
        """Tell, once a memory and topic."""
        if topic not in self._said:
            self._said.add(topic)
            log.info("memory %s: %s", self._session, text)

    def _say_why(self, backend: Backend | None) -> None:
        self._calls += 1
        if backend is None:
            self.say_once(
                "model", "nothing is warmed: the memory does not know the chain's chat model; give it as llm=…"
            )
        elif self._calls > 1:
            self.say_once(
                "seen",
                "nothing is warmed: no call of the memory's llm was seen that holds its history once",
            )

    async def _warm(self, backend: Backend, opening: Sequence[BaseMessage], prompt: Prompt) -> None:
        if self._letting_go is not None:
            self._letting_go.cancel()
        try:
            if not (await backend.caps()).prefill:
                self._off = True
                self.say_once("prefill", "nothing is warmed: the model's server is not known to keep prefixes")
                return
            await backend.prefill(self._session, [self._codec.wire(message) for message in opening], prompt)
        except Exception as error:  # whatever it was, the next call is as cold as without us
            self.say_once("warming", f"warming failed, the next call is cold: {error!r}")
        finally:
            if self._letting_go is not None:
                self._letting_go.cancel()  # of one that was stopped, and ended later than this one began
            self._letting_go = self._lane.spawn(self._let_go(backend))

    async def _let_go(self, backend: Backend) -> None:
        """Lease what is warm to nobody else for a while; a conversation that rests holds no slot."""
        await asyncio.sleep(_HELD)
        backend.release(self._session)

    # ---- what the handler sees -----------------------------------------------------------------

    def is_sent(self, messages: Sequence[BaseMessage], params: Mapping[str, Any], model: str) -> bool:
        """Whether a call is the chain's, with the history; ``model`` is what the model says of itself."""
        if self._model is None or time.monotonic() > self._watched_at + _WATCHED:
            return False
        name, called = name_of(self._model), name_in(params)
        if name is not None and called is not None and name != called:
            return False
        # Another server's model of the same name says so, if it was given its URL.
        own = str(getattr(self._model, "openai_api_base", None) or "")
        if own and own not in model:
            return False
        return shape_of(messages, self._history, prompt_of(params)) is not None

    def sent(self, messages: Sequence[BaseMessage], params: Mapping[str, Any]) -> None:
        """The chain has called its model."""
        self._shape = shape_of(messages, self._history, prompt_of(params))
        self.stop()
        _SEEN.forget(self)

    def answered(self, message: BaseMessage) -> None:
        """It has ended with ``message``."""
        if self._heard is not None:
            self._lane.call(self._heard, message)


class _Seen(BaseCallbackHandler):
    """Sees the chat model calls of this process, for whoever has a history on its way to one.

    A memory and its model may run in different contexts (steps of a runnable sequence, nodes of a graph), so nothing
    that is set in one would be found in the other.
    """

    run_inline = True

    def __init__(self) -> None:
        self._watching: weakref.WeakSet[Upcoming] = weakref.WeakSet()
        self._runs: OrderedDict[UUID, weakref.WeakSet[Upcoming]] = OrderedDict()
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """One a process, also in a copied callback manager."""
        return self

    def __reduce__(self) -> tuple[Callable[[], _Seen], tuple[()]]:
        """The one of the process it is unpickled in."""
        return _seen, ()

    def watch(self, upcoming: Upcoming) -> None:
        """Its history is on its way."""
        with self._lock:
            self._watching.add(upcoming)

    def forget(self, upcoming: Upcoming) -> None:
        """It has none any more."""
        with self._lock:
            self._watching.discard(upcoming)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """A model is called."""
        if is_unseen():
            return
        with self._lock:
            watching = list(self._watching)
        sent, params = messages[0] if messages else [], cast("dict[str, Any]", kwargs.get("invocation_params") or {})
        found = [upcoming for upcoming in watching if _is_of(upcoming, sent, params, str(serialized))]
        # Histories that begin alike ("hi"): whose call it is cannot be told, and one's prompt is none of the other's.
        if len(found) == 1 and _learned(found[0], sent, params):
            with self._lock:
                # A call that is cancelled tells no end.
                self._runs[run_id] = weakref.WeakSet(found)
                while len(self._runs) > _RUNS:
                    self._runs.popitem(last=False)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """It has answered."""
        del kwargs
        with self._lock:
            found = self._runs.pop(run_id, None)
        generations = response.generations[0] if response.generations else []
        message = getattr(generations[0], "message", None) if generations else None
        if isinstance(message, BaseMessage):
            for upcoming in list(found or ()):
                with _harmless():
                    upcoming.answered(message)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has failed."""
        del error, kwargs
        with self._lock:
            self._runs.pop(run_id, None)


def _is_of(upcoming: Upcoming, sent: Sequence[BaseMessage], params: Mapping[str, Any], model: str) -> bool:
    with _harmless():
        return upcoming.is_sent(sent, params, model)
    return False


def _learned(upcoming: Upcoming, sent: Sequence[BaseMessage], params: Mapping[str, Any]) -> bool:
    with _harmless():
        upcoming.sent(sent, params)
        return True
    return False


@contextlib.contextmanager
def _harmless() -> Generator[None]:
    """Whatever goes wrong, the chain goes on as without us."""
    try:
        yield
    except Exception as error:
        log.warning("a chain's next prompt is not warmed: %r", error, exc_info=error)


_RUNS = 256
"""Calls that have not ended, as far as is known."""


_SEEN = _Seen()


def _seen() -> _Seen:
    return _SEEN


_in_every_context: ContextVar[_Seen | None] = ContextVar("smoothagent_prompts", default=_SEEN)
register_configure_hook(_in_every_context, inheritable=True)
