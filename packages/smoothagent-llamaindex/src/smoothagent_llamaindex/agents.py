"""Agents whose long runs stay within limits without a pause: the built-ins' drop-ins."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, BaseWorkflowAgent
from llama_index.core.agent.workflow import CodeActAgent as BuiltInCodeAct
from llama_index.core.agent.workflow import FunctionAgent as BuiltInFunction
from llama_index.core.agent.workflow import ReActAgent as BuiltInReAct
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import BaseMemory

from smoothagent import Backend, LookaheadStrategy
from smoothagent_llamaindex.conversations import conversation_named, ended
from smoothagent_llamaindex.isolation import Delegate
from smoothagent_llamaindex.llm import LookaheadMixin, lookahead_of, with_lookahead

_names: dict[int, tuple[weakref.ref[Any], str, set[str]]] = {}
"""Names of the objects that hold a conversation, by identity: pydantic's objects cannot be looked up."""


class FunctionAgent(BuiltInFunction):
    """``FunctionAgent`` whose run stays within limits: its scratchpad is transformed, and warmed, ahead of time.

    The same arguments as the built-in's. Messages and events of a run stay as they are; only what the LLM is sent is
    the strategy's view. In an ``AgentWorkflow`` each agent has conversations of its own.

    Args:
        strategy: makes the strategy of a new conversation, such as ``lambda: Offload(8000)``.
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
            return await super().take_step(ctx, llm_input, tools, memory)


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
            return await super().take_step(ctx, llm_input, tools, memory)


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
    for delegate in (delegates or {}).values():
        if not isinstance(delegate.agent.llm, LookaheadMixin):
            # So that the sub-agent's first call is known when it comes.
            delegate.agent.llm = with_lookahead(delegate.agent.llm)


async def _name_of(agent: BaseWorkflowAgent, ctx: Any, memory: BaseMemory | None) -> str | None:
    """What tells the conversation that a step belongs to: the memory that it comes from, and the agent."""
    if not isinstance(agent.llm, LookaheadMixin):
        return None
    session = getattr(memory, "session_id", None)
    store: Any = getattr(memory, "chat_store", None)
    holder = memory if isinstance(session, str) else store if store is not None else memory or ctx
    part = session if isinstance(session, str) else str(getattr(memory, "chat_store_key", ""))
    return _named(holder, f"{agent.name}/{part}")


def _named(holder: object, part: str) -> str:
    """A name for a part of what an object holds, for as long as that lives."""
    number = id(holder)
    found = _names.get(number)
    if found is None or found[0]() is not holder:
        name, parts = uuid.uuid4().hex, set[str]()

        def forget(_: object) -> None:
            _names.pop(number, None)
            for known in parts:
                ended(known)

        found = _names[number] = (weakref.ref(holder, forget), name, parts)
    full = f"{part}/{found[1]}"
    found[2].add(full)
    return full
