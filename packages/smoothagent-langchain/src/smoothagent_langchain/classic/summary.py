"""All of the conversation as one summary."""

from __future__ import annotations

import logging
from typing import Any

from langchain_classic.memory import ConversationSummaryMemory as BuiltIn
from langchain_classic.memory.chat_memory import BaseChatMemory
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from pydantic import PrivateAttr

from smoothagent.unseen import unseen
from smoothagent_langchain.classic.summarized import SummarizedMemory, kept
from smoothagent_langchain.shape import History

log = logging.getLogger("smoothagent")

_MOST_PENDING = 4
"""Messages that may be given as they are, after the summary, before it is waited for."""


class ConversationSummaryMemory(SummarizedMemory, BuiltIn):
    """``ConversationSummaryMemory``: the summary is written after the answer, not before it; async summarizes, too.

    Where the next question comes before the summary is there, the newest turn is given as it is, after the summary of
    those before it; with more than two such turns it is waited for, at most 30 s. ``buffer`` is the summary that was
    taken last, so it is a turn behind until the next load, `flush`, or with ``strict``.
    """

    _known: tuple[object, str] = PrivateAttr(default=(None, ""))
    """The chat history and the summary that what is pending belongs to."""

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the built-in, with the newest summary there is."""
        del inputs
        self._look()
        if self._latest:
            self._running.wait(due=self._is_late)
            self._settle()
            if self._is_given_up():
                with kept():
                    self._on_the_spot()
        return self._loaded()

    async def _aload(self) -> dict[str, Any]:
        self._look()
        if self._latest:
            await self._running.await_(due=self._is_late)
            self._settle()
            if self._is_given_up():
                with kept():
                    await self._aon_the_spot()
        return self._loaded()

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in, but for the summary, which is written after this."""
        turn = self._turn(inputs, outputs)
        self._look()
        BaseChatMemory.save_context(self, inputs, outputs)
        self._saved(turn)
        if self.strict:
            self.flush()
            if self._latest:  # as the built-in, whose error the caller gets
                self._on_the_spot()

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`; the built-in's never summarizes."""
        turn = self._turn(inputs, outputs)
        self._look()
        await BaseChatMemory.asave_context(self, inputs, outputs)
        self._saved(turn)
        if self.strict:
            await self.aflush()
            if self._latest:
                await self._aon_the_spot()

    def _begin(self) -> None:
        self._look()
        if self._latest and not self._running.busy:
            self._summarize(self._latest, self.buffer)

    @property
    def _is_short(self) -> bool:
        return bool(self._latest)

    @property
    def _is_late(self) -> bool:
        return len(self._latest) > _MOST_PENDING

    def _is_given_up(self) -> bool:
        """Whether it has failed in the background and cannot be put off any longer."""
        if not self._is_late or not self._running.failed():
            return False
        self._running.take(self.buffer, self._latest)  # says so
        return True

    def _turn(self, inputs: dict[str, Any], outputs: dict[str, str]) -> list[BaseMessage]:
        human, ai = self._get_input_output(inputs, outputs)
        return [HumanMessage(content=human), AIMessage(content=ai)]

    def _look(self) -> None:
        """What is pending is none of another conversation's: one that was reset by hand, or is another's by now."""
        history, summary = self._known
        chat = self.chat_memory
        emptied = isinstance(chat, InMemoryChatMessageHistory) and not chat.messages and not self.buffer
        if history is not chat or emptied or summary != self.buffer:
            # It may be another user's by now, whose summary was put in its place.
            if self._latest and self.buffer:
                log.warning(
                    "the buffer of a summary memory was set by hand while %d messages were not in it yet: they are "
                    "dropped; use strict=True, or call flush() first",
                    len(self._latest),
                )
            self._running.drop()
            self._latest = []
        self._known = (chat, self.buffer)

    def _saved(self, turn: list[BaseMessage]) -> None:
        if self._running.failed() or self._running.hangs():
            self._running.take(self.buffer, self._latest)  # says so
            self._running.drop()
        self._latest = [*self._latest, *turn]
        self._settle()
        if not self._running.busy:
            self._summarize(self._latest, self.buffer)

    def _loaded(self) -> dict[str, Any]:
        return self._watched({self.memory_key: self._history(self.buffer, self._latest)})

    def _settle(self) -> None:
        """Take the summary that is ready. What has come since it was begun is the next one's."""
        if self._running.failed() and self._running.fits(self.buffer, self._latest):
            return  # the next turn asks again
        taken = self._running.take(self.buffer, self._latest)
        if taken is not None:
            self._put(taken.text, taken.covered)
            self._summarize(self._latest, self.buffer)

    def _on_the_spot(self) -> None:
        """Summarize what is pending here and now. Raises as the model does."""
        covered, known = list(self._latest), self._known
        with unseen():
            summary = self.predict_new_summary(covered, known[1])
        self._put_where_it_fits(summary, covered, known)

    async def _aon_the_spot(self) -> None:
        covered, known = list(self._latest), self._known
        with unseen():
            summary = await self.apredict_new_summary(covered, known[1])
        self._put_where_it_fits(summary, covered, known)

    def _put_where_it_fits(self, summary: str, covered: list[BaseMessage], known: tuple[object, str]) -> None:
        same = known[0] is self.chat_memory and known[1] == self.buffer and self._latest[: len(covered)] == covered
        if same and summary.strip():
            self._running.drop()
            self._put(summary, len(covered))

    def _put(self, summary: str, covered: int) -> None:
        self.buffer, self._latest = summary, self._latest[covered:]
        self._known = (self.chat_memory, summary)

    def _forget(self) -> None:
        super()._forget()
        self.buffer = ""
        self._known = (self.chat_memory, "")

    @property
    def _summary(self) -> str:
        return self.buffer

    def _history(self, summary: str, messages: list[BaseMessage]) -> History:
        if self.return_messages:
            return [self.summary_message_cls(content=summary), *messages]
        return "\n".join(part for part in (summary, self._text(messages)) if part)
