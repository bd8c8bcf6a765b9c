"""Sub-agents that a tool starts: their prompts are warm before they make their first call."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.agent.workflow import BaseWorkflowAgent, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.tools import BaseTool

from smoothagent import Backend, ConfigurationError, Delegation, Ledger, MainRequest
from smoothagent.forks import after_fork
from smoothagent.harmless import harmless
from smoothagent.jsonstream import FieldStream
from smoothagent.lane import process_lane
from smoothagent_llamaindex.aside import AsideBackend
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike
from smoothagent_llamaindex.models import backend_for, given_for, prompt_for, same_model, to_wire_of

log = logging.getLogger("smoothagent")

_TALKS = 256
"""Conversations whose last delegations are remembered."""


@dataclass(frozen=True)
class Delegate:
    """A sub-agent that a tool starts.

    Attributes:
        agent: the sub-agent.
        field: the tool's argument that holds the instruction.
        template: the sub-agent's user message, with the argument in braces where the tool writes more around it, such
            as ``"Write notes about the following: {prompt}"``; default the argument alone. All else is taken as it
            stands.
    """

    agent: BaseWorkflowAgent
    field: str
    template: str | None = None

    @property
    def before(self) -> str:
        """What stands before the argument in the sub-agent's user message."""
        mark = f"{{{self.field}}}"
        if self.template is None:
            return ""
        if mark not in self.template:
            raise ConfigurationError(f"template {self.template!r} of a delegate: it must hold {mark}, its field")
        return self.template.partition(mark)[0]

    @property
    def after(self) -> str:
        """What stands after it."""
        return "" if self.template is None else self.template.partition(f"{{{self.field}}}")[2]

    def head(self) -> list[ChatMessage]:
        """What its first request begins with."""
        text = self.agent.system_prompt
        return [ChatMessage(role=MessageRole.SYSTEM, content=text)] if text else []

    def params(self) -> dict[str, Any] | None:
        """The arguments of its first call besides the messages; None where only its run can tell."""
        agent = self.agent
        if not isinstance(agent, FunctionAgent) or agent.tool_retriever is not None or agent.initial_state:
            return None
        llm: Any = agent.llm
        # A server may leave out the tools that its first call must not use.
        if agent.initial_tool_choice is not None or not hasattr(llm, "_prepare_chat_with_tools_compat"):
            return None
        tools = [tool for tool in agent.tools or () if isinstance(tool, BaseTool)]
        made: dict[str, Any] = dict(
            llm._prepare_chat_with_tools_compat(
                tools, chat_history=[], allow_parallel_tool_calls=agent.allow_parallel_tool_calls
            )
        )
        made.pop("messages", None)
        return made


class Opened:
    """A call that the model is writing, and the sub-agent that is warmed for it."""

    def __init__(self, delegate: Delegate, delegation: Delegation[ChatMessage]) -> None:
        self.delegate, self.delegation = delegate, delegation
        self.head = delegate.head()
        self._stream, self._read = FieldStream(delegate.field), 0
        self.text = ""
        self._open = True

    def feed(self, arguments: str) -> None:
        """The call's arguments are ``arguments`` by now."""
        if arguments == "{}":
            return  # what LlamaIndex makes of arguments that have not begun
        more, self._read = arguments[self._read :], max(self._read, len(arguments))
        text = self._stream.feed(more) if more else ""
        if text and self._open:
            self.text += text
            self.delegation.feed(text)

    def instruction_in(self, messages: Sequence[ChatMessage]) -> str | None:
        """The instruction, where these messages are the sub-agent's first."""
        head, delegate = self.head, self.delegate
        if not self._open or len(messages) != len(head) + 1 or messages[-1].role != MessageRole.USER:
            return None
        if not all(map(alike, head, messages)):
            return None
        said = messages[-1].content or ""
        if not (said.startswith(delegate.before + self.text) and said.endswith(delegate.after)):
            return None
        return said[len(delegate.before) :]

    def take(self, instruction: str) -> Started:
        """The sub-agent starts."""
        self._open = False
        self.delegation.on_commit(instruction)
        return Started(self.delegation)

    def cancel(self) -> None:
        """It is not delegated after all; one whose sub-agent has started is left alone."""
        if self._open:
            self._open = False
            self.delegation.cancel()


