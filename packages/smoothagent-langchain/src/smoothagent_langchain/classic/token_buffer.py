"""The newest messages within a number of tokens."""

from __future__ import annotations

from typing import Any

from langchain_classic.memory import ConversationTokenBufferMemory as BuiltIn
from langchain_classic.memory.chat_memory import BaseChatMemory
from langchain_core.messages import BaseMessage
from langchain_core.runnables import run_in_executor

from smoothagent_langchain.classic.pruned import PrunedMemory
from smoothagent_langchain.codec import alike

_TRIES = 4
"""Counts of a history that others change meanwhile."""


class ConversationTokenBufferMemory(PrunedMemory, BuiltIn):
    """``ConversationTokenBufferMemory``: the newest messages within ``max_token_limit`` tokens; async prunes, too."""

    @property
    def buffer_as_str(self) -> str:
        """The buffer as one text."""
        return self._text(self.buffer_as_messages)

    @property
    def buffer_as_messages(self) -> list[BaseMessage]:
        """The buffer as messages."""
        return self._present(self.chat_memory.messages)

    async def _aload(self) -> dict[str, Any]:
        return self._watched({self.memory_key: self._given(self._present(await self.chat_memory.aget_messages()))})

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in; then the next prompt is warmed, if messages were dropped."""
        BaseChatMemory.save_context(self, inputs, outputs)
        messages = self._present(self.chat_memory.messages)
        self._prune(messages, self._surplus(messages, self.max_token_limit))

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`; the built-in's never counts nor prunes."""
        await BaseChatMemory.asave_context(self, inputs, outputs)
        for _ in range(_TRIES):
            messages = list(self._present(await self.chat_memory.aget_messages()))
            try:
                # A model's counter may ask its server.
                surplus = await run_in_executor(None, self._surplus, messages, self.max_token_limit)
            except Exception as error:
                self._upcoming.say_once("tokens", f"nothing is pruned: the model cannot count tokens: {error!r}")
                return
            present = self._present(await self.chat_memory.aget_messages())
            if len(present) >= len(messages) and all(map(alike, messages, present)):
                self._prune(present, surplus)
                return
            # It was pruned, or cleared, meanwhile.

    def _prune(self, messages: list[BaseMessage], surplus: int) -> None:
        if surplus:
            left = messages[surplus:]
            self._drop(messages, surplus)
            self._upcoming.expect(self._given(left))
