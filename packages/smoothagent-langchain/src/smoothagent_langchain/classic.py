"""Drop-ins for the classic memories of ``langchain_classic``, whose summaries and prompts are ready when asked for.

::

    from smoothagent_langchain.classic import ConversationSummaryBufferMemory  # instead of langchain_classic.memory

A memory's boundary is `save_context`, its commit `load_memory_variables`; in between the user reads and writes.
The built-ins summarize in `save_context`, before the user gets the answer, and their async ways never prune or
summarize (`ConversationTokenBufferMemory`, `ConversationSummaryMemory`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Generator, Sequence
from typing import Any, Self, cast

from langchain_classic.memory import ConversationBufferWindowMemory as BuiltInWindow
from langchain_classic.memory import ConversationSummaryBufferMemory as BuiltInSummaryBuffer
from langchain_classic.memory import ConversationSummaryMemory as BuiltInSummary
from langchain_classic.memory import ConversationTokenBufferMemory as BuiltInTokenBuffer
from langchain_classic.memory.chat_memory import BaseChatMemory
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, get_buffer_string
from langchain_core.runnables import run_in_executor
from pydantic import Field, PrivateAttr

from smoothagent_langchain.aside import quiet, unseen
from smoothagent_langchain.chains import History, Upcoming
from smoothagent_langchain.codec import alike
from smoothagent_langchain.running import RunningSummary, snapshot

log = logging.getLogger("smoothagent")

_TRIES = 4
"""Counts of a history that others change meanwhile."""
_MISSED = "a summary that was waited for has not come, the messages are kept as they are: %s"
_MOST_PENDING = 4
"""Messages that may be given as they are, after the summary, before it is waited for."""
_LOADS = ("load_memory_variables", "buffer", "buffer_as_messages", "buffer_as_str")
"""What a subclass of the user's may have made its own."""


class _WarmedMemory(BaseChatMemory):
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
            if cls.__module__ == __name__:
                return False
            if any(name in cls.__dict__ for name in names):
                return True
        return False


class ConversationBufferWindowMemory(_WarmedMemory, BuiltInWindow):
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


class _PrunedMemory(_WarmedMemory):
    """The oldest messages go where there are too many.

    Those of a history that keeps its messages elsewhere (a file, a database) are passed over and stay there: the
    built-ins pop them off a copy, and so drop nothing.
    """

    llm: BaseLanguageModel  # pyright: ignore[reportMissingTypeArgument]  pydantic needs the bare class
    max_token_limit: int = 2000
    _passed: list[bytes] = PrivateAttr(default_factory=list[bytes])
    _passed_of: object = PrivateAttr(default=None)
    """The history whose first messages are passed over, each by its digest."""

    def _forget(self) -> None:
        super()._forget()
        self._passed = []

    def _present(self, messages: list[BaseMessage]) -> list[BaseMessage]:
        """What has not been pruned."""
        passed = self._passed
        same = self._passed_of is self.chat_memory and len(messages) >= len(passed)
        if passed and not (same and passed == [*map(_mark, messages[: len(passed)])]):
            passed = self._passed = []  # another conversation, or one that was edited
        return messages[len(passed) :] if passed else messages

    def _drop(self, messages: list[BaseMessage], count: int) -> None:
        """Prune the first ``count`` of ``messages``, which are the history's own or what is left of them."""
        chat = self.chat_memory
        own: object = vars(chat).get("messages")  # not by asking: where it is a property, that reads a database
        if isinstance(own, list):
            del own[:count]  # as the built-ins pop from it
        else:
            self._passed = [*self._passed, *map(_mark, messages[:count])]
            self._passed_of = chat

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


