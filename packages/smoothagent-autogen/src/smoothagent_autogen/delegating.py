"""Sub-agents that a tool starts: their prompts are warm before they make their first call."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import BaseGroupChat, RoundRobinGroupChat, Swarm
from autogen_agentchat.tools import AgentTool as BuiltInAgentTool
from autogen_agentchat.tools import TeamTool as BuiltInTeamTool
from autogen_core import ComponentModel
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import ChatCompletionClient, LLMMessage, SystemMessage, UserMessage
from autogen_core.tools import BaseTool, StaticWorkbench, Tool, ToolSchema
from pydantic import BaseModel

from smoothagent import Backend, Delegation, Ledger
from smoothagent.forks import after_fork
from smoothagent.harmless import harmless
from smoothagent.jsonstream import FieldStream
from smoothagent.lane import process_lane
from smoothagent.unshared import Unshared
from smoothagent_autogen.aside import AsideBackend, seen_by
from smoothagent_autogen.codec import AutoGenCodec
from smoothagent_autogen.contexts.windows import now
from smoothagent_autogen.flat import Flattening
from smoothagent_autogen.models import backend_for, given_for, prompt_for, same_model, to_wire_of
from smoothagent_autogen.seen import SEEN, Asked, tells_deltas
from smoothagent_autogen.shape import Shape

FIELD = "task"
"""The argument of AutoGen's tools that holds the instruction, and is all of the sub-agent's first message."""

SOURCE = "user"
"""The source of that message."""


class First:
    """What is certain of a sub-agent's first call.

    Args:
        agent: the sub-agent.
        call: keyword arguments of its model client's ``create``.

    Attributes:
        shape: what stands around the conversation.
        stored: the conversation before the instruction.
    """

    def __init__(self, agent: AssistantAgent, call: Mapping[str, Any]) -> None:
        own: Any = agent
        client: ChatCompletionClient = own._model_client
        self.shape = Shape(client, tuple(own._system_messages), (), prompt_for(client, call), False, call)
        self.stored: list[LLMMessage] = list(own._model_context._messages)
        self.call = call

    def begins(self, messages: Sequence[LLMMessage]) -> str | None:
        """The instruction, where these messages are the first call's."""
        client = self.shape.client
        head = seen_by(client, [*self.shape.systems, *self.stored])
        last = messages[-1] if messages else None
        if len(messages) != len(head) + 1 or not isinstance(last, UserMessage) or last.source != SOURCE:
            return None
        return last.content if isinstance(last.content, str) and list(messages[:-1]) == head else None


def first_of(agent: ChatAgent | Team) -> First | None:
    """A sub-agent's first call; None where only its run can tell: memories, tools of a server, agents of other kinds.

    Of a team it is that of the first who speaks, before the team has run.
    """
    own: Any = agent
    if isinstance(agent, RoundRobinGroupChat | Swarm):
        return None if own._initialized else first_of(own._participants[0])
    if not isinstance(agent, AssistantAgent) or own._memory:
        return None
    as_made = ("on_messages_stream", "_call_llm", "_add_messages_to_context")
    if any(getattr(type(agent), n, None) != getattr(AssistantAgent, n, None) for n in as_made):
        return None
    context = own._model_context
    ours = type(context).__module__.startswith(("autogen_core.", "smoothagent_autogen."))
    if not ours or (context._messages and not isinstance(context, UnboundedChatCompletionContext)):
        return None
    benches = list(own._workbench)
    if not all(isinstance(bench, StaticWorkbench) for bench in benches):
        return None
    listed = [schema for bench in benches for schema in now(bench.list_tools())]
    return First(agent, {"tools": [*listed, *own._handoff_tools], "json_output": own._output_content_type})


class _FirstCall(Delegation[LLMMessage]):
    """Ends with the sub-agent's first call: what is warm stays in the cache without a lease."""

    def request_done(self) -> None:
        """The first call is over."""
        super().request_done()
        self.cancel()


