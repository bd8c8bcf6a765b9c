"""Sub-agents whose first prompt is warm when they start: their system text and tools, and the task as it is written.

A sub-agent starts with a prompt of its own, which nothing of the parent's cache fits. What it will be is known early:
the same system text and tools as at the last delegation, and the task, which the parent's model is still writing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, cast

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ToolCallRequest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import ensure_config

from smoothagent import Backend, Ledger
from smoothagent.delegation import Delegation
from smoothagent.forks import after_fork
from smoothagent.harmless import harmless
from smoothagent.lane import process_lane
from smoothagent.waiting import wrapped
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.hearing import EARS, FIRST_CALLS, Ear, FirstCall, Known, Opened
from smoothagent_langchain.models import backend_for, given_for, same_model, to_wire_of
from smoothagent_langchain.routed import unrouted
from smoothagent_langchain.threads import graph_of

_WAITING = 16
"""Calls that have been written and wait for their tool, of all conversations; what is older is given up."""
_KINDS, _MODELS = 64, 4
"""Kinds of sub-agents that are remembered, and models of each."""
_HANDING_OVER = 1.0
"""Seconds that a sub-agent waits for what a second server has warmed for it."""
_TALKS = 256
"""Conversations whose model is remembered from the model's node to the tools' node."""


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
        self._known: OrderedDict[str, list[Known]] = OrderedDict()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._talks: OrderedDict[str, BaseChatModel | None] = OrderedDict()
        self._written: OrderedDict[tuple[str, str], Opened] = OrderedDict()

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
        with harmless("a sub-agent"):
            talk = _talk(_messages_of(getattr(request, "state", None)))
            model = unrouted(request.model) if isinstance(request.model, BaseChatModel) else None  # pyright: ignore[reportUnnecessaryIsInstance]
            with self._lock:
                if talk is not None:
                    _put(self._talks, talk, model, _TALKS)
                # The answer before this one is history: what it wrote and nobody started is not started any more.
                left = [self._written.pop(key) for key in list(self._written) if key[0] == talk]
            for opened in left:
                opened.cancel()
            ear = Ear(self, talk, model, EARS.get())
        outer = EARS.set(ear or EARS.get())
        try:
            yield
        finally:
            EARS.reset(outer)
            with harmless("a sub-agent"):
                self._keep(talk, ear.finished() if ear else [])

    def _keep(self, talk: str | None, written: Sequence[Opened]) -> None:
        """The answer is there: its calls wait for their tool."""
        surplus: list[Opened] = []
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
    def _delegating(self, request: ToolCallRequest) -> Generator[Opened | None]:
        call = request.tool_call
        if call["name"] != self.delegates:
            yield None
            return
        first = opened = None
        with harmless("a sub-agent"):
            args, talk = call["args"], _talk(_messages_of(request.state))
            text = args.get(self.instructs)
            kind = str(args.get(self.names)) if self.names is not None else ""
            with self._lock:
                opened = self._written.pop((talk or "", call["id"] or ""), None)
                model = self._models.get(kind) or self._talks.get(talk or "")
            if isinstance(text, str) and text and model is not None:
                first = FirstCall(self, kind, text, model)
            if opened is not None:
                opened.starts(kind, text if isinstance(text, str) else "")
        token = FIRST_CALLS.set(first) if first is not None else None
        try:
            yield opened
        finally:
            if token is not None:
                FIRST_CALLS.reset(token)
            if opened is not None:
                with harmless("a sub-agent"):
                    opened.cancel()

    def learn(self, kind: str, known: Known) -> None:
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
