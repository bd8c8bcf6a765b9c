"""Sub-agents whose first prompt is warm when they start: their system text and tools, and the task as it is written.

A sub-agent starts with a prompt of its own, which nothing of the parent's cache fits. What it will be is known early:
the same system text and tools as at the last delegation, and the task, which the parent's model is still writing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast
from uuid import UUID

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ToolCallRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import ensure_config
from langchain_core.tracers.context import register_configure_hook

from smoothagent import Backend, Ledger, Prompt
from smoothagent.delegation import Delegation
from smoothagent.forks import after_fork
from smoothagent.jsonstream import FieldStream
from smoothagent.lane import process_lane
from smoothagent.waiting import wrapped
from smoothagent_langchain.aside import is_unseen
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.models import backend_for, given_for, name_of, same_model, to_wire_of
from smoothagent_langchain.routed import unrouted
from smoothagent_langchain.threads import graph_of
from smoothagent_langchain.watch import name_in, prompt_of

log = logging.getLogger("smoothagent")

_WAITING = 16
"""Calls that have been written and wait for their tool, of all conversations; what is older is given up."""
_KINDS, _MODELS = 64, 4
"""Kinds of sub-agents that are remembered, and models of each."""
_HANDING_OVER = 1.0
"""Seconds that a sub-agent waits for what a second server has warmed for it."""
_TALKS = 256
"""Conversations whose model is remembered from the model's node to the tools' node."""


class _Known(NamedTuple):
    """How a kind of sub-agent was called last.

    Attributes:
        model: its chat model.
        before: the system messages that stood before the task.
        prompt: what else shapes the tokens.
    """

    model: BaseChatModel
    before: tuple[BaseMessage, ...]
    prompt: Prompt


class _Opened:
    """A call that the model is writing: which sub-agent it is for, and the task so far.

    Args:
        hooks: know the sub-agents.
        model: the delegating agent's.
    """

    def __init__(self, hooks: DelegationHooks, model: BaseChatModel | None) -> None:
        self._hooks, self._model = hooks, model
        self._kinds = FieldStream(hooks.names) if hooks.names is not None else None
        self._instruction = FieldStream(hooks.instructs)
        self.call: str | None = None
        self.delivery: concurrent.futures.Future[Any] | None = None
        self.kind = hooks.last if hooks.names is not None else ""
        self.text = self._named = ""
        # Which one it is for is guessed until it says so.
        self.delegation = hooks.delegation(self.kind, model)

    def feed(self, fragment: str) -> None:
        """More of its arguments is there."""
        if self._kinds is not None:
            self._named += self._kinds.feed(fragment)
            if self._kinds.complete and self._named != self.kind:
                self.cancel()
                self.kind = self._named
                self.delegation = self._hooks.delegation(self.kind, self._model)
                if self.delegation is not None and self.text:
                    self.delegation.feed(self.text)
        text = self._instruction.feed(fragment)
        self.text += text
        if text and self.delegation is not None:
            self.delegation.feed(text)

    def cancel(self) -> None:
        """It is not delegated after all, or is over: nothing is held for it any more."""
        if self.delegation is not None:
            self.delegation.cancel()

    def starts(self, kind: str, text: str) -> None:
        """Its sub-agent is about to call its model.

        What is warm is warm, and stays in the cache without a lease. Only where it is on a second server it has to come
        first: ``delivery``; then the lease goes with the tool's end.
        """
        if self.delegation is not None and self.kind == kind and text.startswith(self.text):
            self.delegation.on_commit(text)
            self.delivery = self.delegation.request_opens()
        if self.delivery is None:
            self.cancel()

    def is_waited_for(self) -> None:
        """What has not come by now must not come in the middle of the sub-agent's work."""
        with _harmless():
            if self.delegation is not None:
                self.delegation.settle()