class _SummarizedMemory(_WarmedMemory):
    """A summary that is written while the user reads the answer.

    Attributes:
        strict: have the summary made in `save_context`, as the built-in does; else it may come a turn later, and what
            it will cover is given as it is until then. For memories that are made anew for each request, or saved
            after each turn.
    """

    strict: bool = False
    _running: RunningSummary = PrivateAttr(default_factory=RunningSummary)
    _latest: list[BaseMessage] = PrivateAttr(default_factory=list[BaseMessage])
    """The messages that are in no summary, as of the last load or save: the lane does not ask a database."""

    def __copy__(self) -> Self:
        """A copy has its own summaries made."""
        twin = super().__copy__()
        twin._running, twin._latest = RunningSummary(), list(self._latest)
        return twin

    def flush(self) -> None:
        """Wait for what is being summarized, 30 s a summary, and put it in its place: before the memory is saved."""
        self._begin()
        while self._owes and not self._running.failed():
            before = self._running.count
            self._running.wait(due=True)
            self._settle()
            if before == self._running.count:
                break  # it does not come
        if self._is_short:
            log.warning(_MISSED, self._running.why)

    async def aflush(self) -> None:
        """`flush`, on a loop."""
        self._begin()
        while self._owes and not self._running.failed():
            before = self._running.count
            await self._running.await_(due=True)
            await self._asettle()
            if before == self._running.count:
                break
        if self._is_short:
            log.warning(_MISSED, self._running.why)

    def _begin(self) -> None:
        """Begin what is owed, if nothing is being written."""

    @property
    def _is_short(self) -> bool:
        """Whether something should be in the summary that is not."""
        raise NotImplementedError

    async def _asettle(self) -> None:
        """`_settle`, on a loop."""
        self._settle()

    @property
    def _owes(self) -> bool:
        """Whether there is anything that should be in the summary and is being written."""
        return self._running.busy and bool(self._latest)

    def _settle(self) -> None:
        """Take the summary that is ready."""
        raise NotImplementedError

    def _forget(self) -> None:
        super()._forget()
        self._running.drop()
        self._latest = []

    def _summarize(self, covered: list[BaseMessage], existing: str) -> None:
        """Have ``covered`` added to the summary, by a copy of this memory whose model shows in nobody's traces."""
        if covered:
            twin: Any = self.model_copy(update={"llm": quiet(cast("Any", self).llm)})
            lane, covered = self._upcoming.lane, snapshot(covered)
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
                covered, known = list(self._latest), self._known
                with unseen(), _kept():
                    self._on_the_spot(self.predict_new_summary(covered, known[1]), covered, known)
        return self._loaded()

    async def _aload(self) -> dict[str, Any]:
        self._look()
        if self._latest:
            await self._running.await_(due=self._is_late)
            self._settle()
            if self._is_given_up():
                covered, known = list(self._latest), self._known
                with unseen(), _kept():
                    self._on_the_spot(await self.apredict_new_summary(covered, known[1]), covered, known)
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
                covered, known = list(self._latest), self._known
                with unseen():
                    self._on_the_spot(self.predict_new_summary(covered, known[1]), covered, known)

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, str]) -> None:
        """As `save_context`; the built-in's never summarizes."""
        turn = self._turn(inputs, outputs)
        self._look()
        await BaseChatMemory.asave_context(self, inputs, outputs)
        self._saved(turn)
        if self.strict:
            await self.aflush()
            if self._latest:
                covered, known = list(self._latest), self._known
                with unseen():
                    self._on_the_spot(await self.apredict_new_summary(covered, known[1]), covered, known)

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

    def _on_the_spot(self, summary: str, covered: list[BaseMessage], known: tuple[object, str]) -> None:
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
        if self._due and self._running.fits(self.moving_summary_buffer, self._present(self.chat_memory.messages)):
            self._running.wait(due=self._is_late)
            self._take(self.chat_memory.messages)
        if self._is_given_up(self.chat_memory.messages):
            with _kept():
                self.prune()
        return self._loaded(self.chat_memory.messages)

    async def _aload(self) -> dict[str, Any]:
        stored = await self.chat_memory.aget_messages()
        if self._due and self._running.fits(self.moving_summary_buffer, self._present(stored)):
            await self._running.await_(due=self._is_late)
            stored = await self.chat_memory.aget_messages()
            self._take(stored)
        if self._is_given_up(stored):
            with _kept():
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


def _mark(message: BaseMessage) -> bytes:
    return hashlib.blake2b(
        repr((message.type, message.content)).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


@contextlib.contextmanager
def _kept() -> Generator[None]:
    """A summary that fails on the spot, too, leaves everything as it is."""
    try:
        yield
    except Exception as error:
        log.warning("a summary failed, the messages are kept as they are: %r", error)


__all__ = [
    "ConversationBufferWindowMemory",
    "ConversationSummaryBufferMemory",
    "ConversationSummaryMemory",
    "ConversationTokenBufferMemory",
]
