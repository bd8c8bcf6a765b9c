"""Drop-ins for the classic memories of ``langchain_classic``, whose summaries and prompts are ready when asked for.

::

    from smoothagent_langchain.classic import ConversationSummaryBufferMemory  # instead of langchain_classic.memory

A memory's boundary is `save_context`, its commit `load_memory_variables`; in between the user reads and writes.
The built-ins summarize in `save_context`, before the user gets the answer, and their async ways never prune or
summarize (`ConversationTokenBufferMemory`, `ConversationSummaryMemory`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from langchain_classic.memory import ConversationBufferWindowMemory as BuiltInWindow
from langchain_classic.memory import ConversationSummaryBufferMemory as BuiltInSummaryBuffer
from langchain_classic.memory import ConversationSummaryMemory as BuiltInSummary
from langchain_classic.memory import ConversationTokenBufferMemory as BuiltInTokenBuffer
from langchain_classic.memory.chat_memory import BaseChatMemory
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, get_buffer_string
from pydantic import Field, PrivateAttr

from smoothagent_langchain.aside import quiet, unseen
from smoothagent_langchain.chains import History, Upcoming
from smoothagent_langchain.codec import alike
from smoothagent_langchain.running import RunningSummary

log = logging.getLogger("smoothagent")


class _WarmedMemory(BaseChatMemory):
    """What all of them do: the chain's next prompt is prefilled once a turn is saved.

    Attributes:
        warm: prefill ahead; default yes, except at hosted endpoints.
    """

    warm: bool | None = None
    _upcoming: Upcoming = PrivateAttr(default_factory=Upcoming)

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the built-in; the prompt it becomes part of is looked at when it is sent."""
        return self._watched(super().load_memory_variables(inputs))

    def clear(self) -> None:
        """As the built-in."""
        super().clear()
        self._upcoming.forget()

    async def aclear(self) -> None:
        """As the built-in."""
        await super().aclear()
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


class ConversationBufferWindowMemory(_WarmedMemory, BuiltInWindow):
    """``ConversationBufferWindowMemory``: the last ``k`` turns, which are a new prefix on every turn.

    Attributes:
        llm: the chain's chat model; without it nothing is warmed, since the built-in knows no model.
    """

    llm: BaseLanguageModel | None = None  # pyright: ignore[reportMissingTypeArgument]  pydantic needs the bare class

    async def aload_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As `load_memory_variables`, in the caller's context."""
        del inputs
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


class _PrunedMemory(_WarmedMemory):
    """The oldest messages go where there are too many.

    Those of a history that keeps its messages elsewhere (a file, a database) are passed over and stay there: the
    built-ins pop them off a copy, and so drop nothing.
    """

    llm: BaseLanguageModel  # pyright: ignore[reportMissingTypeArgument]  pydantic needs the bare class
    max_token_limit: int = 2000
    _passed: list[BaseMessage] = PrivateAttr(default_factory=list[BaseMessage])

    def clear(self) -> None:
        """As the built-in."""
        super().clear()
        self._passed = []

    async def aclear(self) -> None:
        """As the built-in."""
        await super().aclear()
        self._passed = []

    def _present(self, messages: list[BaseMessage]) -> list[BaseMessage]:
        """What has not been pruned."""
        passed = self._passed
        if passed and (len(messages) < len(passed) or not all(map(alike, passed, messages))):
            passed = self._passed = []  # another conversation, or one that was edited
        return messages[len(passed) :] if passed else messages

    def _drop(self, messages: list[BaseMessage], count: int) -> None:
        """Prune the first ``count`` of ``messages``, which are the history's own or what is left of them."""
        if isinstance(self.chat_memory, InMemoryChatMessageHistory):
            del self.chat_memory.messages[:count]
        else:
            self._passed = [*self._passed, *messages[:count]]

    def _surplus(self, messages: Sequence[BaseMessage], limit: float) -> int:
        """How many of the oldest messages are too many for ``limit`` tokens, counted as the built-in does."""
        count = 0
        while count < len(messages) and self._tokens(messages[count:]) > limit:
            count += 1
        return count

    def _tokens(self, messages: Sequence[BaseMessage]) -> int:
        return int(cast("Any", self).llm.get_num_tokens_from_messages(list(messages)))


