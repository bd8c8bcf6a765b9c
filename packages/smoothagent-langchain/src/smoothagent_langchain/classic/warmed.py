"""A memory whose chain's next prompt is prefilled once a turn is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from langchain_classic.memory.chat_memory import BaseChatMemory
from langchain_core.messages import BaseMessage, get_buffer_string
from langchain_core.runnables import run_in_executor
from pydantic import PrivateAttr

from smoothagent_langchain.chains import Upcoming
from smoothagent_langchain.shape import History

_LOADS = ("load_memory_variables", "buffer", "buffer_as_messages", "buffer_as_str")
"""What a subclass of the user's may have made its own."""


class WarmedMemory(BaseChatMemory):
    """What all of them do: the chain's next prompt is prefilled once a turn is saved.

    Attributes:
        warm: prefill ahead; default yes, except at hosted endpoints.
    """

    warm: bool | None = None
    _upcoming: Upcoming = PrivateAttr(default_factory=Upcoming)

    def __copy__(self) -> Self:
        """A copy has a chain of its own."""
        twin = super().__copy__()
        twin._upcoming = Upcoming()
        return twin

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the built-in; the prompt it becomes part of is looked at when it is sent."""
        return self._watched(super().load_memory_variables(inputs))

    async def aload_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As `load_memory_variables`; the built-in's own way where a subclass has changed that."""
        if self._is_customised(_LOADS):
            return await run_in_executor(None, self.load_memory_variables, inputs)
        return await self._aload()

    async def _aload(self) -> dict[str, Any]:
        """Load asynchronously."""
        raise NotImplementedError

    def clear(self) -> None:
        """As the built-in."""
        super().clear()
        self._forget()

    async def aclear(self) -> None:
        """As the built-in, whose async way leaves the summary of `ConversationSummaryMemory`; here that goes, too."""
        await super().aclear()
        self._forget()

    def _forget(self) -> None:
        self._upcoming.forget()

    def _watched(self, loaded: dict[str, Any]) -> dict[str, Any]:
        history: History = next(iter(loaded.values()))
        self._upcoming.watch(history, getattr(self, "llm", None), warm=self.warm)
        return loaded

    def _text(self, messages: Sequence[BaseMessage]) -> str:
        prefixes = {name: getattr(self, name) for name in ("human_prefix", "ai_prefix")}
        return get_buffer_string(messages, **prefixes)

    def _given(self, messages: list[BaseMessage]) -> History:
        """The messages in the form that the chain gets them in."""
        return messages if self.return_messages else self._text(messages)

    def _is_customised(self, names: Sequence[str]) -> bool:
        """Whether a subclass of the user's has one of these of its own."""
        for cls in type(self).__mro__:
            if cls.__module__.startswith(f"{__package__}."):
                return False
            if any(name in cls.__dict__ for name in names):
                return True
        return False
