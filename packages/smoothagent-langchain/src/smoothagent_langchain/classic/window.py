"""The last turns: a new prefix on every turn."""

from __future__ import annotations

from typing import Any

from langchain_classic.memory import ConversationBufferWindowMemory as BuiltIn
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage

from smoothagent_langchain.classic.warmed import WarmedMemory
from smoothagent_langchain.shape import History


class ConversationBufferWindowMemory(WarmedMemory, BuiltIn):
    """``ConversationBufferWindowMemory``: the last ``k`` turns, which are a new prefix on every turn.

    Attributes:
        llm: the chain's chat model; without it nothing is warmed, since the built-in knows no model.
    """

    llm: BaseLanguageModel | None = None  # pyright: ignore[reportMissingTypeArgument]  pydantic needs the bare class

    async def _aload(self) -> dict[str, Any]:
        return self._watched({self.memory_key: self._window(await self.chat_memory.aget_messages())})

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in; then the next window is warmed."""
        super().save_context(inputs, outputs)
        self._upcoming.expect(self._window(self.chat_memory.messages))

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`."""
        await super().asave_context(inputs, outputs)
        self._upcoming.expect(self._window(await self.chat_memory.aget_messages()))

    def _window(self, messages: list[BaseMessage]) -> History:
        return self._given(messages[-self.k * 2 :] if self.k > 0 else [])
