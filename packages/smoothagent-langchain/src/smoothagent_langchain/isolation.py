"""Sub-agents whose first prompt is warm when they start: their system text and tools, and the task as it is written.

A sub-agent starts with a prompt of its own, which nothing of the parent's cache fits. What it will be is known early:
the same system text and tools as at the last delegation, and the task, which the parent's model is still writing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from uuid import UUID

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ToolCallRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.tracers.context import register_configure_hook

from smoothagent import Ledger
from smoothagent.delegation import Delegation
from smoothagent.jsonstream import FieldStream
from smoothagent.lane import process_lane
from smoothagent_langchain.chains import Shape, Upcoming
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.models import backend_for, to_wire_of

log = logging.getLogger("smoothagent")

_OPEN = 64
"""Calls that are being written, or have been and wait for their tool."""
_Key = tuple[UUID, int]


class _Known(NamedTuple):
    """How a kind of sub-agent was called last."""

    shape: Shape
    model: BaseChatModel


@dataclass
class _Opened:
    """A call that the model is writing.

    Attributes:
        kind: the sub-agent it is taken to be for.
        delegation: warms that one; None where nothing is known of its prompt.
        kinds: the part of the arguments that will say.
        text: the instruction so far.
        named: what they have said so far.
    """

    kind: str
    delegation: Delegation[BaseMessage] | None
    kinds: FieldStream | None
    instruction: FieldStream
    text: str = ""
    named: str = ""

    def cancel(self) -> None:
        """It is not delegated after all, or is over."""
        if self.delegation is not None:
            self.delegation.cancel()


class DelegationHooks:
    """What a middleware does around the model that delegates and the tool that starts the sub-agent. Mixed in.

    Attributes:
        delegates: name of the tool.
        instructs: the argument with the task.
        names: the argument that says which sub-agent; None where there is one.
        warm: prefill ahead; default yes, except at hosted endpoints.
        ledger: what was prefilled for sub-agents.
    """

    delegates: str = "task"
    instructs: str = "description"
    names: str | None = "subagent_type"
    warm: bool | None = None

    def _prepare_to_delegate(self, models: Mapping[str, BaseChatModel] | None = None) -> None:
        self.ledger = Ledger()
        self._models = dict(models or {})
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._last: str | None = None
        self._writing: OrderedDict[_Key, tuple[str, _Opened]] = OrderedDict()
        self._written: OrderedDict[str, _Opened] = OrderedDict()

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Listen to the calls that the model writes."""
        self._parents = request.model
        with _listening(self):
            return cast("Any", super()).wrap_model_call(request, handler)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        """Listen to the calls that the model writes."""
        self._parents = request.model
        with _listening(self):
            return await cast("Any", super()).awrap_model_call(request, handler)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Start the sub-agent, and look at how it is called."""
        if request.tool_call["name"] != self.delegates:
            return handler(request)
        with self._delegating(request):
            return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """Start the sub-agent, and look at how it is called."""
        if request.tool_call["name"] != self.delegates:
            return await handler(request)
        with self._delegating(request):
            return await handler(request)

    # ---- while the parent's model writes --------------------------------------------------------

    def begins(self, run: UUID, index: int, call: str | None) -> None:
        """A call of the tool begins; which sub-agent it is for is guessed until it says so."""
        with self._lock:
            kind = self._last
            known = self._known.get(kind) if kind is not None else None
            if kind is None or known is None or call is None:
                return  # nothing is known of its prompt yet
            kinds = FieldStream(self.names) if self.names is not None else None
            opened = _Opened(kind, self._delegation(known), kinds, FieldStream(self.instructs))
            self._writing[run, index] = (call, opened)
            while len(self._writing) > _OPEN:
                self._writing.popitem(last=False)[1][1].cancel()

    def writes(self, run: UUID, index: int, fragment: str) -> None:
        """More of its arguments is there."""
        with self._lock:
            found = self._writing.get((run, index))
            if found is None:
                return
            opened = found[1]
            if opened.kinds is not None:
                opened.named += opened.kinds.feed(fragment)
                if opened.kinds.complete and opened.named != opened.kind:
                    self._retarget(opened)
            text = opened.instruction.feed(fragment)
            if text:
                opened.text += text
                if opened.delegation is not None:
                    opened.delegation.feed(text)

    def has_written(self, run: UUID) -> None:
        """The answer is complete: its calls are known by their ids from now on."""
        with self._lock:
            for key in [key for key in self._writing if key[0] == run]:
                call, opened = self._writing.pop(key)
                self._written[call] = opened
            while len(self._written) > _OPEN:
                self._written.popitem(last=False)[1].cancel()

    def breaks_off(self, run: UUID) -> None:
        """The answer will not be complete."""
        with self._lock:
            for key in [key for key in self._writing if key[0] == run]:
                self._writing.pop(key)[1].cancel()

    def _retarget(self, opened: _Opened) -> None:
        """It is for another sub-agent than was guessed."""
        opened.cancel()
        opened.kind = opened.named
        known = self._known.get(opened.kind)
        opened.delegation = self._delegation(known) if known is not None else None
        if opened.delegation is not None and opened.text:
            opened.delegation.feed(opened.text)

    def _delegation(self, known: _Known) -> Delegation[BaseMessage]:
        return Delegation(
            backend=backend_for(known.model, warm=self.warm),
            codec=LangChainCodec(to_wire_of(known.model)),
            lane=process_lane(),
            ledger=self.ledger,
            prompt=known.shape.prompt,
            head=known.shape.before,
            instruction=HumanMessage,
        )

    # ---- when the sub-agent starts --------------------------------------------------------------

    @contextlib.contextmanager
    def _delegating(self, request: ToolCallRequest) -> Generator[None]:
        args, call = request.tool_call["args"], request.tool_call["id"]
        text = args.get(self.instructs)
        kind = str(args.get(self.names)) if self.names is not None else ""
        with self._lock:
            opened = self._written.pop(call, None) if call is not None else None
        if not isinstance(text, str) or not text:
            if opened is not None:
                opened.cancel()
            yield
            return
        upcoming = Upcoming()
        with contextlib.suppress(Exception):  # whatever it is, the sub-agent starts as without us
            if opened is not None and opened.delegation is not None and opened.kind == kind:
                opened.delegation.on_commit(text)
            upcoming.watch([HumanMessage(text)], self._model_of(kind), warm=self.warm)
        try:
            yield
        finally:
            if opened is not None:
                opened.cancel()
            self._learn(kind, upcoming)

    def _learn(self, kind: str, upcoming: Upcoming) -> None:
        shape, model = upcoming.shape, upcoming.model
        upcoming.forget()
        if shape is not None and model is not None:
            with self._lock:
                self._known[kind], self._last = _Known(shape, model), kind

    def _model_of(self, kind: str) -> BaseChatModel | None:
        return self._models.get(kind) or self._parents

    _parents: BaseChatModel | None = None
    """The delegating agent's own model, which sub-agents use where they have none of their own."""


