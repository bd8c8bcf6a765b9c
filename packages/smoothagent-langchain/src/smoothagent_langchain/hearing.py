"""The calls that start sub-agents, heard while a model writes them, and the first calls that sub-agents make."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tracers.context import register_configure_hook

from smoothagent import Prompt
from smoothagent.delegation import Delegation
from smoothagent.harmless import harmless
from smoothagent.jsonstream import FieldStream
from smoothagent.prompt import name_in, prompt_of
from smoothagent.unseen import is_unseen
from smoothagent_langchain.watch import is_of

log = logging.getLogger("smoothagent")


class Delegates(Protocol):
    """What is known of a tool that starts sub-agents, as `smoothagent_langchain.isolation.DelegationHooks` has it."""

    delegates: str
    instructs: str
    names: str | None
    last: str

    def delegation(self, kind: str, model: BaseChatModel | None) -> Delegation[BaseMessage] | None:
        """Begin to warm a sub-agent of this kind; None where nothing is known of its prompt."""
        ...

    def learn(self, kind: str, known: Known) -> None:
        """A sub-agent has called its model for the first time."""
        ...


class Known(NamedTuple):
    """How a kind of sub-agent was called last.

    Attributes:
        model: its chat model.
        before: the system messages that stood before the task.
        prompt: what else shapes the tokens.
    """

    model: BaseChatModel
    before: tuple[BaseMessage, ...]
    prompt: Prompt


class Opened:
    """A call that the model is writing: which sub-agent it is for, and the task so far.

    Args:
        hooks: know the sub-agents.
        model: the delegating agent's.
    """

    def __init__(self, hooks: Delegates, model: BaseChatModel | None) -> None:
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
        with harmless("a sub-agent"):
            if self.delegation is not None:
                self.delegation.settle()


class Ear(BaseCallbackHandler):
    """Hears the calls that the agent's model writes in one model call of the agent's.

    Args:
        hooks: whose.
        talk: the conversation.
        model: the agent's.
        outer: the ear of another middleware around this one, which is told, too.
    """

    run_inline = True

    def __init__(self, hooks: Delegates, talk: str | None, model: BaseChatModel | None, outer: Ear | None) -> None:
        self._hooks, self._talk, self._model = hooks, talk, model
        self._open: dict[tuple[UUID, Any], Opened] = {}
        self._complete: set[UUID] = set()
        # Around a nested agent's call it is inherited anyway.
        self._all: tuple[Ear, ...] = (self, *(outer._all if outer is not None and outer._talk == talk else ()))

    def finished(self) -> list[Opened]:
        """The calls of the answers that came to their end; others are given up."""
        kept: list[Opened] = []
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
        for ear in self._all:
            ear._complete.add(run_id)

    def _told(self, run: UUID, index: Any, name: Any, call: Any, args: Any) -> None:
        for ear in self._all:
            with harmless("a sub-agent"):
                ear._heard((run, index), name, call, args)

    def _heard(self, key: tuple[UUID, Any], name: Any, call: Any, args: Any) -> None:
        opened = self._open.get(key)
        if opened is None and name == self._hooks.delegates:
            opened = self._open[key] = Opened(self._hooks, self._model)
        if opened is None:
            return
        if isinstance(call, str) and call:
            opened.call = call
        if isinstance(args, str) and args:
            opened.feed(args)


class FirstCall(BaseCallbackHandler):
    """Sees the first model call that a tool makes with the task as its only message but system text."""

    run_inline = True

    def __init__(self, hooks: Delegates, kind: str, text: str, model: BaseChatModel) -> None:
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
        with harmless("a sub-agent"):
            params = cast("dict[str, Any]", kwargs.get("invocation_params") or {})
            if not is_of(self._model, serialized, params):
                log.info(
                    "sub-agents of kind %r are not warmed: their model %s is not the delegating agent's; pass models=…",
                    *(self._kind, name_in(params)),
                )
                return
            self._hooks.learn(self._kind, Known(self._model, tuple(before), prompt_of(params)))


EARS: ContextVar[Ear | None] = ContextVar("smoothagent_delegations", default=None)
register_configure_hook(EARS, inheritable=True)
FIRST_CALLS: ContextVar[FirstCall | None] = ContextVar("smoothagent_first_calls", default=None)
register_configure_hook(FIRST_CALLS, inheritable=True)
