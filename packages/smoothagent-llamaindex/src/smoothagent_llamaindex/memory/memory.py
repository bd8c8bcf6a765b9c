"""LlamaIndex's `Memory` with a summary of what leaves its queue, written ahead of time."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import InsertMethod
from llama_index.core.memory import Memory as BuiltIn
from llama_index.core.storage.chat_store.base_db import MessageStatus
from pydantic import Field, PrivateAttr

from smoothagent import Backend
from smoothagent.harmless import harmless
from smoothagent_llamaindex.aside import is_in_process
from smoothagent_llamaindex.codec import is_summary
from smoothagent_llamaindex.memory.block import SummaryMemoryBlock
from smoothagent_llamaindex.memory.buffer import answers
from smoothagent_llamaindex.memory.rows import Row, put_summary, queue_of, summary_in
from smoothagent_llamaindex.memory.running import RunningSummary, asked_last, asking, growth_of, is_near
from smoothagent_llamaindex.memory.upcoming import Upcoming

T = TypeVar("T")
log = logging.getLogger("smoothagent")

_ROWS = 8192
"""Rows whose sizes are remembered."""
_finishing: set[asyncio.Future[Any]] = set()


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is done even where its caller leaves."""
    task = asyncio.ensure_future(work)
    _finishing.add(task)
    task.add_done_callback(_finishing.discard)
    return await asyncio.shield(task)