class _PassingOn(AgentMiddleware[Any, Any, Any]):
    """A middleware that changes nothing."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """As it is."""
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """As it is."""
        return await handler(request)


class IsolationMiddleware(DelegationHooks, _PassingOn):
    """Warms the sub-agents that a tool starts, such as Deep Agents' ``task``; give it to the agent that delegates.

    From the second delegation to a sub-agent on its system text and tools are known, and are prefilled when the model
    begins to write the call; where the model streams, the task follows chunk by chunk. The sub-agent's own first call
    then finds all of that in the server's cache.

    Args:
        tool: name of the tool that starts a sub-agent.
        instruction: its argument that becomes the sub-agent's first message.
        agent: its argument that says which sub-agent; None where there is one.
        models: chat models of sub-agents that do not use the delegating agent's.
        warm: prefill ahead; default yes, except at hosted endpoints.
    """

    def __init__(
        self,
        *,
        tool: str = "task",
        instruction: str = "description",
        agent: str | None = "subagent_type",
        models: Mapping[str, BaseChatModel] | None = None,
        warm: bool | None = None,
    ) -> None:
        super().__init__()
        self.delegates, self.instructs, self.names, self.warm = tool, instruction, agent, warm
        self._prepare_to_delegate(models)


class _Listening(BaseCallbackHandler):
    """Hears the calls that the agent's model writes."""

    run_inline = True

    def __init__(self, hooks: DelegationHooks, outer: _Listening | None) -> None:
        self._hooks, self._outer = hooks, outer
        self._ours: set[tuple[UUID, int]] = set()

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A chunk of an answer."""
        if self._outer is not None:
            self._outer.on_llm_new_token(token, run_id=run_id, **kwargs)
        message = getattr(kwargs.get("chunk"), "message", None)
        if isinstance(message, AIMessageChunk):
            for chunk in message.tool_call_chunks:
                self._heard(run_id, chunk["index"] or 0, chunk["name"], chunk["id"], chunk["args"])

    def on_stream_event(self, event: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The same, in newer streams."""
        if self._outer is not None:
            self._outer.on_stream_event(event, run_id=run_id, **kwargs)
        fields = cast("Mapping[str, Any]", event if isinstance(event, Mapping) else {})
        index = fields.get("index") or 0
        part: Mapping[str, Any] = fields.get("content") or fields.get("delta") or {}
        if fields.get("event") == "content-block-start" and part.get("type") == "tool_call_chunk":
            self._heard(run_id, index, part.get("name"), part.get("id"), part.get("args"))
        elif fields.get("event") == "content-block-delta" and part.get("type") == "tool-call-delta":
            self._heard(run_id, index, None, None, part.get("args"))

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """An answer is complete."""
        if self._outer is not None:
            self._outer.on_llm_end(response, run_id=run_id, **kwargs)
        self._hooks.has_written(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """An answer broke off."""
        if self._outer is not None:
            self._outer.on_llm_error(error, run_id=run_id, **kwargs)
        self._hooks.breaks_off(run_id)

    def _heard(self, run: UUID, index: int, name: str | None, call: str | None, args: str | None) -> None:
        try:
            if name == self._hooks.delegates:
                self._ours.add((run, index))
                self._hooks.begins(run, index, call)
            if args and (run, index) in self._ours:
                self._hooks.writes(run, index, args)
        except Exception as error:  # it is only ahead of what comes anyway
            log.warning("a sub-agent is not warmed: %r", error, exc_info=error)
            self._ours.discard((run, index))


_ears: ContextVar[_Listening | None] = ContextVar("smoothagent_delegations", default=None)
register_configure_hook(_ears, inheritable=True)


@contextlib.contextmanager
def _listening(hooks: DelegationHooks) -> Generator[None]:
    token = _ears.set(_Listening(hooks, _ears.get()))
    try:
        yield
    finally:
        _ears.reset(token)