class Opened:
    """A sub-agent that is warmed.

    Args:
        first: what is certain of its first call.
        delegation: warms it.
    """

    def __init__(self, first: First, delegation: Delegation[LLMMessage]) -> None:
        self.first, self.delegation = first, delegation
        self._stream = FieldStream(FIELD)
        self._text = ""
        self._open = True

    @property
    def waits(self) -> bool:
        """Whether its sub-agent may still start, and finds anything warm."""
        return self._open and self.delegation.waits

    def feed(self, fragment: str) -> None:
        """The next fragment of the call's arguments."""
        text = self._stream.feed(fragment)
        if text and self._open:
            self._text += text
            self.delegation.feed(text)

    def started_by(self, asked: Asked) -> Delegation[LLMMessage] | None:
        """What was warmed for a call, where it is the sub-agent's first."""
        if not self._open or not same_model(self.first.shape.client, asked.client):
            return None
        instruction = self.first.begins(asked.messages)
        if instruction is None or not instruction.startswith(self._text):
            return None
        self._open = False
        self.delegation.on_commit(instruction)
        return self.delegation

    def cancel(self) -> None:
        """It is not delegated after all; one whose sub-agent has started is left alone."""
        if self._open:
            self._open = False
            self.delegation.cancel()


class _Work(Unshared):
    """What is under way for one tool."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.opened: list[Opened] = []
        self.parameters: Any = None


class _Delegating(BaseTool[Any, Any]):
    """What both tools share."""

    _warm: bool | None
    _backend: Backend | None
    _work: _Work

    def _set_up(self, warm: bool | None, backend: Backend | None) -> None:
        self._warm, self._backend, self._work = warm, backend, _Work()
        SEEN.listen(_DELEGATES)

    @property
    def ledger(self) -> Ledger:
        """Counts what warming cost and saved."""
        return self._work.ledger

    @property
    def schema(self) -> ToolSchema:
        """As the built-in's."""
        made, work = super().schema, self._work
        if "parameters" in made:
            # Always the same object, by which it is known in what an agent offers to its model.
            if work.parameters != made["parameters"]:
                work.parameters = made["parameters"]
                _DELEGATES.offers(work.parameters, self)
            made["parameters"] = work.parameters
        return made

    def has(self, parameters: object) -> bool:
        """Whether it is its schema that they are of."""
        return parameters is self._work.parameters

    @abstractmethod
    def sub_agent(self) -> ChatAgent | Team:
        """Whom it starts."""

    def offered(self, *, told: bool) -> None:
        """A model is asked that may call it: what was opened in vain is given up.

        Args:
            told: its answer is heard as it is written. If not, its sub-agent is warmed as if it were called.
        """
        first = None if told else first_of(self.sub_agent())
        opened = self._work.opened
        kept = [one for one in opened if first is not None and one.waits and _as_before(one.first, first)][:1]
        for one in opened:
            if one not in kept:
                one.cancel()
        self._work.opened = kept
        if first is not None and not kept:
            self._open(first)

    def called(self) -> Opened | None:
        """The model has named it; None where nothing is known of its sub-agent's first call."""
        first = first_of(self.sub_agent())
        return None if first is None else self._open(first)

    def _open(self, first: First) -> Opened:
        client = first.shape.client
        backend = given_for(self._backend, client) or backend_for(client, warm=self._warm)
        if isinstance(backend, AsideBackend):
            backend.call, backend.loop = first.call, asyncio.get_running_loop()
        prompt, head = first.shape.prompt([]), Flattening().flat(first.shape.opening(first.stored))
        if prompt.system is not None:
            head.insert(0, SystemMessage(content=prompt.system))
        delegation = _FirstCall(
            backend=backend,
            codec=AutoGenCodec(to_wire_of(client)),
            lane=process_lane(),
            ledger=self.ledger,
            prompt=replace(prompt, system=None),
            head=head,
            instruction=lambda text: UserMessage(content=text, source=SOURCE),
        )
        opened = Opened(first, delegation)
        self._work.opened.append(opened)
        _DELEGATES.wait_for(opened)
        return opened


def _as_before(before: First, now: First) -> bool:
    a, b = before.shape, now.shape
    same = a.client is b.client and a.systems == b.systems and a.bare == b.bare
    return same and before.stored == now.stored


class AgentToolConfig(BaseModel):
    """As the built-in's, and ``warm``."""

    agent: ComponentModel
    return_value_as_last_message: bool = False
    warm: bool | None = None


class TeamToolConfig(BaseModel):
    """As the built-in's, and ``warm``."""

    name: str
    description: str
    team: ComponentModel
    return_value_as_last_message: bool = False
    warm: bool | None = None