class Started:
    """A sub-agent's first call.

    Attributes:
        delegation: what was warmed for it.
    """

    def __init__(self, delegation: Delegation[ChatMessage]) -> None:
        self.delegation = delegation

    def request(self) -> MainRequest:
        """Marks, paces and measures it."""
        return self.delegation.main_request()

    def ended(self) -> None:
        """What is warm is warm, and stays in the cache without a lease."""
        self.delegation.cancel()


class Ear:
    """Hears the calls that one answer makes."""

    def __init__(self, delegates: Delegates) -> None:
        self._delegates = delegates
        self._opened: dict[int, Opened | None] = {}

    def hear(self, message: ChatMessage) -> None:
        """The answer is ``message`` by now."""
        if not self._delegates:
            return
        with harmless("a sub-agent"):
            for number, call in enumerate(LlamaIndexCodec().decode(message).tool_calls):
                if not call.name:
                    continue
                if number not in self._opened:
                    self._opened[number] = self._delegates.open(call.name)
                opened = self._opened[number]
                if opened is not None:
                    opened.feed(call.arguments)

    def give_up(self) -> None:
        """What it has opened and nobody has started is not delegated."""
        for opened in self._opened.values():
            if opened is not None:
                opened.cancel()


class _Waiting:
    """What was opened in this process and has not started."""

    def __init__(self) -> None:
        self.opened: weakref.WeakSet[Opened] = weakref.WeakSet()
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self.lock = threading.Lock()


_WAITING = _Waiting()


class Delegates:
    """The sub-agents that an LLM's calls may start, by tool.

    Args:
        delegates: by the names of the tools that start them.
        warm: as `backend_for` says.
        backend: the sub-agents' server, instead of the one that `backend_for` finds.

    Attributes:
        ledger: counts what warming cost and saved.
    """

    def __init__(
        self, delegates: Mapping[str, Delegate], *, warm: bool | None = None, backend: Backend | None = None
    ) -> None:
        self._delegates, self._warm, self._backend = dict(delegates), warm, backend
        for delegate in self._delegates.values():
            _ = delegate.before  # a template without its field is told here
        self.ledger = Ledger()
        self._ears: OrderedDict[str, Ear] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._delegates)

    def listen(self, opening: str) -> Ear:
        """An ear for the next answer of a conversation; what its last one opened and nobody started is given up."""
        ear = Ear(self)
        if self._delegates:
            before = self._ears.pop(opening, None)
            if before is not None:
                before.give_up()
            self._ears[opening] = ear
            while len(self._ears) > _TALKS:
                self._ears.popitem(last=False)[1].give_up()
        return ear

    def backend_of(self, llm: LLM) -> Backend | None:
        """The server that an LLM's calls go to, where there is anything to pace on it."""
        return (given_for(self._backend, llm) or backend_for(llm, warm=self._warm)) if self._delegates else None

    def open(self, tool: str) -> Opened | None:
        """Begin to warm the sub-agent of a tool; None where it has none, or nothing is known of its prompt."""
        delegate = self._delegates.get(tool)
        params = delegate.params() if delegate is not None else None
        if delegate is None or params is None:
            return None
        llm, before = delegate.agent.llm, delegate.before
        backend = given_for(self._backend, llm) or backend_for(llm, warm=self._warm)
        if isinstance(backend, AsideBackend):
            backend.params = params
        opened = Opened(
            delegate,
            Delegation(
                backend=backend,
                codec=LlamaIndexCodec(to_wire_of(llm)),
                lane=process_lane(),
                ledger=self.ledger,
                prompt=prompt_for(llm, params),
                head=delegate.head(),
                instruction=lambda text: ChatMessage(role=MessageRole.USER, content=before + text),
            ),
        )
        with _WAITING.lock:
            _WAITING.opened.add(opened)
        return opened

    @staticmethod
    def started_by(llm: LLM, messages: Sequence[ChatMessage]) -> Started | None:
        """The delegation that a call of ``llm`` with these messages is the first of."""
        if not _WAITING.opened:
            return None
        with _WAITING.lock:
            waiting = list(_WAITING.opened)
        for opened in waiting:
            if not same_model(opened.delegate.agent.llm, llm):
                continue
            instruction = opened.instruction_in(messages)
            if instruction is not None:
                with _WAITING.lock:
                    _WAITING.opened.discard(opened)
                return opened.take(instruction)
        return None
