"""The newest messages as they are, and a summary of those before them, written ahead of time."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import ChatSummaryMemoryBuffer as BuiltIn
from llama_index.core.storage.chat_store import BaseChatStore
from pydantic import Field, PrivateAttr

from smoothagent import Backend
from smoothagent.harmless import harmless
from smoothagent.unseen import unseen
from smoothagent_llamaindex.aside import is_in_process
from smoothagent_llamaindex.codec import alike, is_summary, summary_message
from smoothagent_llamaindex.memory.buffer import answers
from smoothagent_llamaindex.memory.counts import Counts
from smoothagent_llamaindex.memory.lock import Lock
from smoothagent_llamaindex.memory.running import RunningSummary, asked_last, asking, growth_of, is_near
from smoothagent_llamaindex.memory.upcoming import Upcoming

log = logging.getLogger("smoothagent")


class ChatSummaryMemoryBuffer(BuiltIn):
    """``ChatSummaryMemoryBuffer`` whose summaries are written while the user reads, and whose next prompt is warm then.

    The built-in summarizes inside of ``get``, on every turn once the limit is reached, and loses what is put into the
    store meanwhile. Here a summary is begun while what should stay verbatim, half of the limit, is still to come, or
    two turns before ``token_limit`` is expected to be reached, if that is earlier. The first ``get`` beyond the limit
    that would find the prompt with it warm takes it. Until then the messages go on as they are, up to a quarter above
    the limit; there it is waited for, at most 30 s, and then made as the built-in does. A summary that fails leaves
    everything as it is. System messages that stand first are kept in front of it.

    Attributes:
        soft: where a summary is begun, as a fraction of the limit; default ``1 - keep``, but at least half, or two
            turns before the limit, if that is earlier.
        keep: how much stays verbatim at least, as a fraction of the limit.
        strict: summarize exactly at the limit and what is beyond it, as the built-in does, waiting for it.
        accept_cut_off: take a summary that ran into the LLM's length limit; otherwise one that was written ahead is
            rejected. On the spot what the LLM writes is taken, as by the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the LLM that calls.
    """

    soft: float | None = Field(default=None, gt=0, lt=1)
    keep: float = Field(default=0.5, gt=0, lt=1)
    strict: bool = False
    accept_cut_off: bool = False
    warm: bool | None = None
    backend: Any = Field(default=None, exclude=True)
    _upcoming: Upcoming = PrivateAttr(default_factory=Upcoming)
    _running: RunningSummary = PrivateAttr(default_factory=RunningSummary)
    _lock: Lock = PrivateAttr(default_factory=Lock)
    _size: int | None = PrivateAttr(default=None)
    _growth: int = PrivateAttr(default=0)
    _room: int | None = PrivateAttr(default=None)
    _last: tuple[int, ChatMessage | None] = PrivateAttr(default=(0, None))
    _counts: Counts = PrivateAttr(default_factory=Counts)

    @classmethod
    def from_defaults(
        cls,
        *args: Any,
        soft: float | None = None,
        keep: float = 0.5,
        strict: bool = False,
        accept_cut_off: bool = False,
        warm: bool | None = None,
        backend: Backend | None = None,
        **built_in: Any,
    ) -> ChatSummaryMemoryBuffer:
        """As the built-in; the rest as above. Raises ValueError for fractions that are none."""
        for name, value in (("soft", soft), ("keep", keep)):
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name}={value}: a fraction of token_limit, between 0 and 1")
        made = super().from_defaults(*args, **built_in)
        assert isinstance(made, ChatSummaryMemoryBuffer)
        made.soft, made.keep, made.strict = soft, keep, strict
        made.accept_cut_off, made.warm, made.backend = accept_cut_off, warm, backend
        return made

    def get(self, input: str | None = None, initial_token_count: int = 0, **kwargs: Any) -> list[ChatMessage]:  # noqa: A002
        """As the built-in, with the summary that is due, if it is ready."""
        del kwargs
        history = list(self.get_all())
        if not history:
            return []
        limit = self.token_limit
        if self.count_initial_tokens:
            if initial_token_count > limit:
                raise ValueError("Initial token count exceeds token limit")
            limit -= initial_token_count
        self._room = limit
        # An agent asks again before each call of a run. Within one its prompt goes on as it began.
        if not self._is_as_given(history):
            history = self._given(history, limit, ended=input is None and self._is_after_a_run(history))
        self._last = (len(history), history[-1] if history else None)
        if history:
            self._upcoming.watch(history, warm=self.warm, given=self.backend)
        return history

    def _is_after_a_run(self, history: Sequence[ChatMessage]) -> bool:
        """Whether an agent asks once more when its run has ended, which must not wait: it is not going to send this.

        Others, who put the question after they have asked, say what it is, or have never asked with one.
        """
        asked = self._last[1]
        return (
            not self.strict
            and self.llm is not None
            and asked is not None
            and not answers(asked)
            and answers(history[-1])
        )

    def _is_as_given(self, history: Sequence[ChatMessage]) -> bool:
        length, newest = self._last
        return newest is not None and length == len(history) and alike(newest, history[-1])

    def put(self, message: ChatMessage) -> None:
        """As the built-in."""
        with self._lock:
            super().put(message)
        if answers(message):
            self._saved()

    async def aput(self, message: ChatMessage) -> None:
        """As the built-in."""
        if type(self.chat_store).async_add_message is BaseChatStore.async_add_message:
            # That is the other one in a thread, and there the lock is not held across an await.
            await asyncio.to_thread(self.put, message)
            return
        await super().aput(message)
        if answers(message):
            await asyncio.to_thread(self._saved)

    def set(self, messages: list[ChatMessage]) -> None:
        """As the built-in: another history, for which a summary is used where it is one of that."""
        with self._lock:
            super().set(messages)
        self._size, self._growth, self._last = None, 0, (0, None)

    def reset(self) -> None:
        """As the built-in."""
        with self._lock:
            super().reset()
        self._running.drop()
        self._size, self._growth, self._room, self._last = None, 0, None, (0, None)
        self._upcoming.forget()

    def flush(self) -> None:
        """Wait for the summary that is due, at most 30 s, or make it, and put it in its place: before saving."""
        history, limit = list(self.get_all()), self._limit
        if self._is_due(history, limit):
            self._running.wait(due=True)
            if self._taken(history, limit) is None and self.llm is not None:
                self._on_the_spot(history, limit)

    # ---- at the limit --------------------------------------------------------------------------

    def _given(self, history: list[ChatMessage], limit: int, *, ended: bool) -> list[ChatMessage]:
        """What an agent is given of ``history``, which may be shorter afterwards."""
        if ended or not self._is_due(history, limit):
            return history
        if self.llm is None:  # what is too much is dropped
            return self._replaced(history, history[: _pinned(history)], self._split(history, limit)[1])
        running, over = self._running, self.strict or self._tokens(history) > limit * 1.25
        fits = running.fits("", history) and self._leaves(history) <= limit
        if fits and (over or self._is_ready(history, limit)):
            if over:
                self._upcoming.hurry()
            running.wait(due=over)
            self._upcoming.settle()
            taken = self._taken(history, limit)
            if taken is not None:
                return taken
        if not over and not is_in_process(self.llm):
            if not (fits and running.busy):
                with harmless("a memory's next summary"):
                    self._begin(history, self._cut(history, limit))
            return history  # it comes with a later turn
        return self._on_the_spot(history, limit)

    def _is_ready(self, history: Sequence[ChatMessage], limit: int) -> bool:
        """Whether the summary that is being written can be taken without a pause, or is of no use later."""
        if self._upcoming.idle or self._leaves(history) + self._growth > limit:
            return True
        ahead = self._ahead(history)
        return ahead is not None and self._upcoming.is_ready(ahead)

    def _leaves(self, history: Sequence[ChatMessage]) -> int:
        """Tokens that the summary which is being written will leave beside itself."""
        return self._tokens([*history[: _pinned(history)], *history[self._running.covers :]])

    def _taken(self, history: list[ChatMessage], limit: int) -> list[ChatMessage] | None:
        """The history with the summary that is ready in its place; None where there is none that fits."""
        taken = self._running.take("", history)
        if taken is None:
            return None
        pinned = _pinned(history)
        head = [*history[:pinned], summary_message(taken.text)]
        if self._tokens([*head, *history[taken.covered :]]) > limit * 1.25:
            log.info("a summary that was prepared leaves more than %d tokens: another one is made", limit)
            return None
        return self._replaced(history, head, history[taken.covered :])

    def _on_the_spot(self, history: list[ChatMessage], limit: int) -> list[ChatMessage]:
        """As the built-in, here and now; one that fails or is empty leaves everything as it is."""
        pinned = _pinned(history)
        head, tail = self._split(history, limit)
        covered = head[pinned:]
        if len(covered) == 1 and is_summary(covered[0]):
            return history  # there is nothing new to be said
        self._running.drop()
        try:
            with unseen():
                text = self._summarize_oldest_chat_history(covered).content or ""
        except Exception as error:
            log.warning("a summary failed, the messages are kept as they are: %r", error)
            return history
        if not text.strip():
            log.warning("the LLM's summary is empty, the messages are kept as they are")
            return history
        return self._replaced(history, [*history[:pinned], summary_message(text)], tail)

    def _split(self, history: list[ChatMessage], limit: int) -> tuple[list[ChatMessage], list[ChatMessage]]:
        """What the built-in would summarize, after the system messages that stand first, and what it would keep."""
        sizes, start, pinned = [self._tokens([m]) for m in history], len(history), _pinned(history)
        kept = sum(sizes[:pinned])
        while start > pinned and kept + sizes[start - 1] <= limit:
            start -= 1
            kept += sizes[start]
        while start < len(history) and history[start].role in (MessageRole.ASSISTANT, MessageRole.TOOL):
            start += 1
        if start == len(history):
            # The built-in would summarize the question, too, and ask nothing.
            start = max((i for i, m in enumerate(history) if m.role == MessageRole.USER), default=start)
        start = max(pinned, start)
        return history[:start], history[start:]

    def _is_due(self, history: list[ChatMessage], limit: int) -> bool:
        head, _ = self._split(history, limit)
        return len(head) > _pinned(history)

    def _replaced(
        self, history: list[ChatMessage], head: list[ChatMessage], tail: list[ChatMessage]
    ) -> list[ChatMessage]:
        """The store with ``head`` and ``tail`` in the place of ``history``, if that is what it still holds."""
        with self._lock:
            present = list(self.get_all())
            if len(present) < len(history) or not all(map(alike, history, present)):
                return present  # another history, meanwhile
            put = present[len(history) :]
            self.chat_store.set_messages(self.chat_store_key, [*head, *tail, *put])
        # As of the last answer, since a turn is what comes after it.
        self._size = self._tokens([*head, *tail[: asked_last(tail)]])
        return [*head, *tail]

    # ---- before it -----------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return self.token_limit if self._room is None else self._room

    def _saved(self) -> None:
        """A turn is complete: begin what the next one will need. It must not cost the turn."""
        if self.llm is None or self.strict or is_in_process(self.llm):
            return
        with harmless("a memory's next summary"):
            self._prepare(list(self.get_all()))

    def _prepare(self, history: list[ChatMessage]) -> None:
        sizes, running, limit = [self._tokens([m]) for m in history], self._running, self._limit
        size = sum(sizes)
        self._growth = growth_of(size, self._size, sizes, history)
        self._size = size
        if running.failed() or running.hangs():
            running.take("", history)  # says so
            running.drop()
        question = max((i for i, m in enumerate(history) if m.role == MessageRole.USER), default=0)
        if running.fits("", history) and self._leaves(history) + sizes[question] <= limit:
            self._warm_ahead(history)  # with what has come
            return
        if is_near(size, self._growth, limit, self.soft, max(0.5, 1 - self.keep)):
            self._begin(history, self._cut(history, limit))

    def _cut(self, history: list[ChatMessage], limit: int) -> int:
        """The last user message that leaves as much as should stay by the time the limit is reached."""
        missing, pinned = max(0, limit - self._tokens(history)), _pinned(history)
        wanted, kept = self.keep * (limit - self._tokens(history[:pinned])) - missing, 0
        for i in reversed(range(pinned + 1, len(history))):
            kept += self._tokens([history[i]])
            if kept >= wanted and history[i].role == MessageRole.USER:
                # What is there already is summarized again only together with something new.
                cut = i if not is_summary(history[i - 1]) else 0
                break
        else:
            cut = 0
        if not answers(history[-1]) or self._tokens([*history[:pinned], *history[cut:]]) <= limit:
            return cut
        # A run longer than the limit: nothing of it can stay once the next question has come.
        return len(history)

    def _begin(self, history: list[ChatMessage], cut: int) -> None:
        llm, covered = self.llm, history[_pinned(history) : cut]
        if not covered:
            return
        assert llm is not None
        request = [
            ChatMessage(role=MessageRole.SYSTEM, content=self.summarize_prompt),
            ChatMessage(role=MessageRole.USER, content=self._get_prompt_to_summarize(covered)),
        ]
        writing = asking(
            *(llm, self._upcoming, request),
            accept_cut_off=self.accept_cut_off,
            warm=self.warm,
            given=self.backend,
        )
        # What stands before it counts, too: it is a summary of this history.
        future = self._running.start(self._upcoming.lane, writing, history[:cut], "")
        future.add_done_callback(lambda _: self._upcoming.lane.call(self._warm_ahead, history))

    def _warm_ahead(self, history: Sequence[ChatMessage]) -> None:
        """Warm what the next prompt will begin with once the summary is taken."""
        ahead = self._ahead(history)
        if ahead is not None and self._running.fits("", history):
            self._upcoming.expect(ahead, lasting=True)

    def _ahead(self, history: Sequence[ChatMessage]) -> list[ChatMessage] | None:
        """What is given once the summary is taken, if that is written."""
        text = self._running.ready()
        if text is None:
            return None
        return [*history[: _pinned(history)], summary_message(text), *history[self._running.covers :]]

    def _tokens(self, messages: Sequence[ChatMessage]) -> int:
        return sum(self._counts.of(str(m.content), self.tokenizer_fn) for m in messages)


def _pinned(history: Sequence[ChatMessage]) -> int:
    """How many system messages stand first that are no summary of ours: they are never summarized."""
    end = next((i for i, m in enumerate(history) if m.role != MessageRole.SYSTEM or is_summary(m)), len(history))
    return end if end < len(history) else 0