class DelegationHooks:
    """What a middleware does around the model that delegates and the tool that starts the sub-agent. Mixed in.

    Attributes:
        delegates: name of the tool.
        instructs: the argument with the task.
        names: the argument that says which sub-agent; None where there is one.
        warm: prefill ahead; default yes, except at hosted endpoints.
        last: the kind of sub-agent that was started last.
        ledger: what was prefilled for sub-agents.
    """

    delegates: str = "task"
    instructs: str = "description"
    names: str | None = "subagent_type"
    warm: bool | None = None
    last: str = ""

    def _prepare_to_delegate(
        self, models: Mapping[str, BaseChatModel] | None = None, backend: Backend | None = None
    ) -> None:
        self.ledger = Ledger()
        self._models, self._server = dict(models or {}), backend
        self._start_afresh()
        self._known: OrderedDict[str, list[_Known]] = OrderedDict()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._talks: OrderedDict[str, BaseChatModel | None] = OrderedDict()
        self._written: OrderedDict[tuple[str, str], _Opened] = OrderedDict()

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Listen to the calls that the model writes."""
        with self._listening(request):
            return cast("Any", super()).wrap_model_call(request, handler)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        """Listen to the calls that the model writes."""
        with self._listening(request):
            return await cast("Any", super()).awrap_model_call(request, handler)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Start the sub-agent, and look at how it is called."""
        with self._delegating(request) as opened:
            if opened is not None and opened.delivery is not None:
                concurrent.futures.wait([opened.delivery], _HANDING_OVER)
                opened.is_waited_for()
            return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """Start the sub-agent, and look at how it is called."""
        with self._delegating(request) as opened:
            if opened is not None and opened.delivery is not None:
                await asyncio.wait({wrapped(opened.delivery)}, timeout=_HANDING_OVER)
                opened.is_waited_for()
            return await handler(request)

    # ---- while the parent's model writes --------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self, request: ModelRequest[Any]) -> Generator[None]:
        talk, ear = None, None
        with _harmless():
            talk = _talk(_messages_of(getattr(request, "state", None)))
            model = unrouted(request.model) if isinstance(request.model, BaseChatModel) else None  # pyright: ignore[reportUnnecessaryIsInstance]
            with self._lock:
                if talk is not None:
                    _put(self._talks, talk, model, _TALKS)
                # The answer before this one is history: what it wrote and nobody started is not started any more.
                left = [self._written.pop(key) for key in list(self._written) if key[0] == talk]
            for opened in left:
                opened.cancel()
            ear = _Ear(self, talk, model, _ears.get())
        outer = _ears.set(ear or _ears.get())
        try:
            yield
        finally:
            _ears.reset(outer)
            with _harmless():
                self._keep(talk, ear.finished() if ear else [])

    def _keep(self, talk: str | None, written: Sequence[_Opened]) -> None:
        """The answer is there: its calls wait for their tool."""
        surplus: list[_Opened] = []
        with self._lock:
            for opened in written:
                if talk is None or opened.call is None or opened.delegation is None:
                    surplus.append(opened)
                    continue
                old = self._written.pop((talk, opened.call), None)
                if old is not None:
                    surplus.append(old)
                self._written[talk, opened.call] = opened
            while len(self._written) > _WAITING:
                surplus.append(self._written.popitem(last=False)[1])
        for opened in surplus:
            opened.cancel()

    def delegation(self, kind: str, model: BaseChatModel | None) -> Delegation[BaseMessage] | None:
        """Begin to warm a sub-agent of this kind; None where nothing is known of its prompt with its present model."""
        wanted = self._models.get(kind) or model
        with self._lock:
            known = next((k for k in self._known.get(kind, ()) if wanted and same_model(k.model, wanted)), None)
        if known is None:
            return None
        assert wanted is not None
        # Through the model that will be called, with its key and its client, not through the one it was learned with.
        return Delegation(
            backend=given_for(self._server, wanted) or backend_for(wanted, warm=self.warm),
            codec=LangChainCodec(to_wire_of(wanted)),
            lane=process_lane(),
            ledger=self.ledger,
            prompt=known.prompt,
            head=known.before,
            instruction=HumanMessage,
        )

    # ---- when the sub-agent starts --------------------------------------------------------------

    @contextlib.contextmanager
    def _delegating(self, request: ToolCallRequest) -> Generator[_Opened | None]:
        call = request.tool_call
        if call["name"] != self.delegates:
            yield None
            return
        first = opened = None
        with _harmless():
            args, talk = call["args"], _talk(_messages_of(request.state))
            text = args.get(self.instructs)
            kind = str(args.get(self.names)) if self.names is not None else ""
            with self._lock:
                opened = self._written.pop((talk or "", call["id"] or ""), None)
                model = self._models.get(kind) or self._talks.get(talk or "")
            if isinstance(text, str) and text and model is not None:
                first = _FirstCall(self, kind, text, model)
            if opened is not None:
                opened.starts(kind, text if isinstance(text, str) else "")
        token = _firsts.set(first) if first is not None else None
        try:
            yield opened
        finally:
            if token is not None:
                _firsts.reset(token)
            if opened is not None:
                with _harmless():
                    opened.cancel()

    def learn(self, kind: str, known: _Known) -> None:
        """A sub-agent has called its model for the first time."""
        with self._lock:
            others = [k for k in self._known.pop(kind, []) if not same_model(k.model, known.model)]
            _put(self._known, kind, [known, *others][:_MODELS], _KINDS)
            self.last = kind


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
        backend: the agents' server, if you have one made; default one that is made from the model.
    """

    def __init__(
        self,
        *,
        tool: str = "task",
        instruction: str = "description",
        agent: str | None = "subagent_type",
        models: Mapping[str, BaseChatModel] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self.delegates, self.instructs, self.names, self.warm = tool, instruction, agent, warm
        self._prepare_to_delegate(models, backend)

    @property
    def name(self) -> str:
        """One for each tool, since an agent takes no two middleware of one name."""
        own = type(self).__name__
        return own if self.delegates == DelegationHooks.delegates else f"{own}[{self.delegates}]"


class _Ear(BaseCallbackHandler):
    """Hears the calls that the agent's model writes in one model call of the agent's.

    Args:
        hooks: whose.
        talk: the conversation.
        model: the agent's.
        outer: the ear of another middleware around this one, which is told, too.
    """

    run_inline = True

    def __init__(
        self, hooks: DelegationHooks, talk: str | None, model: BaseChatModel | None, outer: _Ear | None
    ) -> None:
        self._hooks, self._talk, self._model = hooks, talk, model
        self._open: dict[tuple[UUID, Any], _Opened] = {}
        self._complete: set[UUID] = set()
        # Around a nested agent's call it is inherited anyway.
        self._ears: tuple[_Ear, ...] = (self, *(outer._ears if outer is not None and outer._talk == talk else ()))

    def finished(self) -> list[_Opened]:
        """The calls of the answers that came to their end; others are given up."""
        kept: list[_Opened] = []
        for (run, _), opened in self._open.items():
            if run in self._complete:
                kept.append(opened)
            else:
                opened.cancel()
        self._open = {}
        return kept

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A chunk of an answer."""
        del token
        message = getattr(kwargs.get("chunk"), "message", None)
        if isinstance(message, AIMessageChunk):
            for chunk in message.tool_call_chunks:
                index = chunk["index"] if chunk["index"] is not None else chunk["id"]
                self._told(run_id, index, chunk["name"], chunk["id"], chunk["args"])

    def on_stream_event(self, event: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The same, in newer streams."""
        del kwargs
        fields = cast("Mapping[str, Any]", event if isinstance(event, Mapping) else {})
        found = fields.get("content") or fields.get("delta")
        part = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})
        kind, index = fields.get("event"), fields.get("index")
        if kind == "content-block-start" and part.get("type") == "tool_call_chunk":
            self._told(run_id, index, part.get("name"), part.get("id"), part.get("args"))
        elif kind == "content-block-delta" and part.get("type") == "tool-call-delta":
            self._told(run_id, index, None, None, part.get("args"))

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """An answer is complete."""
        del response, kwargs
        for ear in self._ears:
            ear._complete.add(run_id)

    def _told(self, run: UUID, index: Any, name: Any, call: Any, args: Any) -> None:
        for ear in self._ears:
            with _harmless():
                ear._heard((run, index), name, call, args)

    def _heard(self, key: tuple[UUID, Any], name: Any, call: Any, args: Any) -> None:
        opened = self._open.get(key)
        if opened is None and name == self._hooks.delegates:
            opened = self._open[key] = _Opened(self._hooks, self._model)
        if opened is None:
            return
        if isinstance(call, str) and call:
            opened.call = call
        if isinstance(args, str) and args:
            opened.feed(args)


class _FirstCall(BaseCallbackHandler):
    """Sees the first model call that a tool makes with the task as its only message but system text."""

    run_inline = True

    def __init__(self, hooks: DelegationHooks, kind: str, text: str, model: BaseChatModel) -> None:
        self._hooks, self._kind, self._text, self._model = hooks, kind, text, model
        self._seen = False

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """A model is called."""
        del run_id
        if self._seen or is_unseen() or not messages or not messages[0]:
            return
        *before, task = messages[0]
        ours = isinstance(task, HumanMessage) and task.content == self._text
        if not ours or not all(isinstance(m, SystemMessage) for m in before):
            return
        self._seen = True
        with _harmless():
            params = cast("dict[str, Any]", kwargs.get("invocation_params") or {})
            name, called = name_of(self._model), name_in(params)
            own = str(getattr(self._model, "openai_api_base", None) or "")
            if (name is not None and called is not None and name != called) or own not in str(serialized):
                log.info(
                    "sub-agents of kind %r are not warmed: they use the model %s, which is not the delegating agent's; "
                    "pass models={%r: …}",
                    *(self._kind, called, self._kind),
                )
                return
            self._hooks.learn(self._kind, _Known(self._model, tuple(before), prompt_of(params)))


_ears: ContextVar[_Ear | None] = ContextVar("smoothagent_delegations", default=None)
register_configure_hook(_ears, inheritable=True)
_firsts: ContextVar[_FirstCall | None] = ContextVar("smoothagent_first_calls", default=None)
register_configure_hook(_firsts, inheritable=True)


@contextlib.contextmanager
def _harmless() -> Generator[None]:
    """Whatever goes wrong, the agent and its sub-agents go on as without us."""
    try:
        yield
    except Exception as error:
        log.warning("a sub-agent is not warmed: %r", error, exc_info=error)


def _talk(messages: Sequence[Any]) -> str | None:
    """The conversation that a node belongs to: the same for the model's node and the tools'; None: nothing tells."""
    configurable = ensure_config().get("configurable") or {}
    name = configurable.get("thread_id") or (getattr(messages[0], "id", None) if messages else None)
    return None if name is None else f"{name}\0{graph_of(str(configurable.get('checkpoint_ns') or ''))}"


def _messages_of(state: Any) -> Sequence[Any]:
    given: Any = state
    found: Any = given.get("messages") if isinstance(state, Mapping) else getattr(given, "messages", None)
    return cast("Sequence[Any]", found) if isinstance(found, Sequence) else ()


def _put(table: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)