class ConversationTokenBufferMemory(_PrunedMemory, BuiltInTokenBuffer):
    """``ConversationTokenBufferMemory``: the newest messages within ``max_token_limit`` tokens; async prunes, too."""

    @property
    def buffer_as_str(self) -> str:
        """The buffer as one text."""
        return self._text(self.buffer_as_messages)

    @property
    def buffer_as_messages(self) -> list[BaseMessage]:
        """The buffer as messages."""
        return self._present(self.chat_memory.messages)

    async def aload_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As `load_memory_variables`, in the caller's context."""
        del inputs
        return self._watched({self.memory_key: self._given(self._present(await self.chat_memory.aget_messages()))})

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in; then the next prompt is warmed, if messages were dropped."""
        BaseChatMemory.save_context(self, inputs, outputs)
        self._prune(self.chat_memory.messages)

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`; the built-in's never prunes."""
        await BaseChatMemory.asave_context(self, inputs, outputs)
        self._prune(await self.chat_memory.aget_messages())

    def _prune(self, stored: list[BaseMessage]) -> None:
        messages = self._present(stored)
        surplus = self._surplus(messages, self.max_token_limit)
        if surplus:
            left = messages[surplus:]
            self._drop(messages, surplus)
            self._upcoming.expect(self._given(left))


class _SummarizedMemory(_WarmedMemory):
    """A summary that is written while the user reads the answer.

    Attributes:
        strict: wait for a summary that is due, at most 30 s; else it may come a turn later, and what it will cover
            is given as it is until then.
    """

    strict: bool = False
    _running: RunningSummary = PrivateAttr(default_factory=RunningSummary)
    _latest: list[BaseMessage] = PrivateAttr(default_factory=list[BaseMessage])
    """The messages that are in no summary, as of the last load or save: the lane does not ask a database."""

    def clear(self) -> None:
        """As the built-in."""
        super().clear()
        self._forget()

    async def aclear(self) -> None:
        """As the built-in; and the summary goes, too."""
        await super().aclear()
        self._forget()

    def _forget(self) -> None:
        self._running.drop()
        self._latest = []

    def _summarize(self, covered: list[BaseMessage], existing: str) -> None:
        """Have ``covered`` added to the summary, by a copy of this memory whose model shows in nobody's traces."""
        if covered:
            twin: Any = self.model_copy(update={"llm": quiet(cast("Any", self).llm)})
            lane = self._upcoming.lane
            future = self._running.start(lane, lambda: twin.predict_new_summary(covered, existing), covered, existing)
            future.add_done_callback(lambda _: lane.call(self._warm_ahead))

    def _warm_ahead(self) -> None:
        """Warm what a prompt with the new summary begins with."""
        messages, text = self._latest, self._running.ready()
        if text is not None and self._running.fits(self._summary, messages):
            self._upcoming.expect(self._history(text, messages[self._running.covers :]))

    @property
    def _summary(self) -> str:
        """The summary so far."""
        raise NotImplementedError

    def _history(self, summary: str, messages: list[BaseMessage]) -> History:
        """What the chain is given."""
        raise NotImplementedError


class ConversationSummaryMemory(_SummarizedMemory, BuiltInSummary):
    """``ConversationSummaryMemory``: the summary is written after the answer, not before it; async summarizes, too.

    Where the next question comes before the summary is there, the newest turn is given as it is, after the summary of
    those before it; with more than two such turns it is waited for, at most 30 s.
    """

    def load_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the built-in, with the newest summary there is."""
        del inputs
        for patience in self._patiences():
            self._running.wait(patience)
            self._take()
        return self._loaded()

    async def aload_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As `load_memory_variables`, in the caller's context."""
        del inputs
        for patience in self._patiences():
            await self._running.await_(patience)
            self._take()
        return self._loaded()

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in, but for the summary, which is written after this."""
        BaseChatMemory.save_context(self, inputs, outputs)
        self._saved(self.chat_memory.messages)

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`; the built-in's never summarizes."""
        await BaseChatMemory.asave_context(self, inputs, outputs)
        self._saved(await self.chat_memory.aget_messages())

    def _patiences(self) -> Iterator[float]:
        """How long to wait for the summary, and for the next one, if that is not enough."""
        yield RunningSummary.patience(due=self.strict or len(self._latest) > _MOST_PENDING)
        if self._latest and (self.strict or len(self._latest) > _MOST_PENDING):
            yield RunningSummary.patience(due=True)

    def _saved(self, messages: list[BaseMessage]) -> None:
        self._latest = [*self._latest, *messages[-2:]]
        self._take()

    def _loaded(self) -> dict[str, Any]:
        return self._watched({self.memory_key: self._history(self.buffer, self._latest)})

    def _take(self) -> None:
        """Take the summary that is ready. What has come since it was begun is the next one's."""
        taken = self._running.take(self.buffer, self._latest)
        if taken is not None:
            self.buffer, self._latest = taken.text, self._latest[taken.covered :]
        if not self._running.busy:
            self._summarize(self._latest, self.buffer)

    def _forget(self) -> None:
        super()._forget()
        self.buffer = ""

    @property
    def _summary(self) -> str:
        return self.buffer

    def _history(self, summary: str, messages: list[BaseMessage]) -> History:
        if self.return_messages:
            return [self.summary_message_cls(content=summary), *messages]
        return "\n".join(part for part in (summary, self._text(messages)) if part)


