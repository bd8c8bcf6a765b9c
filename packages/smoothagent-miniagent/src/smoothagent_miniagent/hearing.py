"""What an agent's model says of sub-agents while it writes its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from smoothagent import Delegation
from smoothagent.harmless import harmless
from smoothagent.jsonstream import FieldStream

FIELD = "task"
"""The argument with the instruction, which is all of the sub-agent's first message."""


class Delegates(ABC):
    """A tool that starts sub-agents."""

    name: str

    @abstractmethod
    def offered(self, parent: Any, *, streamed: bool) -> None:
        """A model is asked that may call it: what was opened in vain is given up, but for one where nothing streams."""

    @abstractmethod
    def opened(self) -> Ready:
        """A sub-agent may be called for: its prompt is warmed."""

    @abstractmethod
    def give_up(self) -> None:
        """Nobody will call it any more."""


class Ready:
    """A sub-agent that waits for its task.

    Args:
        agent: the sub-agent.
        delegation: warms its prompt.

    Attributes:
        text: what is known of the task.
    """

    def __init__(self, agent: Any, delegation: Delegation[Any]) -> None:
        self.agent, self.delegation = agent, delegation
        self.text = ""
        self._stream = FieldStream(FIELD)

    def feed(self, fragment: str) -> None:
        """The next fragment of the call's arguments."""
        text = self._stream.feed(fragment)
        if text:
            self.text += text
            if self.delegation.waits:
                self.delegation.feed(text)


class Heard:
    """Hears the calls that one answer of an agent's model makes, while it is written.

    Args:
        agent: the agent.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._tools = {tool.name: tool for tool in delegates_in(agent.tools)}
        self._opened: dict[int, Ready | None] = {}

    def begins(self, *, streamed: bool) -> None:
        """The model is asked."""
        for tool in self._tools.values():
            with harmless("a sub-agent"):
                tool.offered(self._agent, streamed=streamed)

    def piece(self, delta: Any) -> None:
        """A piece of a tool call: the openai client's ``ChoiceDeltaToolCall``."""
        with harmless("a sub-agent"):
            function = delta.function
            if function is None:
                return
            if delta.index not in self._opened and function.name:
                tool = self._tools.get(function.name)
                self._opened[delta.index] = tool.opened() if tool is not None else None
            ready = self._opened.get(delta.index)
            if ready is not None and function.arguments:
                ready.feed(function.arguments)


def delegates_in(tools: Mapping[str, Any]) -> list[Delegates]:
    """Those of an agent's tools that start sub-agents."""
    return [tool for tool in tools.values() if isinstance(tool, Delegates)]
