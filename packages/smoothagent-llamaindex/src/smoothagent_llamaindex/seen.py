"""The LLM calls of this process, for memories: they have a history on its way to one, and are told of none."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatInProgressEvent, LLMChatStartEvent
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms import LLM
from llama_index_instrumentation import get_dispatcher

from smoothagent import Prompt
from smoothagent.forks import after_fork
from smoothagent.harmless import harmless
from smoothagent.unseen import is_unseen

_CALLS = 256
"""Calls that have not ended, as far as is known."""


class Shape(NamedTuple):
    """Where in a call a history stands.

    Attributes:
        llm: whose call.
        before: the messages before it.
        prompt: what else shapes the tokens.
        params: the call's arguments besides its messages.
    """

    llm: LLM
    before: list[ChatMessage]
    prompt: Prompt
    params: Mapping[str, Any]

    def opening(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """What a call with this history begins with, whatever the user asks next."""
        return [*self.before, *history]


class Watching(Protocol):
    """Whoever knows a call by the history in it."""

    def shape_in(self, llm: LLM, messages: Sequence[ChatMessage], params: Mapping[str, Any]) -> Shape | None:
        """Where its history stands in a call; None where the call is none of its own."""
        ...

    def waits(self) -> bool:
        """Whether its call may still come."""
        ...

    def sent(self, shape: Shape) -> None:
        """Its call is made."""
        ...

    def first_token(self) -> None:
        """It is being answered."""
        ...

    def ended(self, answer: ChatMessage | None) -> None:
        """It has ended, with an answer or without."""
        ...


class Seen:
    """Sees the chat calls of this process, for whoever has a history on its way to one.

    A memory and the LLM may run in different contexts (steps of a workflow), so nothing that is set in one would be
    found in the other. LlamaIndex's events say what is called, and its spans by whom.
    """

    def __init__(self) -> None:
        self._watching: weakref.WeakSet[Watching] = weakref.WeakSet()
        self._llms: OrderedDict[str, weakref.ref[LLM]] = OrderedDict()
        self._calls: OrderedDict[str, weakref.ref[Watching]] = OrderedDict()
        self._installed = False
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        # Reentrant: a garbage collection that ends a stream, and so tells us, may find it taken.
        self._lock = threading.RLock()

    def watch(self, one: Watching) -> None:
        """Its history is on its way."""
        with self._lock:
            if not self._installed:
                root = get_dispatcher("root")
                root.add_span_handler(_Spans())
                root.add_event_handler(_Events())
                self._installed = True
            self._watching.add(one)

    def forget(self, one: Watching) -> None:
        """It has none any more."""
        with self._lock:
            self._watching.discard(one)

    # ---- what LlamaIndex tells -----------------------------------------------------------------

    def entered(self, span: str, llm: LLM) -> None:
        """A method of an LLM's is called."""
        if not self._watching:
            return
        with self._lock:
            self._llms[span] = weakref.ref(llm)
            while len(self._llms) > _CALLS:
                self._llms.popitem(last=False)

    def left(self, span: str, *, failed: bool) -> None:
        """It has returned, which for a stream is only its beginning, or raised."""
        if span in self._llms:
            with self._lock:
                self._llms.pop(span, None)
        if failed:
            self.over(span, None)

    def began(self, event: LLMChatStartEvent) -> None:
        """A model is called."""
        span = event.span_id
        if not self._watching or span is None or is_unseen():
            return
        with self._lock:
            found, watching = self._llms.get(span), [one for one in self._watching if one.waits()]
            self._watching = weakref.WeakSet(watching)
        llm = found() if found is not None else None
        if llm is None:
            return
        known: list[tuple[Watching, Shape]] = []
        for one in watching:
            with harmless("a memory's next prompt"):
                if (shape := one.shape_in(llm, event.messages, event.additional_kwargs)) is not None:
                    known.append((one, shape))
        # Histories that begin alike ("hi"): whose call it is cannot be told, and one's prompt is none of the other's.
        if len(known) != 1:
            return
        [(one, shape)] = known
        with self._lock:
            self._watching.discard(one)
            self._calls[span] = weakref.ref(one)
            while len(self._calls) > _CALLS:
                self._calls.popitem(last=False)
        with harmless("a memory's next prompt"):
            one.sent(shape)

    def goes_on(self, span: str | None) -> None:
        """A piece of its answer is there."""
        called = self._calls.get(span) if span is not None else None
        one = called() if called is not None else None
        if one is not None:
            with harmless("a memory's next prompt"):
                one.first_token()

    def over(self, span: str | None, response: ChatResponse | None) -> None:
        """It has ended."""
        if span is None or span not in self._calls:
            return
        with self._lock:
            called = self._calls.pop(span, None)
        one = called() if called is not None else None
        if one is not None:
            with harmless("a memory's next prompt"):
                one.ended(None if response is None else response.message)


SEEN = Seen()


class _Events(BaseEventHandler):
    @classmethod
    def class_name(cls) -> str:
        return "SmoothAgentEvents"

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            SEEN.began(event)
        elif isinstance(event, LLMChatInProgressEvent):
            SEEN.goes_on(event.span_id)
        elif isinstance(event, LLMChatEndEvent):
            SEEN.over(event.span_id, event.response)
        elif isinstance(event, ExceptionEvent):
            SEEN.over(event.span_id, None)


class _Spans(BaseSpanHandler[Any]):
    @classmethod
    def class_name(cls) -> str:
        return "SmoothAgentSpans"

    def span_enter(self, id_: str, *_: Any, instance: Any | None = None, **__: Any) -> None:
        if isinstance(instance, LLM):
            SEEN.entered(id_, instance)

    def span_exit(self, id_: str, *_: Any, **__: Any) -> None:
        SEEN.left(id_, failed=False)

    def span_drop(self, id_: str, *_: Any, **__: Any) -> None:
        SEEN.left(id_, failed=True)

    def new_span(self, *_: Any, **__: Any) -> None:
        return None

    def prepare_to_exit_span(self, *_: Any, **__: Any) -> None:
        return None

    def prepare_to_drop_span(self, *_: Any, **__: Any) -> None:
        return None
