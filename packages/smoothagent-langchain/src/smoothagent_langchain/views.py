"""Middleware that shortens what the model sees and leaves the agent's state as it is.

LangChain trims the state in a ``before_model`` hook of the user's own, on the critical path.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, StructuredTool

from smoothagent import (
    READ_OFFLOADED_TOOL,
    Backend,
    KeepRecent,
    LookaheadStrategy,
    Offload,
    OffloadStore,
    ReadOffloaded,
    SlidingWindow,
)
from smoothagent_langchain.agent import Call, end, lead_of, opened
from smoothagent_langchain.threads import Thread, Threads

log = logging.getLogger("smoothagent")


class ViewMiddleware(AgentMiddleware[Any, Any, Any]):
    """Sends the strategy's view of the history; the base of the classes below.

    The state keeps every message, so that nothing is lost to a checkpointer, a user interface or another middleware.

    Args:
        strategy: makes the strategy of a new conversation.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the model.
    """

    def __init__(
        self,
        strategy: Callable[[], LookaheadStrategy],
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        self._make = strategy
        # A mistake in the arguments is told where it is made, not at the first conversation.
        strategy()
        self.threads = Threads(self._strategy, warm=warm, backend=backend)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """Send the view, then let the lookahead see what was answered."""
        thread = opened(self.threads, request)
        plain = self.without_lookahead(thread, request)
        if thread is None:
            return handler(plain)
        lead = lead_of(thread, request)
        try:
            view = thread.on_commit([*lead, *request.messages])
        except Exception as error:  # whatever it is, the agent goes on as without us
            thread.say_once("views", f"calls go without lookahead: {error!r}")
            return handler(plain)
        call = Call(thread, self.sending(plain, view[len(lead) :]), request.messages)
        with call.main, call.watch.watching():
            response = handler(call.routed())
        self.answered(call, request, response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """Send the view, then let the lookahead see what was answered."""
        thread = opened(self.threads, request)
        plain = self.without_lookahead(thread, request)
        if thread is None:
            return await handler(plain)
        lead = lead_of(thread, request)
        try:
            view = await thread.aon_commit([*lead, *request.messages])
        except Exception as error:  # whatever it is, the agent goes on as without us
            thread.say_once("views", f"calls go without lookahead: {error!r}")
            return await handler(plain)
        call = Call(thread, self.sending(plain, view[len(lead) :]), request.messages)
        async with call.main:
            with call.watch.watching():
                response = await handler(call.routed())
        self.answered(call, request, response)
        return response

    def without_lookahead(self, thread: Thread | None, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request as it is made where there is no lookahead."""
        del thread
        return request

    def sending(self, plain: ModelRequest[Any], view: list[BaseMessage]) -> ModelRequest[Any]:
        """The request that sends the view."""
        return plain.override(messages=cast("Any", view))

    def answered(self, call: Call, request: ModelRequest[Any], response: Any) -> None:
        """The model has answered ``request``."""
        del request
        end(call, response)

    def _strategy(self, model: BaseChatModel) -> LookaheadStrategy:
        del model
        return self._make()


class KeepRecentMiddleware(ViewMiddleware):
    """Send the last ``turns`` turns only, whenever a trigger is reached.

    A turn is one model call with its tool results. The latest user message always stays.

    Args:
        turns: turns that stay.
        at_turns: shorten when this many are there.
        at_tokens: shorten when the prompt has this many tokens. One trigger is needed.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the model.

    Raises:
        ConfigurationError: no trigger, or one that the kept turns would reach at once.
    """

    def __init__(
        self,
        turns: int,
        *,
        at_turns: int | None = None,
        at_tokens: int | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(lambda: KeepRecent(turns, at_turns=at_turns, at_tokens=at_tokens), warm=warm, backend=backend)


class SlidingWindowMiddleware(ViewMiddleware):
    """Send a window of the newest turns, which moves on as the conversation grows.

    Args:
        turns: the window's size in turns, or
        tokens: its size in tokens of the whole prompt; exactly one of the two.
        stride: how far it moves at once, in the same unit.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the model.

    Raises:
        ConfigurationError: both or no size, or a stride that leaves nothing.
    """

    def __init__(
        self,
        turns: int | None = None,
        *,
        tokens: int | None = None,
        stride: int | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(lambda: SlidingWindow(turns, tokens=tokens, stride=stride), warm=warm, backend=backend)


class OffloadMiddleware(ViewMiddleware):
    """Send references in place of bulky tool outputs, which the agent reads back with a tool that comes with it.

    Args:
        hard: tokens of the prompt at which outputs are moved.
        keep: the newest outputs that stay.
        store: where they go; default `OffloadStore` in the user's data folder.
        min_chars: shorter outputs stay.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the model.

    Attributes:
        tools: the tool ``read_offloaded``; ``create_agent`` adds it to the agent's own.

    Raises:
        ConfigurationError: an impossible limit.
    """

    def __init__(
        self,
        hard: int,
        *,
        keep: int = 3,
        store: OffloadStore | None = None,
        min_chars: int = 200,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        place = store or OffloadStore()
        self.tools: Sequence[BaseTool] = [read_tool(place)]
        super().__init__(
            # The tool is ours, so nobody has to be asked for it.
            lambda: Offload(hard, keep=keep, store=place, min_chars=min_chars, allow_unreadable=True),
            warm=warm,
            backend=backend,
        )


def read_tool(store: OffloadStore) -> BaseTool:
    """The ``read_offloaded`` tool as LangChain's agents take it."""
    definition = READ_OFFLOADED_TOOL["function"]
    read = ReadOffloaded(store)

    def read_offloaded(ref: str, offset: int | None = 0, limit: int | None = None) -> str:
        return read(ref, offset or 0, limit)

    return StructuredTool.from_function(
        read_offloaded,
        name=definition["name"],
        description=definition["description"],
        args_schema=definition["parameters"],
    )
