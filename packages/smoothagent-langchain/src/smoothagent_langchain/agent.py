"""What all middleware of this package does around the agent's model call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage

from smoothagent import MainRequest
from smoothagent_langchain.aside import usage_of
from smoothagent_langchain.models import name_of
from smoothagent_langchain.routed import routed
from smoothagent_langchain.threads import Thread, Threads
from smoothagent_langchain.watch import Watch

log = logging.getLogger("smoothagent")


class Call:
    """One model call of the agent: routed and paced, watched, and followed by a segment boundary.

    Args:
        thread: its conversation.
        request: as it is sent.
        history: the conversation's messages as the strategy follows them.
    """

    def __init__(self, thread: Thread, request: ModelRequest[Any], history: Sequence[BaseMessage]) -> None:
        self.thread, self.request = thread, request
        self.main: MainRequest = thread.main_request()
        self.watch = Watch(request.messages, name_of(request.model), self.main.first_token, self.main.text)
        self._history = list(history)

    def routed(self) -> ModelRequest[Any]:
        """The request with what the server needs to know of it; ``main`` must have been entered."""
        extras = self.main.extras
        return self.request.override(model=routed(self.request.model, extras)) if extras else self.request

    def answered(self, response: Any) -> None:
        """Tell the usage, then that a segment is complete: the answer's calls are known, their results are not."""
        result = messages_of(response)
        for message in reversed(result):
            usage = usage_of(message)
            if usage is not None:
                self.main.usage(usage)
                break
        added: dict[str, Any] = self.main.extras.get("extra_body") or {}
        prompt = self.thread.learn(self.watch, self.request.messages, added)
        if prompt is None:
            return
        if self.thread.ends_here and not any(isinstance(m, AIMessage) and m.tool_calls for m in result):
            # Nobody can go on with this conversation, or only with another key: what it holds is others'.
            self.thread.rest()
            return
        self.thread.on_segment_boundary([*self.thread.lead, *self._history, *result], prompt=prompt)


class LookaheadHooks:
    """The two ``wrap_model_call`` hooks of a middleware that transforms the agent's state before the call.

    Mixed in before the built-in's class. ``threads`` is None where nothing can be prepared.
    """

    threads: Threads | None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """Call the model, then let the lookahead see what it answered."""
        call = begin(self.threads, request)
        if call is None:
            return handler(request)
        with call.main, call.watch.watching():
            response = handler(call.routed())
        end(call, response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """Call the model, then let the lookahead see what it answered."""
        call = begin(self.threads, request)
        if call is None:
            return await handler(request)
        async with call.main:
            with call.watch.watching():
                response = await handler(call.routed())
        end(call, response)
        return response


def begin(threads: Threads | None, request: ModelRequest[Any]) -> Call | None:
    """A call of the conversation's that the request is of; None where there is none to be had.

    Its history is the state's, which the transformation works on, and not what outer middleware made of it.
    """
    thread = opened(threads, request)
    if thread is None:
        return None
    state = cast("Mapping[str, Any]", request.state)
    history = cast("Sequence[BaseMessage]", state.get("messages") or request.messages)
    return Call(thread, request, history if len(history) == len(request.messages) else request.messages)


def opened(threads: Threads | None, request: ModelRequest[Any]) -> Thread | None:
    """The conversation of a request; whatever goes wrong, the agent goes on without lookahead."""
    if threads is None or not isinstance(request.model, BaseChatModel):  # pyright: ignore[reportUnnecessaryIsInstance]
        return None  # a model that is configured call by call is nothing that could be worked for
    try:
        return threads.open(request.messages, request.runtime, request.model)
    except Exception as error:
        log.warning("there is no lookahead: %r", error, exc_info=error)
        return None


def lead_of(thread: Thread, request: ModelRequest[Any]) -> list[BaseMessage]:
    """The system messages that stand before the state's; until a call has shown them, what the request says."""
    if not thread.lead and request.system_message is not None:
        thread.lead = [request.system_message]
    return list(thread.lead)


def end(call: Call, response: Any) -> None:
    """What follows an answer; it must not cost the answer."""
    try:
        call.answered(response)
    except Exception as error:
        log.warning("session %s: nothing is prepared: %r", call.thread.session, error, exc_info=error)


def messages_of(response: Any) -> list[BaseMessage]:
    """The messages of whatever a handler returned."""
    response = getattr(response, "model_response", response)
    if isinstance(response, BaseMessage):
        return [response]
    return list(cast("Sequence[BaseMessage]", getattr(response, "result", ())))