class ConversationSummaryBufferMemory(_SummarizedMemory, _PrunedMemory, BuiltInSummaryBuffer):
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
        for patience in self._patiences():
            self._running.wait(patience)
            self._take(self.chat_memory.messages)
        return self._loaded(self.chat_memory.messages)

    async def aload_memory_variables(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As `load_memory_variables`, in the caller's context."""
        del inputs
        for patience in self._patiences():
            await self._running.await_(patience)
            self._take(await self.chat_memory.aget_messages())
        return self._loaded(await self.chat_memory.aget_messages())

    def save_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As the built-in, but for the summary, which is written beside it."""
        BaseChatMemory.save_context(self, inputs, outputs)
        self._saved(self.chat_memory.messages)

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`."""
        await BaseChatMemory.asave_context(self, inputs, outputs)
        self._saved(await self.chat_memory.aget_messages())

    def prune(self) -> None:
        """As the built-in: here and now."""
        messages = self._present(self.chat_memory.messages)
        surplus = self._surplus(messages, self.max_token_limit)
        if surplus:
            with unseen():
                summary = self.predict_new_summary(messages[:surplus], self.moving_summary_buffer)
            self._replace(messages, surplus, summary)

    async def aprune(self) -> None:
        """As `prune`."""
        messages = self._present(await self.chat_memory.aget_messages())
        surplus = self._surplus(messages, self.max_token_limit)
        if surplus:
            with unseen():
                summary = await self.apredict_new_summary(messages[:surplus], self.moving_summary_buffer)
            self._replace(messages, surplus, summary)

    @property
    def _due(self) -> bool:
        return self._size is not None and self._size > self.max_token_limit

    def _patiences(self) -> Iterator[float]:
        """How long to wait for the summary that is due, and for the next one, if that is not enough."""
        for wait in (RunningSummary.patience(due=False), 0.0):
            if self._due:
                size = self._size or 0
                late = self.strict or size > self.max_token_limit * 1.25
                yield RunningSummary.patience(due=True) if late else wait

    def _take(self, stored: list[BaseMessage]) -> None:
        messages = self._present(stored)
        taken = self._running.take(self.moving_summary_buffer, messages)
        if taken is not None:
            self._prepare(self._replace(messages, taken.covered, taken.text))

    def _loaded(self, stored: list[BaseMessage]) -> dict[str, Any]:
        messages = self._latest = list(self._present(stored))
        return self._watched({self.memory_key: self._history(self.moving_summary_buffer, messages)})

    def _replace(self, messages: list[BaseMessage], covered: int, summary: str) -> list[BaseMessage]:
        """Let ``summary`` stand for the first ``covered`` messages; returns the others."""
        left = self._latest = messages[covered:]
        self._drop(messages, covered)
        self.moving_summary_buffer = summary
        self._size = self._tokens(left)
        self._running.drop()
        return left

    def _saved(self, stored: list[BaseMessage]) -> None:
        messages = self._latest = list(self._present(stored))
        size = self._tokens(messages)
        self._growth = max(0, size - self._size) if self._size is not None else 0
        self._size = size
        if self._running.fits(self.moving_summary_buffer, messages) and not self._running.failed():
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


_MOST_PENDING = 4
"""Messages that may be given as they are, after the summary, before it is waited for."""

__all__ = [
    "ConversationBufferWindowMemory",
    "ConversationSummaryBufferMemory",
    "ConversationSummaryMemory",
    "ConversationTokenBufferMemory",
]
