"""The conversations that one middleware object serves, and which of them a hook is about."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage

from smoothagent import Backend, ConfigurationError, LookaheadRuntime, LookaheadStrategy, Prompt, RuntimePool
from smoothagent_langchain.codec import LangChainCodec, Make, alike
from smoothagent_langchain.models import backend_for, given_for, same_model, to_wire_of
from smoothagent_langchain.routed import unrouted
from smoothagent_langchain.watch import Watch

_VOLATILE = 2
"""Messages at the end that inner middleware may rewrite on each call; the rest is warmed all the same."""
_ALIASES = 4096
"""First messages that are remembered for conversations without a thread id."""


class Thread(LookaheadRuntime[BaseMessage]):
    """Lookahead for one conversation of an agent.

    Attributes:
        model: the chat model it was made for.
        lead: the system messages that stood before the state's own in the last call.
        ends_here: the agent's answer without calls is the end of it: nothing tells a later run that it is the same.
    """

    def __init__(
        self,
        key: str,
        model: BaseChatModel,
        strategy: LookaheadStrategy,
        backend: Backend,
        codec: LangChainCodec,
        ceiling: int | None = None,
    ) -> None:
        super().__init__(strategy, backend=backend, codec=codec, session=key, ceiling=ceiling)
        self.model = model
        self.lead: list[BaseMessage] = []
        self.ends_here = False

    def learn(self, watch: Watch, messages: Sequence[BaseMessage], added: Mapping[str, Any]) -> Prompt | None:
        """Take in what was really sent for ``messages``: the system messages before them, tools, and what differs.

        None where no model was called.
        """
        sent = watch.messages
        if sent is None:
            return None
        own = _leading(messages)
        lead = _leading(sent)
        before = list(sent[: max(0, lead - own)])
        if len(before) != len(self.lead) or not all(map(alike, before, self.lead)):
            self.lead = before  # else the objects that are known, or the whole history would be read anew
        prompt = watch.prompt(added)
        tail = self._rewritten(sent[lead:], messages[own:])
        if tail == self.prompt.volatile_tail and prompt == replace(self.prompt, volatile_tail=0):
            return self.prompt  # the same object: nothing to count and digest anew
        return replace(prompt, volatile_tail=tail)

    def say_once(self, topic: str, text: str) -> None:
        """Warn, once a conversation and topic."""
        self._observer.say_once(topic, text)

    def _rewritten(self, sent: Sequence[BaseMessage], asked: Sequence[BaseMessage]) -> int:
        """How many of the last messages inner middleware rewrites, as it will again on the next call."""
        pairs = zip(sent, asked, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if not alike(a, b)), min(len(sent), len(asked)))
        tail = len(asked) - same
        if tail > _VOLATILE:
            self.say_once(
                "rewritten",
                f"middleware inside this one rewrites the messages from number {same} of {len(asked)} on, so what is "
                "warmed is not what is sent: let it edit the last two messages only",
            )
            return 0
        return tail


class Threads:
    """Finds the conversation of a hook, by thread id and graph, or else by its first message.

    A conversation's chain decides what may be committed (the law, 6), so a wrong guess costs warmth only.

    Args:
        strategy: makes the strategy of a new conversation with an agent's model.
        written: how a text of the strategy's own becomes a message.
        warm: as `backend_for` says.
        backend: the agent's server, instead of the one that `backend_for` finds; for models on that server only.
        ceiling: tokens that an uncommitted request may never reach.
        limit: most conversations at once.
    """

    def __init__(
        self,
        strategy: Callable[[BaseChatModel], LookaheadStrategy],
        *,
        written: Make | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        ceiling: int | None = None,
        limit: int = 256,
    ) -> None:
        self._strategy, self._written, self._warm, self._ceiling = strategy, written, warm, ceiling
        if warm is not None and backend is not None:
            raise ConfigurationError(f"warm={warm} with backend=…: say it where the backend is made")
        self._backend = backend
        self._lock = threading.Lock()
        # Two middleware objects may serve one thread id: each has a conversation of its own at the server.
        self._mine = uuid.uuid4().hex[:8]
        self._making: dict[str, BaseChatModel] = {}
        self._aliases: OrderedDict[str, str] = OrderedDict()
        self.pool: RuntimePool[BaseMessage] = RuntimePool(self._make, limit=limit)

    def find(self, messages: Sequence[BaseMessage], runtime: object) -> Thread | None:
        """The conversation, if it has called its model before in this process."""
        key = self.key(messages, runtime)
        found = None if key is None else self.pool.find(key)
        return found if isinstance(found, Thread) else None

    def open(self, messages: Sequence[BaseMessage], runtime: object, model: BaseChatModel) -> Thread | None:
        """The conversation that is about to call ``model``; None where nothing tells one from another."""
        key = self.key(messages, runtime)
        if key is None:
            return None
        model = unrouted(model)  # by another middleware of ours, around this one
        with self._lock:
            found = self.pool.find(key)
            if isinstance(found, Thread) and (found.model is model or same_model(found.model, model)):
                return found
            if found is not None:
                self.pool.drop(key)
            self._making[key] = model
            try:
                thread = self.pool.get(key)
            finally:
                self._making.pop(key, None)
        assert isinstance(thread, Thread)
        thread.ends_here = _ends_with_its_run(runtime)
        return thread

    def key(self, messages: Sequence[BaseMessage], runtime: object) -> str | None:
        """What tells this conversation from others."""
        info = getattr(runtime, "execution_info", None)
        graph = graph_of(getattr(info, "checkpoint_ns", None) or "")
        thread = getattr(info, "thread_id", None)
        if thread is not None:
            return f"{thread}\0{graph}"
        first = messages[0].id if messages else None
        return None if first is None else f"{self._aliases.get(first, first)}\0{graph}"

    def renamed(self, before: Sequence[BaseMessage], after: Sequence[BaseMessage]) -> None:
        """A commit has replaced the first message; the conversation is the same."""
        first, was = (after[0].id if after else None), before[0].id
        if was is None or first is None or first == was:
            return
        with self._lock:
            self._aliases[first] = self._aliases.get(was, was)
            if len(self._aliases) > _ALIASES:
                self._aliases.popitem(last=False)

    def _make(self, key: str) -> Thread:
        model = self._making[key]
        codec = LangChainCodec(to_wire_of(model), self._written)
        backend = given_for(self._backend, model) or backend_for(model, warm=self._warm)
        return Thread(f"{self._mine}\0{key}", model, self._strategy(model), backend, codec, self._ceiling)


def graph_of(namespace: str) -> str:
    """The graph that a node's namespace belongs to: the same for all its nodes, another for a sub-agent's."""
    return namespace.rpartition("|")[0]


def _ends_with_its_run(runtime: object) -> bool:
    """Whether nothing tells that a later run goes on with this conversation: no thread, or a sub-agent's run."""
    info = getattr(runtime, "execution_info", None)
    return getattr(info, "thread_id", None) is None or bool(graph_of(getattr(info, "checkpoint_ns", None) or ""))


def _leading(messages: Sequence[BaseMessage]) -> int:
    return next((i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages))
