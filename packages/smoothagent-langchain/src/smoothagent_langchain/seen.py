"""The chat model calls of this process, for whoever has a history on its way to one."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, Self, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from smoothagent.forks import after_fork
from smoothagent.harmless import harmless
from smoothagent.unseen import is_unseen
from smoothagent_langchain.shape import Shape

_RUNS = 256
"""Calls that have not ended, as far as is known."""


class Watching(Protocol):
    """Whoever knows a call by the history in it."""

    def shape_in(
        self, messages: Sequence[BaseMessage], params: Mapping[str, Any], serialized: Mapping[str, Any] | None
    ) -> Shape | None:
        """Where its history stands in a call; None where the call is none of its own."""
        ...

    def sent(self, shape: Shape) -> None:
        """Its call is made."""
        ...

    def answered(self, message: BaseMessage) -> None:
        """It has ended with ``message``."""
        ...


class Seen(BaseCallbackHandler):
    """Sees the chat model calls of this process, for whoever has a history on its way to one.

    A memory and its model may run in different contexts (steps of a runnable sequence, nodes of a graph), so nothing
    that is set in one would be found in the other.
    """

    run_inline = True

    def __init__(self) -> None:
        self._watching: weakref.WeakSet[Watching] = weakref.WeakSet()
        self._runs: OrderedDict[UUID, weakref.ref[Watching]] = OrderedDict()
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """One a process, also in a copied callback manager."""
        return self

    def __reduce__(self) -> tuple[Callable[[], Seen], tuple[()]]:
        """The one of the process it is unpickled in."""
        return _the_one, ()

    def watch(self, one: Watching) -> None:
        """Its history is on its way."""
        with self._lock:
            self._watching.add(one)

    def forget(self, one: Watching) -> None:
        """It has none any more."""
        with self._lock:
            self._watching.discard(one)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """A model is called."""
        if is_unseen():
            return
        with self._lock:
            watching = list(self._watching)
        sent, params = messages[0] if messages else [], cast("dict[str, Any]", kwargs.get("invocation_params") or {})
        found: list[tuple[Watching, Shape]] = []
        for one in watching:
            with harmless("a chain's next prompt"):
                if (shape := one.shape_in(sent, params, serialized)) is not None:
                    found.append((one, shape))
        # Histories that begin alike ("hi"): whose call it is cannot be told, and one's prompt is none of the other's.
        if len(found) != 1:
            return
        [(one, shape)] = found
        with harmless("a chain's next prompt"):
            one.sent(shape)
        with self._lock:
            self._watching.discard(one)
            self._runs[run_id] = weakref.ref(one)
            while len(self._runs) > _RUNS:
                self._runs.popitem(last=False)  # a call that is cancelled tells no end

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """It has answered."""
        del kwargs
        with self._lock:
            run = self._runs.pop(run_id, None)
        one = run() if run is not None else None
        generations = response.generations[0] if response.generations else []
        message = getattr(generations[0], "message", None) if generations else None
        if one is not None and isinstance(message, BaseMessage):
            with harmless("a chain's next prompt"):
                one.answered(message)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has failed."""
        del error, kwargs
        with self._lock:
            self._runs.pop(run_id, None)


SEEN = Seen()


def _the_one() -> Seen:
    return SEEN


_in_every_context: ContextVar[Seen | None] = ContextVar("smoothagent_prompts", default=SEEN)
register_configure_hook(_in_every_context, inheritable=True)
