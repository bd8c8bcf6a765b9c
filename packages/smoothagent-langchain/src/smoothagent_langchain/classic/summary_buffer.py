"""The newest messages as they are, and a summary of those before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from langchain_classic.memory import ConversationSummaryBufferMemory as BuiltIn
from langchain_classic.memory.chat_memory import BaseChatMemory
from langchain_core.messages import BaseMessage
from pydantic import Field, PrivateAttr

from smoothagent.unseen import unseen
from smoothagent_langchain.classic.pruned import PrunedMemory
from smoothagent_langchain.classic.summarized import SummarizedMemory, kept
from smoothagent_langchain.codec import alike
from smoothagent_langchain.shape import History


class ConversationSummaryBufferMemory(SummarizedMemory, PrunedMemory, BuiltIn):
    """``ConversationSummaryBufferMemory``: what goes beyond the limit is summarized before it does.

    The summary is begun when the next turn is expected to reach ``max_token_limit``, and taken at the first load after
    that. Where it is late, the messages it covers are given as they are, up to a quarter above the limit; there it is
    waited for, at most 30 s. A summary that fails leaves everything as it is, and is asked for again after the next
    turn.

    Attributes:
        soft: where a summary is begun, as a fraction of the limit; default when the next turn will reach it.
    """

    soft: float | None = Field(default=None, gt=0, lt=1)
    _size: int | None = PrivateAttr(default=None)
    _growth: int = PrivateAttr(default=0)

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the built-in, with the summary that is due, if it is ready."""
        del inputs
        if self._due and self._running.fits(self.moving_summary_buffer, self._present(self.chat_memory.messages)):
            self._running.wait(due=self._is_late)
            self._take(self.chat_memory.messages)
        if self._is_given_up(self.chat_memory.messages):
            with kept():
                self.prune()
        return self._loaded(self.chat_memory.messages)

    async def _aload(self) -> dict[str, Any]:
        stored = await self.chat_memory.aget_messages()
        if self._due and self._running.fits(self.moving_summary_buffer, self._present(stored)):
            await self._running.await_(due=self._is_late)
            stored = await self.chat_memory.aget_messages()
            self._take(stored)
        if self._is_given_up(stored):
            with kept():
                await self.aprune()
        return self._loaded(await self.chat_memory.aget_messages())

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in, but for the summary, which is written beside it."""
        BaseChatMemory.save_context(self, inputs, outputs)
        if self._is_customised(("prune",)):
            self.prune()
            return
        self._saved(self.chat_memory.messages)
        if self.strict and self._due:
            self.flush()
            if self._due:
                self.prune()  # as the built-in, whose error the caller gets

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`."""
        await BaseChatMemory.asave_context(self, inputs, outputs)
        if self._is_customised(("prune", "aprune")):
            await self.aprune()
            return
        self._saved(await self.chat_memory.aget_messages())
        if self.strict and self._due:
            await self.aflush()
            if self._due:
                await self.aprune()

    async def _asettle(self) -> None:
        self._take(await self.chat_memory.aget_messages())

    @property
    def _owes(self) -> bool:
        return self._due and self._running.busy

    @property
    def _is_short(self) -> bool:
        return self._due

    def prune(self) -> None:
        """As the built-in: here and now."""
        stored = self.chat_memory.messages
        messages, existing = list(self._present(stored)), self.moving_summary_buffer
        surplus = self._surplus(messages, self.max_token_limit)
        if surplus:
            with unseen():
                summary = self.predict_new_summary(messages[:surplus], existing)
            self._replace(self._present(self.chat_memory.messages), messages[:surplus], existing, summary)

    async def aprune(self) -> None:
        """As `prune`."""
        messages, existing = list(self._present(await self.chat_memory.aget_messages())), self.moving_summary_buffer
        surplus = self._surplus(messages, self.max_token_limit)
        if surplus:
            with unseen():
                summary = await self.apredict_new_summary(messages[:surplus], existing)
            present = self._present(await self.chat_memory.aget_messages())
            self._replace(present, messages[:surplus], existing, summary)

    @property
    def _due(self) -> bool:
        return self._size is not None and self._size > self.max_token_limit

    @property
    def _is_late(self) -> bool:
        return self._size is not None and self._size > self.max_token_limit * 1.25

    def _is_given_up(self, stored: list[BaseMessage]) -> bool:
        """Whether it has failed in the background and cannot be put off any longer."""
        if not self._is_late or not self._running.failed():
            return False
        self._running.take(self.moving_summary_buffer, self._present(stored))  # says so
        return True

    def _settle(self) -> None:
        self._take(self.chat_memory.messages)

    def _take(self, stored: list[BaseMessage]) -> None:
        if self._running.failed():
            return  # the next turn asks again
        messages, existing = self._present(stored), self.moving_summary_buffer
        taken = self._running.take(existing, messages)
        if taken is not None:
            self._prepare(self._replace(messages, messages[: taken.covered], existing, taken.text))

    def _loaded(self, stored: list[BaseMessage]) -> dict[str, Any]:
        messages = self._latest = list(self._present(stored))
        return self._watched({self.memory_key: self._history(self.moving_summary_buffer, messages)})

    def _replace(
        self, messages: list[BaseMessage], covered: Sequence[BaseMessage], existing: str, summary: str
    ) -> list[BaseMessage]:
        """Let ``summary`` stand for what it covers, if that is still there; returns what is left."""
        covers = len(covered)
        same = existing == self.moving_summary_buffer and len(messages) >= covers
        if not same or not all(map(alike, covered, messages)):
            return list(messages)  # another summary was taken, or the history is another, meanwhile
        left = self._latest = messages[covers:]
        self._drop(messages, covers)
        self.moving_summary_buffer = summary
        self._size = self._tokens(left)
        self._running.drop()
        return left

    def _saved(self, stored: list[BaseMessage]) -> None:
        messages = self._latest = list(self._present(stored))
        size = self._tokens(messages)
        self._growth = max(0, size - self._size) if self._size is not None else 0
        self._size = size
        if self._running.failed() or self._running.hangs():
            self._running.take(self.moving_summary_buffer, messages)  # says so
            self._running.drop()
        if self._running.fits(self.moving_summary_buffer, messages):
            self._warm_ahead()  # with what has come
        else:
            self._prepare(messages)

    def _prepare(self, messages: list[BaseMessage]) -> None:
        """Begin a summary of what will be too much, if anything will be by the next turn."""
        limit, size, growth = self.max_token_limit, self._size or 0, self._growth
        if self._due:
            covered = self._surplus(messages, limit)
        elif growth and (size + growth > limit or (self.soft is not None and size >= self.soft * limit)):
            # What is to come until there is too much stays as it is.
            to_come = growth * max(1, math.ceil((limit + 1 - size) / growth))
            covered = self._surplus(messages, max(0, limit - to_come))
        else:
            return
        self._summarize(messages[:covered], self.moving_summary_buffer)

    def _forget(self) -> None:
        super()._forget()
        self.moving_summary_buffer, self._size, self._growth = "", None, 0

    @property
    def _summary(self) -> str:
        return self.moving_summary_buffer

    def _history(self, summary: str, messages: list[BaseMessage]) -> History:
        if summary:
            messages = [self.summary_message_cls(content=summary), *messages]
        return self._given(messages)
