"""Agents whose long runs stay within limits without a pause: the built-ins' drop-ins."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import logging
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, BaseWorkflowAgent
from llama_index.core.agent.workflow import CodeActAgent as BuiltInCodeAct
from llama_index.core.agent.workflow import FunctionAgent as BuiltInFunction
from llama_index.core.agent.workflow import ReActAgent as BuiltInReAct
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemory
from llama_index.core.storage.chat_store import BaseChatStore
from llama_index.core.tools import BaseTool

from smoothagent import Backend, LookaheadStrategy, Prompt
from smoothagent_llamaindex.codec import is_summary
from smoothagent_llamaindex.conversations import conversation_named, ended
from smoothagent_llamaindex.isolation import Delegate
from smoothagent_llamaindex.llm import LookaheadMixin, lookahead_of, with_lookahead
from smoothagent_llamaindex.memory import Memory

log = logging.getLogger("smoothagent")


class FunctionAgent(BuiltInFunction):
    """``FunctionAgent`` whose run stays within limits: its scratchpad is transformed, and warmed, ahead of time.

    The same arguments as the built-in's. Messages and events of a run stay as they are; only what the LLM is sent is
    the strategy's view. In an ``AgentWorkflow`` each agent has conversations of its own.

    Args:
        strategy: makes the strategy of a new conversation, such as ``lambda: KeepRecent(10, at_turns=20)``.
        delegates: sub-agents by the tools that start them: their prompts are warmed while the LLM writes the call.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the LLM.
        **built_in: everything the built-in takes.

    Raises:
        ConfigurationError: as `with_lookahead`.
    """

    def __init__(
        self,
        *args: Any,
        strategy: Callable[[], LookaheadStrategy] | None = None,
        delegates: Mapping[str, Delegate] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        **built_in: Any,
    ) -> None:
        super().__init__(*args, **built_in)
        _look_ahead(self, strategy, delegates, warm, backend)

    async def take_step(
        self, ctx: Any, llm_input: list[ChatMessage], tools: Sequence[Any], memory: BaseMemory
    ) -> AgentOutput:
        """As the built-in."""
        with conversation_named(await _name_of(self, ctx, memory)):
            return await super().take_step(ctx, llm_input, tools, memory)


def _with_prompt(
    agent: BaseWorkflowAgent, llm_input: list[ChatMessage], memory: BaseMemory | None
) -> list[ChatMessage]:
    """What to give a built-in that takes a system message in front for the agent's own, and leaves it out.

    Without one of the agent's it may be a memory's of ours: its summary.
    """
    if agent.system_prompt or not llm_input or llm_input[0].role != MessageRole.SYSTEM:
        return llm_input
    if not is_summary(llm_input[0]) and not isinstance(memory, Memory):
        return llm_input
    return [ChatMessage(role=MessageRole.SYSTEM, content=""), *llm_input]


class ReActAgent(BuiltInReAct):
    """``ReActAgent`` whose run stays within limits; see `FunctionAgent`.

    Its tools' outputs are the user's messages to the LLM, so that windows and summaries shorten them, and `Offload`,
    which looks for outputs of tools, does not.
    """

    def __init__(
        self,
        *args: Any,
        strategy: Callable[[], LookaheadStrategy] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        **built_in: Any,
    ) -> None:
        super().__init__(*args, **built_in)
        _look_ahead(self, strategy, None, warm, backend)

    async def take_step(
        self, ctx: Any, llm_input: list[ChatMessage], tools: Sequence[Any], memory: BaseMemory
    ) -> AgentOutput:
        """As the built-in."""
        with conversation_named(await _name_of(self, ctx, memory)):
            return await super().take_step(ctx, _with_prompt(self, llm_input, memory), tools, memory)


class CodeActAgent(BuiltInCodeAct):
    """``CodeActAgent`` whose run stays within limits; see `FunctionAgent` and `ReActAgent`."""

    def __init__(
        self,
        *args: Any,
        strategy: Callable[[], LookaheadStrategy] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        **built_in: Any,
    ) -> None:
        super().__init__(*args, **built_in)
        _look_ahead(self, strategy, None, warm, backend)

    async def take_step(
        self, ctx: Any, llm_input: list[ChatMessage], tools: Sequence[Any], memory: BaseMemory
    ) -> AgentOutput:
        """As the built-in."""
        with conversation_named(await _name_of(self, ctx, memory)):
            return await super().take_step(ctx, _with_prompt(self, llm_input, memory), tools, memory)


def _look_ahead(
    agent: BaseWorkflowAgent,
    strategy: Callable[[], LookaheadStrategy] | None,
    delegates: Mapping[str, Delegate] | None,
    warm: bool | None,
    backend: Backend | None,
) -> None:
    if strategy is None and not delegates:
        return
    agent.llm = with_lookahead(agent.llm, strategy, delegates=delegates, warm=warm, backend=backend)
    lookahead_of(agent.llm).named_only = True
    if strategy is not None and isinstance(agent, BuiltInFunction) and agent.tool_retriever is None:
        # A mistake is told where it is made, not at the first conversation. Names are what is asked for.
        names = [tool.metadata.name for tool in agent.tools or () if isinstance(tool, BaseTool)]
        strategy().check(Prompt(tools=[{"type": "function", "function": {"name": name}} for name in names]))


async def _name_of(agent: BaseWorkflowAgent, ctx: Any, memory: BaseMemory | None) -> str | None:
    """What tells the conversation that a step belongs to: the memory that it comes from, and the agent.

    It stands in the run's own store, too, since workflows may put a copy in the place of a memory in the middle of one.
    """
    if not isinstance(agent.llm, LookaheadMixin):
        return None
    try:
        key = f"smoothagent {agent.name}"
        name = await ctx.store.get(key, default=None)
        if not isinstance(name, str):
            name = _name(agent.name, memory)
            if name is not None:
                await ctx.store.set(key, name)
        if name is not None:
            _HOLDERS.hold(_holder(memory), name, for_good=getattr(memory, "session_id", None) is None)
    except Exception as error:  # a state of the user's own kind, or a memory that nothing can refer to
        log.debug("a conversation of %s is told by its messages: %r", agent.name, error)
        return None
    return name


def _name(agent: str, memory: BaseMemory | None) -> str | None:
    session = getattr(memory, "session_id", None)
    if isinstance(session, str):
        return f"{agent}/{session}"
    known = _HOLDERS.name_of(_holder(memory))
    return None if known is None else f"{agent}/{getattr(memory, 'chat_store_key', '')}/{known}"


def _holder(memory: BaseMemory | None) -> object:
    """What lives as long as a conversation does: several memories may be made on one store."""
    store: Any = getattr(memory, "chat_store", None)
    return store if isinstance(store, BaseChatStore) else memory


class _Holders:
    """Objects that hold conversations, by identity: pydantic's objects cannot be looked up."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], str, dict[str, bool]]] = {}
        self._alive: Counter[str] = Counter()

    def name_of(self, holder: object) -> str | None:
        """A name for an object, for as long as it lives; None for none."""
        return None if holder is None else self._entry(holder)[1]

    def hold(self, holder: object, conversation: str, *, for_good: bool) -> None:
        """``holder`` holds ``conversation``, which ends with the last that does."""
        held = self._entry(holder)[2]
        if conversation not in held:
            held[conversation] = for_good
            self._alive[conversation] += 1

    def _is_held(self, conversation: str) -> bool:
        return self._alive[conversation] > 0

    def _entry(self, holder: object) -> tuple[weakref.ref[Any], str, dict[str, bool]]:
        number = id(holder)
        found = self._known.get(number)
        if found is None or found[0]() is not holder:
            held: dict[str, bool] = {}

            def forget(_: object) -> None:
                self._known.pop(number, None)
                for conversation, for_good in held.items():
                    self._alive[conversation] -= 1
                    if self._alive[conversation] <= 0:
                        del self._alive[conversation]
                        ended(conversation, for_good=for_good, still=partial(self._is_held, conversation))

            found = self._known[number] = (weakref.ref(holder, forget), uuid.uuid4().hex, held)
        return found


_HOLDERS = _Holders()