class Memory(BuiltIn):
    """``Memory`` whose summary block is written while the user reads, and whose next prompt is warm then.

    With a `SummaryMemoryBlock` the messages that the queue has no room for leave it together with the summary that
    stands for them, in one transaction of its SQL store, once the prompt with it is warm. Until then they go on as they
    are, up to a quarter above the queue's limit; there it is waited for, at most 30 s, and then made on the spot. One
    that fails leaves the queue as it is. Other blocks get the messages that leave, as in the built-in; without a
    summary block the queue is the built-in's, and what the next prompt begins with after a flush is prefilled.

    Attributes:
        soft: where a summary is begun, as a fraction of the queue's limit; default three quarters, or two turns before
            the limit, if that is earlier.
        strict: summarize at the limit, when the message that reaches it is put, as the built-in does.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the LLM that calls.
    """

    soft: float | None = Field(default=None, gt=0, lt=1)
    strict: bool = False
    warm: bool | None = None
    backend: Any = Field(default=None, exclude=True)
    _upcoming: Upcoming = PrivateAttr(default_factory=Upcoming)
    _running: RunningSummary = PrivateAttr(default_factory=RunningSummary)
    _contents: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    _size: int | None = PrivateAttr(default=None)
    _growth: int = PrivateAttr(default=0)
    _last: tuple[int, int | None] = PrivateAttr(default=(0, None))
    _first: ChatMessage | None = PrivateAttr(default=None)
    _asked: bool = PrivateAttr(default=False)
    _counted_with: Any = PrivateAttr(default=None)
    _sizes: dict[tuple[int, int], int] = PrivateAttr(default_factory=dict[tuple[int, int], int])

    @classmethod
    def from_defaults(
        cls,
        *args: Any,
        soft: float | None = None,
        strict: bool = False,
        warm: bool | None = None,
        backend: Backend | None = None,
        **built_in: Any,
    ) -> Memory:
        """As the built-in; the rest as above. Raises ValueError for a fraction that is none."""
        if soft is not None and not 0 < soft < 1:
            raise ValueError(f"soft={soft}: a fraction of the queue's limit, between 0 and 1")
        made = super().from_defaults(*args, **built_in)
        assert isinstance(made, Memory)
        made.soft, made.strict, made.warm, made.backend = soft, strict, warm, backend
        return made

    async def aget(self, input: Any = None, **block_kwargs: Any) -> list[ChatMessage]:  # noqa: A002
        """As the built-in, with the summary that is due, if it is ready."""
        block = self._block
        rows = await queue_of(self.sql_store, self.session_id)
        # An agent asks again before each call of a run. Within one its prompt goes on as it began.
        if block is not None and rows and _end(rows) != self._last:
            # At the end of a run an agent asks once more: it is not going to send this, and must not wait. Others, who
            # put the question after they have asked, say what it is, or have never asked with one.
            if not (input is None and self._asked and answers(rows[-1].message)):
                await self._settle(block, rows)
            rows = await queue_of(self.sql_store, self.session_id)
        given = await super().aget(input=input, **block_kwargs)
        self._last, self._asked = _end(rows), bool(rows) and not answers(rows[-1].message)
        self._first = rows[0].message if rows else None
        self._upcoming.watch(given, warm=self.warm, given=self.backend)
        return given

    async def aset(self, messages: list[ChatMessage]) -> None:
        """As the built-in: another history, for which a summary is used where it is one of that."""
        await super().aset(messages)
        self._size, self._growth, self._last, self._first = None, 0, (0, None), None

    async def aget_all(self, status: MessageStatus | None = None) -> list[ChatMessage]:
        """As the built-in; the summary is among what is archived, and among all messages it would be nobody's."""
        found = await super().aget_all(status)
        return found if status is not None else [message for message in found if not is_summary(message)]

    async def areset(self, status: MessageStatus | None = None) -> None:
        """As the built-in."""
        await super().areset(status)
        self._running.drop()
        self._size, self._growth, self._last, self._first = None, 0, (0, None), None
        self._upcoming.forget()

    async def aflush(self) -> None:
        """Wait for the summary that is due, at most 30 s, or make it, and put it in its place: before an end."""
        block, rows = self._block, await queue_of(self.sql_store, self.session_id)
        if block is not None and rows and self._tokens(rows) > self._limit:
            await self._running.await_(due=True)
            existing = await self._summary(block)
            if await self._take(block, rows, existing) is None:
                await self._on_the_spot(block, rows, existing)

    # ---- what the built-in calls ---------------------------------------------------------------

    async def _manage_queue(self) -> None:
        """A message was put. The built-in lets the oldest go here, and awaits its blocks."""
        block = self._block
        if block is None:
            await super()._manage_queue()
            await self._expect_flushed()
            return
        if self.strict:
            rows = await queue_of(self.sql_store, self.session_id)
            if self._tokens(rows) > self._limit:
                await self._on_the_spot(block, rows, await self._summary(block))
            return
        with harmless("a memory's next summary"):
            rows = await queue_of(self.sql_store, self.session_id)
            if rows and answers(rows[-1].message):
                await self._prepare(block, rows)

    async def _get_memory_blocks_content(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        contents = await super()._get_memory_blocks_content(*args, **kwargs)
        block = self._block
        # Read after the queue was: what leaves it meanwhile is in both, and not in neither.
        if block is not None and (summary := await self._summary(block)):
            contents[block.name] = summary
        self._contents = dict(contents)
        return contents

    # ---- at the limit --------------------------------------------------------------------------

    @property
    def _block(self) -> SummaryMemoryBlock | None:
        """The block that is written ahead."""
        return next((b for b in self.memory_blocks if isinstance(b, SummaryMemoryBlock)), None)

    @property
    def _limit(self) -> float:
        return self.token_limit * self.chat_history_token_ratio

    async def _summary(self, block: SummaryMemoryBlock) -> str:
        """The session's summary so far. The store has it: the block may be of several sessions."""
        kept = await summary_in(self.sql_store, self.session_id)
        return block.summary if kept is None else kept

    async def _settle(self, block: SummaryMemoryBlock, rows: list[Row]) -> None:
        """Let the messages that are too many go, if their summary is there or has to be."""
        size, running, limit = self._tokens(rows), self._running, self._limit
        if size <= limit:
            return
        existing, messages = await self._summary(block), [row.message for row in rows]
        over = size > limit * 1.25
        fits = running.fits(existing, messages) and self._leaves(rows) <= limit
        if fits and (over or await self._is_ready(block, rows)):
            if over:
                self._upcoming.hurry()
            await running.await_(due=over)
            self._upcoming.settle()
            if await self._take(block, rows, existing) is not None:
                return
        if not over and not is_in_process(block.llm):
            if not (running.busy and running.fits(existing, messages)):
                with harmless("a memory's next summary"):
                    self._begin(block, existing, messages, self._surplus(rows, limit))
            return  # it comes with a later turn
        await self._on_the_spot(block, rows, existing)

    def _leaves(self, rows: Sequence[Row]) -> int:
        """Tokens that the summary which is being written will leave in the queue."""
        return self._tokens(rows[self._running.covers :])

    async def _take(self, block: SummaryMemoryBlock, rows: list[Row], existing: str) -> bool | None:
        """Put the summary that is ready in its place: whether that was done; None where none is ready."""
        taken = self._running.take(existing, [row.message for row in rows])
        if taken is None:
            return None
        return await finished(self._put(block, rows, taken.covered, taken.text))

    async def _on_the_spot(self, block: SummaryMemoryBlock, rows: list[Row], existing: str) -> None:
        """Summarize what the built-in would let go, here and now."""
        covered = self._surplus(rows, self._limit)
        if not covered:
            return
        self._running.drop()
        try:
            text = await block.written([row.message for row in rows[:covered]], existing)
        except Exception as error:
            log.warning("a summary failed, the messages stay in the queue: %r", error)
            return
        await finished(self._put(block, rows, covered, text))

    async def _put(self, block: SummaryMemoryBlock, rows: list[Row], covered: int, text: str) -> bool:
        try:
            put = await put_summary(self.sql_store, self.session_id, rows[:covered], text)
        except Exception as error:  # a database that is locked, or has lost us: the queue is as it was
            log.warning("session %s: a summary is not used: %r", self.session_id, error)
            return False
        if not put:
            log.info("the queue of session %s has changed: a summary is not used", self.session_id)
            return False
        # As of the last answer, since a turn is what comes after it.
        left = rows[covered:]
        self._size = self._tokens(left[: asked_last([row.message for row in left])])
        # They have left the queue: a block that fails must not keep them from the others.
        gone = [row.message for row in rows[:covered]]
        others = [self._give(other, gone) for other in self.memory_blocks if other is not block]
        for error in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        return True

    async def _give(self, block: Any, messages: Sequence[ChatMessage]) -> None:
        copies = [message.model_copy(deep=True) for message in messages]
        await block.aput(copies, from_short_term_memory=True, session_id=self.session_id)

    # ---- before it -----------------------------------------------------------------------------

    async def _prepare(self, block: SummaryMemoryBlock, rows: list[Row]) -> None:
        messages, sizes = [row.message for row in rows], [self._size_of(row) for row in rows]
        size, limit, running = sum(sizes), self._limit, self._running
        growth = self._growth = growth_of(size, self._size, sizes, messages)
        self._size = size
        existing = await self._summary(block)
        if running.failed() or running.hangs():
            running.take(existing, messages)  # says so
            running.drop()
        question = max((i for i, m in enumerate(messages) if m.role == MessageRole.USER), default=0)
        if running.fits(existing, messages) and self._leaves(rows) + sizes[question] <= limit:
            self._upcoming.lane.spawn(self._warm_ahead(block, existing, messages))  # with what has come
            return
        if not is_near(size, growth, limit, self.soft):
            return
        # What is still to come until there is too much will be there, too, when the summary is taken.
        to_come = growth * max(1, math.ceil((limit + 1 - size) / growth)) if growth else 0
        # It may be taken some turns after that, when its prompt is warm: at most one chunk more leaves for that.
        to_come += min(limit / 4, self.token_flush_size)
        covered = self._surplus(rows, max(0.0, limit - to_come))
        if self._tokens(rows[covered:]) > limit:
            # A run longer than the limit: nothing of it can stay once the next question has come.
            covered = len(rows)
        self._begin(block, existing, messages, covered)

    def _begin(self, block: SummaryMemoryBlock, existing: str, messages: list[ChatMessage], covered: int) -> None:
        if not covered or is_in_process(block.llm):
            return
        lane, request = self._upcoming.lane, block.request(messages[:covered], existing)
        writing = asking(
            *(block.llm, self._upcoming, request),
            accept_cut_off=block.accept_cut_off,
            warm=self.warm,
            given=self.backend,
        )
        future = self._running.start(lane, writing, messages[:covered], existing)
        future.add_done_callback(lambda _: lane.spawn(self._warm_ahead(block, existing, messages)))

    async def _is_ready(self, block: SummaryMemoryBlock, rows: list[Row]) -> bool:
        """Whether the summary that is being written can be taken without a pause, or is of no use later."""
        if self._upcoming.idle or self._leaves(rows) + self._growth > self._limit:
            return True
        messages = [row.message for row in rows]
        text = self._running.ready()
        if text is None:
            return False
        return self._upcoming.is_ready(await self._given(messages[self._running.covers :], self._with(block, text)))

    def _with(self, block: SummaryMemoryBlock, text: str) -> dict[str, Any]:
        """What the blocks hold with another summary."""
        return {**self._contents, block.name: text}

    async def _warm_ahead(self, block: SummaryMemoryBlock, existing: str, messages: list[ChatMessage]) -> None:
        """On the lane: warm what the next prompt will begin with once the summary is taken."""
        with harmless("a memory's next prompt"):
            text = self._running.ready()
            if text is not None and self._running.fits(existing, messages):
                contents = self._with(block, text)
                self._upcoming.expect(await self._given(messages[self._running.covers :], contents), lasting=True)

    async def _expect_flushed(self) -> None:
        """Where the built-in has let messages go, what the next prompt begins with is another."""
        if self._upcoming.idle:
            return
        with harmless("a memory's next prompt"):
            rows = await queue_of(self.sql_store, self.session_id)
            if rows and answers(rows[-1].message) and self._first is not None and rows[0].message != self._first:
                self._upcoming.expect(await self._given([row.message for row in rows], self._contents))

    async def _given(self, queue: Sequence[ChatMessage], contents: dict[str, Any]) -> list[ChatMessage]:
        """What `aget` will give for a queue and its blocks' contents, as far as it is known before the user speaks."""
        queue = [message.model_copy() for message in queue]  # what is inserted is put into messages
        sizes = [self._estimate_token_count(content) for content in contents.values()]
        kept = await self._truncate_memory_blocks(contents, sum(sizes), sum(map(self._estimate_token_count, queue)))
        named, chat = await self._format_memory_blocks(kept)
        if self.insert_method is InsertMethod.USER:
            return [*chat, *queue]  # the rest stands in what the user will say
        made = self.memory_blocks_template.format_messages(memory_blocks=named) if named else []
        return self._insert_memory_content(queue, list(made[0].blocks) if made else [], chat)

    def _surplus(self, rows: Sequence[Row], limit: float) -> int:
        """How many of the oldest messages the built-in lets go, to leave at most ``limit`` tokens."""
        sizes = [self._size_of(row) for row in rows]
        return oldest_to_go([row.message for row in rows], sizes, limit, self.token_flush_size)

    def _tokens(self, rows: Sequence[Row]) -> int:
        return sum(map(self._size_of, rows))

    def _size_of(self, row: Row) -> int:
        """Tokens of a message, counted once where its row is known."""
        if row.id is None:
            return self._estimate_token_count(row.message)
        if self._counted_with is not self.tokenizer_fn:
            self._sizes.clear()
            self._counted_with = self.tokenizer_fn
        key = row.id, row.timestamp  # ids are used again where a session that was alone is deleted
        known = self._sizes.get(key)
        if known is None:
            if len(self._sizes) >= _ROWS:
                self._sizes.clear()
            known = self._sizes[key] = self._estimate_token_count(row.message)
        return known


def oldest_to_go(messages: Sequence[ChatMessage], sizes: Sequence[int], limit: float, chunk: int) -> int:
    """How many of the oldest messages leave a queue: whole chunks, up to the next message of the user's.

    The rule of LlamaIndex's ``Memory`` (`llama_index.core.memory.memory`), in terms of positions.

    Args:
        messages: the queue, oldest first.
        sizes: their tokens.
        limit: tokens that may stay.
        chunk: tokens that leave at once, at least.
    """
    count, left = len(messages), sum(sizes)
    start = 0
    while left > limit and count - start > 1:
        began, flushed = start, 0
        while flushed < chunk and count - start > 1:
            flushed += sizes[start]
            start += 1
        while messages[start].role != MessageRole.USER and count - start > 1:
            start += 1
        if count - start == 1 and messages[start].role != MessageRole.USER:
            # Nothing of the user's would stay: the newest turn does, if there is one.
            turn = [i for i in range(began, count) if messages[i].role == MessageRole.USER]
            start = turn[-1] if turn else count
        if start == began:
            break
        left = sum(sizes[start:])
    return start


def _end(rows: Sequence[Row]) -> tuple[int, int | None]:
    """Tells whether a queue has grown since it was looked at."""
    return (len(rows), rows[-1].id if rows else None)