class AgentTool(_Delegating, BuiltInAgentTool):
    """AutoGen's tool that runs an agent, whose first prompt is warm when it starts.

    Of an `AssistantAgent` the system message, the tools and what it remembers of earlier tasks are warmed, as soon as
    the model that may call it names it, and the task, as it is written; where the model's answer is not streamed, all
    but the task, while it is awaited.

    Args:
        agent: as the built-in.
        return_value_as_last_message: as the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the sub-agent's server, if you have one made. It is no part of the component's configuration.
    """

    component_config_schema: Any = AgentToolConfig
    component_provider_override = "smoothagent_autogen.AgentTool"

    def __init__(
        self,
        agent: BaseChatAgent,
        return_value_as_last_message: bool = False,
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(agent, return_value_as_last_message)
        self._set_up(warm, backend)

    def sub_agent(self) -> ChatAgent | Team:
        """The agent."""
        return self._agent

    def _to_config(self) -> Any:
        return AgentToolConfig(**super()._to_config().model_dump(), warm=self._warm)

    @classmethod
    def _from_config(cls, config: Any) -> Self:
        agent = BaseChatAgent.load_component(config.agent)
        return cls(agent, config.return_value_as_last_message, warm=config.warm)


class TeamTool(_Delegating, BuiltInTeamTool):
    """AutoGen's tool that runs a team, the first speaker's prompt of which is warm when it starts.

    For `RoundRobinGroupChat` and `Swarm`, until the team has run: who speaks first then only the team knows.

    Args:
        team: as the built-in.
        name: as the built-in.
        description: as the built-in.
        return_value_as_last_message: as the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the sub-agent's server, if you have one made. It is no part of the component's configuration.
    """

    component_config_schema: Any = TeamToolConfig
    component_provider_override = "smoothagent_autogen.TeamTool"

    def __init__(
        self,
        team: BaseGroupChat,
        name: str,
        description: str,
        return_value_as_last_message: bool = False,
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(team, name, description, return_value_as_last_message)
        self._set_up(warm, backend)

    def sub_agent(self) -> ChatAgent | Team:
        """The team."""
        return self._team

    def _to_config(self) -> Any:
        return TeamToolConfig(**super()._to_config().model_dump(), warm=self._warm)

    @classmethod
    def _from_config(cls, config: Any) -> Self:
        team = BaseGroupChat.load_component(config.team)
        return cls(team, config.name, config.description, config.return_value_as_last_message, warm=config.warm)


class _Ear:
    """Hears the calls that one answer makes."""

    def __init__(self, tools: Mapping[str, _Delegating]) -> None:
        self._tools = tools
        self._opened: dict[int, Opened | None] = {}

    def piece(self, delta: Any) -> None:
        """A piece of a tool call: the openai client's ``ChoiceDeltaToolCall``."""
        with harmless("a sub-agent"):
            function = delta.function
            if function is None:
                return
            if delta.index not in self._opened and function.name:
                tool = self._tools.get(function.name)
                self._opened[delta.index] = tool.called() if tool is not None else None
            opened = self._opened.get(delta.index)
            if opened is not None and function.arguments:
                opened.feed(function.arguments)


class _Delegates:
    """What is warmed in this process for sub-agents that have not started."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[Opened] = weakref.WeakSet()
        self._tools: dict[int, weakref.ref[_Delegating]] = {}
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()

    def offers(self, parameters: object, tool: _Delegating) -> None:
        """It is known by its parameters, for as long as it lives."""
        key = id(parameters)
        self._tools[key] = weakref.ref(tool, lambda _: self._tools.pop(key, None))

    def offered(self, tool: Tool | ToolSchema) -> tuple[str, _Delegating | None]:
        """A tool that a call offers, and which of ours that is."""
        if isinstance(tool, _Delegating):
            return tool.name, tool
        schema = tool.schema if isinstance(tool, Tool) else tool
        parameters = schema.get("parameters")
        found = self._tools.get(id(parameters))
        ours = None if found is None else found()
        return schema["name"], ours if ours is not None and ours.has(parameters) else None

    def wait_for(self, opened: Opened) -> None:
        """Its sub-agent may start."""
        with self._lock:
            self._waiting.add(opened)

    def begins(self, asked: Asked) -> _Ear | None:
        """A call is made that may start sub-agents."""
        offered = {name: tool for name, tool in map(self.offered, asked.call.get("tools") or ()) if tool is not None}
        told = tells_deltas(asked)
        for tool in offered.values():
            with harmless("a sub-agent"):
                tool.offered(told=told)
        return _Ear(offered) if offered and told else None

    def started(self, asked: Asked) -> Delegation[LLMMessage] | None:
        """What was warmed for a call that is a sub-agent's first."""
        if not self._waiting:
            return None
        with self._lock:
            waiting = list(self._waiting)
        for opened in waiting:
            delegation = opened.started_by(asked)
            if delegation is not None:
                with self._lock:
                    self._waiting.discard(opened)
                return delegation
        return None


_DELEGATES = _Delegates()
