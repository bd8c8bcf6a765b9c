"""The three memories: equal to the built-ins call by call, ahead of time where they may be, and nothing is lost."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.agent.workflow import FunctionAgent as BuiltInAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.memory import ChatMemoryBuffer as BuiltInBuffer
from llama_index.core.memory import ChatSummaryMemoryBuffer as BuiltInSummary
from llama_index.core.memory import InsertMethod, StaticMemoryBlock
from llama_index.core.memory import Memory as BuiltInMemory
from llama_index.core.storage.chat_store import SimpleChatStore
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore

from agent_server import AgentServer, kind_of, serving
from examples import examples
from li import llm_of, said
from smoothagent import OpenAIBackend, running
from smoothagent_llamaindex import ChatMemoryBuffer, ChatSummaryMemoryBuffer, Memory, SummaryMemoryBlock
from smoothagent_llamaindex.codec import is_summary
from smoothagent_llamaindex.memory import memory as memory_module
from smoothagent_llamaindex.memory.memory import oldest_to_go
from smoothagent_llamaindex.memory.rows import put_summary, queue_of, summary_in

WORD = "word "
WORDS: Any = "fixed words"  # a text is taken, too


def tokenize(text: str) -> list[str]:
    return text.split()


class Writer(CustomLLM):
    """Writes summaries that say what they are of; may be held up, or fail."""

    fails: int = 0
    waits: Any = None
    count: int = 0
    asked: Any = None

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="writer", context_window=8000, num_output=200)

    @llm_chat_callback()  # pyright: ignore[reportUntypedFunctionDecorator]
    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        if isinstance(self.asked, list):
            self.asked.append(str(messages[-1].content))
        if self.waits is not None:
            self.waits.wait(30)
        if self.fails:
            self.fails -= 1
            raise ValueError("no summary today")
        return ChatResponse(message=said("assistant", f"SUM {len(str(messages[-1].content).split())}"))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def plain(messages: Sequence[ChatMessage]) -> list[tuple[str, Any]]:
    return [(m.role.value, m.content) for m in messages]


def settled(memory: Any) -> None:
    """Until what runs ahead has ended."""
    expecting = getattr(getattr(memory, "_upcoming", None), "finding", None)
    if expecting is not None:
        expecting.result(30)
    for holder in (getattr(memory, "_running", None), memory._upcoming):
        job = getattr(holder, "_job", None)
        future = getattr(holder, "_future", None) if job is None else job.future
        if future is not None:
            with contextlib.suppress(Exception):
                future.result(30)
    time.sleep(0.002)  # what is called when it has ended


STEPS = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(0, 2), st.booleans()), min_size=1, max_size=9
)
"""Turns: words of the question, words of the answer, tools it calls before, and whether `get` is called twice."""


def turn_of(question: int, answer: int, tools: int, number: int) -> list[ChatMessage]:
    messages = [said("user", WORD * question + str(number))]
    for i in range(tools):
        call: Any = {"id": f"{number}-{i}", "type": "function", "function": {"name": "t", "arguments": "{}"}}
        messages.append(ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]}))
        messages.append(said("tool", f"result {i}", additional_kwargs={"tool_call_id": f"{number}-{i}"}))
    return [*messages, said("assistant", WORD * answer + "a")]


# ---- the window ----------------------------------------------------------------------------------


@given(STEPS, st.integers(4, 60), st.integers(0, 3))
@examples(60)
def test_the_window_is_the_built_ins(steps: list[Any], limit: int, initial: int) -> None:
    kept: dict[str, Any] = {"token_limit": limit, "tokenizer_fn": tokenize}
    ours, theirs = ChatMemoryBuffer.from_defaults(**kept), BuiltInBuffer.from_defaults(**kept)
    for number, (question, answer, tools, twice) in enumerate(steps):
        first, *rest = turn_of(question, answer, tools, number)
        for memory in (ours, theirs):
            memory.put(first)
        for _ in range(1 + twice):
            assert ours.get(initial_token_count=initial) == theirs.get(initial_token_count=initial)
        for memory in (ours, theirs):
            memory.put_messages(rest)
        assert ours.get_all() == theirs.get_all()
    assert ours.model_dump(exclude={"chat_store", "warm"}) == theirs.model_dump(exclude={"chat_store"})


def test_the_next_window_is_prefilled_while_the_user_reads() -> None:
    async def main() -> tuple[AgentServer, list[int]]:
        with serving(AgentServer(turns=0)) as server:
            memory = ChatMemoryBuffer.from_defaults(token_limit=60, tokenizer_fn=tokenize)
            agent: Any = BuiltInAgent(tools=[], llm=llm_of(server, is_function_calling_model=True), system_prompt="S")
            warm: list[int] = []
            for i in range(14):
                await asyncio.to_thread(settled, memory)
                before = len(server.bodies)
                await agent.run(user_msg=f"{i} {WORD * 9}", memory=memory)
                [body] = [b for b in server.main if b in server.bodies[before:]]
                prefills = [b for b in server.bodies[:before] if b in server.prefills]
                known = prefills[-1]["messages"] if prefills else []
                warm.append(len(body["messages"]) - 1 if body["messages"][:-1] == known else 0)
            return server, warm

    server, warm = asyncio.run(main())
    assert len(server.main) == 14
    slides = [b["messages"][1]["content"].startswith("0 ") for b in server.main].count(False)
    assert slides >= 6
    assert sum(w > 1 for w in warm) >= slides - 1, "all but the first, at which nothing was known"


# ---- the summary buffer --------------------------------------------------------------------------


@given(STEPS, st.integers(16, 60), st.booleans())
@examples(60)
def test_strictly_it_gives_what_the_built_in_gives(steps: list[Any], limit: int, writes: bool) -> None:
    given_: dict[str, Any] = {"token_limit": limit, "tokenizer_fn": tokenize, "llm": Writer() if writes else None}
    ours = ChatSummaryMemoryBuffer.from_defaults(strict=True, **given_)
    theirs = BuiltInSummary.from_defaults(**given_)
    for number, (question, answer, tools, _) in enumerate(steps):
        first, *rest = turn_of(question, answer, tools, number)
        for memory in (ours, theirs):
            memory.put(first)
        got = plain(ours.get())
        assert got == plain(theirs.get())
        assert got == plain(ours.get_all())
        for memory in (ours, theirs):
            memory.put_messages(rest)


def said_by(messages: Sequence[ChatMessage]) -> list[Any]:
    return [m.content for m in messages if not is_summary(m)]


@given(STEPS, st.integers(16, 60), st.integers(0, 2))
@examples(60)
def test_what_is_prepared_keeps_the_law(steps: list[Any], limit: int, fails: int) -> None:
    """A summary and the newest messages, or all of them; never more than a quarter above the limit."""
    asked: list[str] = []
    memory = ChatSummaryMemoryBuffer.from_defaults(
        llm=Writer(fails=fails, asked=asked), token_limit=limit, tokenizer_fn=tokenize
    )
    all_of_it: list[ChatMessage] = []
    for number, (question, answer, tools, wait) in enumerate(steps):
        first, *rest = turn_of(question, answer, tools, number)
        memory.put(first)
        all_of_it.append(first)
        got = memory.get()
        tail = [m for m in got if not is_summary(m)]
        assert plain(all_of_it)[len(all_of_it) - len(tail) :] == plain(tail), "the newest, as they are"
        if len(tail) < len(all_of_it):
            assert is_summary(got[0])
            assert got[1].role == MessageRole.USER
            gone = [m.content for m in all_of_it[: len(all_of_it) - len(tail)] if m.role == MessageRole.USER]
            assert all(any(str(text) in request for request in asked) for text in gone), "all of it was summarized"
        assert sum(is_summary(m) for m in got) <= 1
        size = sum(len(tokenize(str(m.content))) for m in got)
        newest = len(tokenize(str(first.content)))
        assert size <= limit * 1.25 or size - newest <= 2 or fails, "never far above it"
        memory.put_messages(rest)
        all_of_it += rest
        if wait:
            settled(memory)


def test_a_summary_is_ready_when_it_is_due_and_the_next_prompt_is_warm() -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=0)) as server:
            llm = llm_of(server, is_function_calling_model=True, max_tokens=300)
            memory = ChatSummaryMemoryBuffer.from_defaults(llm=llm, token_limit=120, tokenizer_fn=tokenize)
            agent: Any = BuiltInAgent(tools=[], llm=llm, system_prompt="S")
            for i in range(24):
                await agent.run(user_msg=f"{i} {WORD * 9}", memory=memory)
                await asyncio.to_thread(settled, memory)
            return server

    server = asyncio.run(main())
    assert len(server.main) == 24
    made = [i for i, b in enumerate(server.main) if "SUMMARY" in str(b["messages"])]
    assert made
    commits = [
        i for i in made if "SUMMARY" not in str(server.main[i - 1]["messages"]) or _of(server, i) != _of(server, i - 1)
    ]
    assert len(commits) >= 2, "once in several turns"
    assert len(commits) <= 5
    for i in commits:
        body = server.main[i]
        at = next(n for n, b in enumerate(server.bodies) if b is body)
        prefills = [b for b in server.bodies[:at] if b in server.prefills]
        assert prefills[-1]["messages"] == body["messages"][: len(prefills[-1]["messages"])]
        assert len(body["messages"]) - len(prefills[-1]["messages"]) <= 1, "all but the user's new message"
        assert server.bodies[at - 1] not in server.summaries, "nobody waited for a summary"


class HeldPrefills(AgentServer):
    """Prompts with a summary are not warm until it is told so."""

    def hold(self, body: dict[str, Any]) -> None:
        written = body.get("continue_final_message")  # of the summary itself, which is written piece by piece
        if kind_of(body) == "prefill" and not written and "SUMMARY" in str(body["messages"]):
            self.released.wait(60)


@pytest.mark.parametrize("kind", ["buffer", "queue"])
@pytest.mark.parametrize("released", [False, True])
def test_a_summary_is_taken_once_its_prompt_is_warm_or_at_a_quarter_above(
    tmp_path: Path, kind: str, released: bool
) -> None:
    limit, words = 200, 7  # each turn's question and answer: 9 tokens

    async def main() -> tuple[AgentServer, list[int]]:
        with serving(HeldPrefills(turns=0)) as server:
            llm = llm_of(server, is_function_calling_model=True, max_tokens=300)
            memory: Any = (
                ChatSummaryMemoryBuffer.from_defaults(llm=llm, token_limit=limit, tokenizer_fn=tokenize)
                if kind == "buffer"
                else memory_of(
                    llm, tmp_path / "db", token_limit=2 * limit, chat_history_token_ratio=0.5, token_flush_size=60
                )
            )
            agent: Any = BuiltInAgent(tools=[], llm=llm, system_prompt="S")
            sizes = list[int]()
            for i in range(60):
                await agent.run(user_msg=f"{i} {WORD * words}", memory=memory)
                sizes.append(sum(len(str(m["content"]).split()) for m in server.main[-1]["messages"][1:]))
                if released and sizes[-1] > limit * 1.1:
                    server.released.set()
                if "SUMMARY" in str(server.main[-1]["messages"]):
                    break
                if memory._running._job is not None:
                    await asyncio.wait([asyncio.wrap_future(memory._running._job.future)])
                if server.released.is_set():
                    await asyncio.to_thread(settled, memory)
                await asyncio.sleep(0.02)
            server.released.set()
            await asyncio.to_thread(settled, memory)
            if isinstance(memory, Memory):
                await closed(memory)
            return server, sizes

    server, sizes = asyncio.run(main())
    *before, taken = sizes
    assert "SUMMARY" in str(server.main[-1]["messages"])
    assert taken <= limit + 20, "the summary is beside what the queue holds"
    assert limit * 1.1 < max(before) < limit * 1.25
    if not released:
        assert max(before) > limit * 1.25 - 2 * (words + 2), "as late as it may be"
    warmed = [b for b in server.answered if kind_of(b) == "prefill" and b in server.bodies]
    whole = server.main[-1]["messages"][:-1]
    at = next(n for n, b in enumerate(server.answered) if b is server.main[-1])
    assert any(b["messages"] == whole for b in server.answered[:at] if b in warmed) == released


def _of(server: AgentServer, i: int) -> Any:
    return server.main[i]["messages"][1]["content"]


@pytest.mark.parametrize("late", [False, True])
def test_a_message_put_while_a_summary_runs_is_not_lost(late: bool) -> None:
    """The built-in clears the store when it is done."""
    release = threading.Event()
    memory = ChatSummaryMemoryBuffer.from_defaults(
        llm=Writer(waits=release), token_limit=20, tokenizer_fn=tokenize, strict=late
    )
    for i in range(4):
        memory.put_messages(turn_of(3, 3, 0, i))
    memory.put(said("user", "the question"))
    got: list[list[ChatMessage]] = []
    thread = threading.Thread(target=lambda: got.append(memory.get()))
    thread.start()
    time.sleep(0.02)
    memory.put(said("assistant", "put meanwhile"))
    asyncio.run(memory.aput(said("user", "and this")))
    release.set()
    thread.join(30)
    assert got
    assert plain(memory.get_all())[-2:] == [("assistant", "put meanwhile"), ("user", "and this")]
    assert "the question" in said_by(memory.get_all())


def test_system_messages_that_stand_first_stay() -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(
        llm=Writer(), token_limit=20, tokenizer_fn=tokenize, chat_history=[said("system", "be kind")]
    )
    for i in range(8):
        memory.put(said("user", f"{i} {WORD * 3}"))
        got = memory.get()
        assert plain(got)[0] == ("system", "be kind")
        memory.put(said("assistant", WORD * 3))
        settled(memory)
    assert sum(is_summary(m) for m in memory.get_all()) == 1


def test_a_question_that_is_too_long_is_asked_all_the_same() -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(), token_limit=10, tokenizer_fn=tokenize)
    memory.put_messages(turn_of(3, 3, 0, 0))
    memory.put(said("user", WORD * 30))
    assert plain(memory.get())[-1] == ("user", WORD * 30)


@pytest.mark.parametrize("answer", ["", "   "])
def test_an_empty_summary_leaves_everything_as_it_is(answer: str) -> None:
    class Silent(Writer):
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            return ChatResponse(message=said("assistant", answer))

    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Silent(), token_limit=12, tokenizer_fn=tokenize)
    for i in range(6):
        memory.put_messages(turn_of(3, 3, 0, i))
        settled(memory)
    before = plain(memory.get_all())
    assert plain(memory.get()) == before
    assert plain(memory.get_all()) == before


def test_within_a_run_the_history_goes_on_as_it_began() -> None:
    """An agent asks its memory again before every call of a run; a summary that comes meanwhile waits."""
    release = threading.Event()
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(waits=release), token_limit=40, tokenizer_fn=tokenize)
    for i in range(4):
        memory.put_messages(turn_of(4, 4, 0, i))
    memory.put(said("user", WORD * 4))
    first = plain(memory.get())
    assert len(first) == 9
    release.set()
    settled(memory)
    assert plain(memory.get()) == first
    memory.put_messages([said("assistant", "ok"), said("user", "next")])
    assert is_summary(memory.get()[0])


def saves() -> bool:
    """Whether LlamaIndex's own store can be saved with this pydantic: with 2.13 and newer it raises."""
    memory = BuiltInBuffer.from_defaults(chat_history=[said("user", "u")])
    try:
        memory.to_string()
    except Exception:
        return False
    return True


@pytest.mark.parametrize("ours", [ChatMemoryBuffer, ChatSummaryMemoryBuffer])
def test_it_can_be_saved_where_the_built_in_can(ours: Any) -> None:
    memory = ours.from_defaults(chat_history=[said("user", "u")])
    if saves():
        assert plain(ours.from_string(memory.to_string()).get_all()) == [("user", "u")]
    else:
        with pytest.raises(Exception, match="chat_message_serialization"):
            memory.to_string()


def test_it_is_saved_and_loaded_with_its_summary() -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(), token_limit=20, tokenizer_fn=tokenize, soft=0.5)
    for i in range(6):
        memory.put(said("user", f"{i} {WORD * 3}"))
        memory.get()
        memory.put(said("assistant", WORD * 3))
    memory.flush()
    saved: dict[str, Any] = memory.model_dump(exclude={"chat_store", "llm"})
    store = {"class_name": "SimpleChatStore", "store": {"chat_history": [m.model_dump() for m in memory.get_all()]}}
    twin: Any = ChatSummaryMemoryBuffer.from_dict(
        {**saved, "chat_store": copy.deepcopy(store)}, llm=Writer(), tokenizer_fn=tokenize
    )
    assert plain(twin.get_all()) == plain(memory.get_all())
    assert twin.soft == 0.5
    assert any(map(is_summary, twin.get_all()))
    vanilla = BuiltInSummary.from_dict({**saved, "chat_store": store}, tokenizer_fn=tokenize)
    assert plain(vanilla.get_all()) == plain(memory.get_all())
    with pytest.raises(ValueError, match="a fraction of token_limit"):
        ChatSummaryMemoryBuffer.from_defaults(keep=1.5)


def test_a_summary_that_is_late_is_waited_for_and_then_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.01)
    monkeypatch.setattr(running, "_AT_MOST", 0.02)
    hung = threading.Event()
    asked: list[Any] = []

    class Once(Writer):
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            asked.append(threading.current_thread())
            if len(asked) == 1:
                hung.wait(30)
            return ChatResponse(message=said("assistant", "SUM"))

    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Once(), token_limit=20, tokenizer_fn=tokenize)
    for i in range(3):
        memory.put_messages(turn_of(2, 2, 0, i))
    while not asked:
        time.sleep(0.001)
    for i in range(3):
        memory.put(said("user", f"{i} {WORD * 9}"))
    got = memory.get()
    assert is_summary(got[0])
    assert len(asked) == 2
    hung.set()


# ---- the queue with blocks -----------------------------------------------------------------------


@given(STEPS, st.integers(10, 60), st.integers(1, 20))
@examples(15)
def test_without_a_summary_block_the_queue_is_the_built_ins(steps: list[Any], limit: int, chunk: int) -> None:
    async def main() -> None:
        given_: dict[str, Any] = {"token_limit": limit, "token_flush_size": chunk, "tokenizer_fn": tokenize}
        blocks: Any = lambda: [StaticMemoryBlock(name="s", static_content=WORDS, priority=0)]  # noqa: E731
        ours = Memory.from_defaults(memory_blocks=blocks(), **given_)
        theirs = BuiltInMemory.from_defaults(memory_blocks=blocks(), **given_)
        for number, (question, answer, tools, twice) in enumerate(steps):
            first, *rest = turn_of(question, answer, tools, number)
            for memory in (ours, theirs):
                await memory.aput(first)
            for _ in range(1 + twice):
                assert await ours.aget() == await theirs.aget()
            for memory in (ours, theirs):
                await memory.aput_messages(rest)
            for status in (None, *MessageStatus):
                assert await ours.aget_all(status) == await theirs.aget_all(status)
        for memory in (ours, theirs):
            await memory.sql_store._async_engine.dispose()  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(main())


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(1, 15)), min_size=1, max_size=12
)


@given(MESSAGES, st.integers(5, 60), st.integers(1, 20))
@examples(60)
def test_what_leaves_the_queue_is_what_the_built_in_lets_go(rolled: list[Any], limit: int, chunk: int) -> None:
    messages = [said(role, WORD * size) for role, size in rolled]

    async def main() -> int:
        memory = BuiltInMemory(
            token_limit=limit, token_flush_size=chunk, tokenizer_fn=tokenize, chat_history_token_ratio=1.0
        )
        await memory.aput_messages(messages)
        left = len(await memory.aget_all(MessageStatus.ACTIVE))
        await memory.sql_store._async_engine.dispose()  # pyright: ignore[reportAttributeAccessIssue]
        return len(messages) - left

    flushed = chunk if chunk <= limit else int(limit * 0.1)
    sizes = [size for _, size in rolled]
    assert oldest_to_go(messages, sizes, limit, max(flushed, 0)) == asyncio.run(main())


def memory_of(llm: Any, path: Path | None = None, **more: Any) -> Memory:
    given_: dict[str, Any] = {"token_limit": 60, "token_flush_size": 10, "tokenizer_fn": tokenize, **more}
    if path is not None:
        given_["async_database_uri"] = f"sqlite+aiosqlite:///{path}"
    blocks = given_.pop("memory_blocks", [SummaryMemoryBlock(llm=llm)])
    return Memory.from_defaults(session_id="s", memory_blocks=blocks, **given_)


async def closed(*memories: Memory) -> None:
    for memory in memories:
        engine: Any = getattr(memory.sql_store, "_async_engine", None)
        if engine is not None:
            await engine.dispose()


@given(STEPS, st.integers(16, 60), st.integers(0, 2), st.sampled_from(list(InsertMethod)), st.booleans())
@examples(25)
def test_what_leaves_the_queue_is_in_the_summary(
    steps: list[Any], limit: int, fails: int, method: InsertMethod, strict: bool
) -> None:
    async def main() -> None:
        asked: list[str] = []
        memory = memory_of(Writer(fails=fails, asked=asked), token_limit=limit, insert_method=method, strict=strict)
        all_of_it: list[ChatMessage] = []
        for number, (question, answer, tools, wait) in enumerate(steps):
            first, *rest = turn_of(question, answer, tools, number)
            await memory.aput(first)
            all_of_it.append(first)
            got = await memory.aget()
            queue = await memory.aget_all(MessageStatus.ACTIVE)
            gone = [m for m in await memory.aget_all(MessageStatus.ARCHIVED) if not is_summary(m)]
            assert plain([*gone, *queue]) == plain(all_of_it), "nothing is lost, and nothing is there twice"
            summary = await summary_in(memory.sql_store, "s")
            assert bool(gone) == bool(summary)
            said_ = [str(m.content) for m in gone if m.role == MessageRole.USER]
            assert all(any(text in request for request in asked) for text in said_), "all of it was summarized"
            if summary:
                assert queue[0].role == MessageRole.USER or not queue
                assert sum(summary in str(m.content) for m in got) == 1
            if not fails:
                size = sum(map(memory._estimate_token_count, queue))
                assert size <= limit * 0.7 * 1.25 or len(queue) <= 2 * (1 + tools) + 1
            await memory.aput_messages(rest)
            all_of_it += rest
            if wait:
                await asyncio.to_thread(settled, memory)
        await closed(memory)

    asyncio.run(main())


def test_the_queues_summary_is_ready_and_its_prompt_is_warm(tmp_path: Path) -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=0)) as server:
            llm = llm_of(server, is_function_calling_model=True, max_tokens=300)
            memory = memory_of(llm, tmp_path / "db", token_limit=200, token_flush_size=40)
            agent: Any = BuiltInAgent(tools=[], llm=llm, system_prompt="S")
            for i in range(24):
                await agent.run(user_msg=f"{i} {WORD * 9}", memory=memory)
                await asyncio.to_thread(settled, memory)
                await asyncio.sleep(0.02)
                await asyncio.to_thread(settled, memory)
            await closed(memory)
            return server

    server = asyncio.run(main())
    firsts = [str(b["messages"][1]["content"]) for b in server.main]
    commits = [i for i in range(1, 24) if firsts[i] != firsts[i - 1] and "SUMMARY" in firsts[i]]
    assert len(commits) >= 2
    for i in commits:
        body = server.main[i]
        at = next(n for n, b in enumerate(server.bodies) if b is body)
        prefills = [b for b in server.bodies[:at] if b in server.prefills]
        assert prefills[-1]["messages"] == body["messages"][: len(prefills[-1]["messages"])]
        assert len(body["messages"]) - len(prefills[-1]["messages"]) <= 1


def test_another_process_finds_the_summary(tmp_path: Path) -> None:
    async def main() -> None:
        memory = memory_of(Writer(), tmp_path / "db", strict=True)
        for i in range(8):
            await memory.aput_messages(turn_of(3, 3, 0, i))
        summary = await summary_in(memory.sql_store, "s")
        assert summary
        other = memory_of(Writer(), tmp_path / "db")
        assert sum(summary in str(m.content) for m in await other.aget()) == 1
        vanilla = BuiltInMemory.from_defaults(
            session_id="s", async_database_uri=f"sqlite+aiosqlite:///{tmp_path / 'db'}", tokenizer_fn=tokenize
        )
        assert await vanilla.aget_all(MessageStatus.ACTIVE) == await memory.aget_all(MessageStatus.ACTIVE)
        await closed(memory, other, vanilla)  # pyright: ignore[reportArgumentType]

    asyncio.run(main())


def test_the_queue_is_changed_in_one_transaction(tmp_path: Path) -> None:
    """Where a covered row is gone, or one before it came, nothing happens at all."""

    async def main() -> None:
        memory = memory_of(Writer(), tmp_path / "db", token_limit=10_000)
        for i in range(4):
            await memory.aput_messages(turn_of(3, 3, 0, i))
        store: Any = memory.sql_store
        rows = await queue_of(store, "s")
        assert len(rows) == 8
        await store.delete_message("s", rows[2].id)
        assert not await put_summary(store, "s", rows[:4], "SUM")
        assert await summary_in(store, "s") is None
        assert len(await queue_of(store, "s")) == 7
        rows = await queue_of(store, "s")
        done = await asyncio.gather(*[put_summary(store, "s", rows[:2], f"SUM {i}") for i in range(2)])
        assert sorted(done) == [False, True], "one of two at once"
        assert len(await queue_of(store, "s")) == 5
        await closed(memory)

    asyncio.run(main())


def test_other_blocks_get_what_leaves() -> None:
    class Noting(StaticMemoryBlock):
        got: Any = None

        async def _aput(self, messages: list[ChatMessage]) -> None:
            self.got = [*(self.got or []), *plain(messages)]

    async def main() -> None:
        other = Noting(name="other", static_content=WORDS)
        memory = memory_of(Writer(), memory_blocks=[SummaryMemoryBlock(llm=Writer()), other])
        for i in range(10):
            await memory.aput(said("user", f"{i} {WORD * 3}"))
            await memory.aget()
            await memory.aput(said("assistant", WORD * 3))
            await asyncio.to_thread(settled, memory)
        gone = [m for m in await memory.aget_all(MessageStatus.ARCHIVED) if not is_summary(m)]
        assert gone
        assert other.got == plain(gone)
        await closed(memory)

    asyncio.run(main())


def test_the_block_in_the_built_in_memory_loses_nothing_either() -> None:
    async def main() -> None:
        block = SummaryMemoryBlock(llm=Writer(fails=1))
        memory = BuiltInMemory.from_defaults(
            memory_blocks=[block], token_limit=30, token_flush_size=5, tokenizer_fn=tokenize
        )
        for i in range(8):
            await memory.aput_messages(turn_of(3, 3, 0, i))
            if i == 3:
                assert block.pending or block.summary
        assert block.summary.startswith("SUM")
        assert block.pending == []
        assert any(block.summary in str(m.content) for m in await memory.aget())
        await memory.sql_store._async_engine.dispose()  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(main())


def test_a_reset_memory_has_no_summary() -> None:
    async def main() -> None:
        memory = memory_of(Writer(), strict=True)
        for i in range(8):
            await memory.aput_messages(turn_of(3, 3, 0, i))
        assert await summary_in(memory.sql_store, "s")
        await memory.areset()
        await memory.aput(said("user", "anew"))
        assert plain(await memory.aget()) == [("user", "anew")]
        await closed(memory)

    asyncio.run(main())


def test_the_sync_methods_are_there() -> None:
    memory = memory_of(Writer(), strict=True)
    for i in range(8):
        memory.put_messages(turn_of(3, 3, 0, i))
    assert any("SUM" in str(m.content) for m in memory.get())
    memory.reset()
    assert memory.get_all() == []
    asyncio.run(closed(memory))


def test_background_work_is_none_of_the_users() -> None:
    """What an LLM that only its object can reach is asked in the background shows in no callback of its own."""
    from llama_index.core.callbacks import CallbackManager, TokenCountingHandler

    counter = TokenCountingHandler(tokenizer=tokenize)
    llm = Writer(callback_manager=CallbackManager([counter]))
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=llm, token_limit=20, tokenizer_fn=tokenize)
    for i in range(3):
        memory.put_messages(turn_of(3, 3, 0, i))
        settled(memory)
    assert memory._running.busy
    assert counter.total_llm_token_count == 0
    llm.chat([said("user", "a call of the user's own")])
    assert counter.total_llm_token_count > 0


def test_what_is_put_by_a_task_and_by_the_loop_at_once_does_not_hang() -> None:
    """A chat engine writes the answer in a task of its own, and is reset by a call that blocks."""

    class Slow(SimpleChatStore):
        def add_message(self, key: str, message: ChatMessage, idx: int | None = None) -> None:
            time.sleep(0.05)
            super().add_message(key, message, idx)

    async def main() -> None:
        memory = ChatSummaryMemoryBuffer.from_defaults(
            llm=Writer(), token_limit=20, tokenizer_fn=tokenize, chat_store=Slow()
        )
        putting = asyncio.create_task(memory.aput(said("assistant", "an answer")))
        await asyncio.sleep(0.01)
        memory.put(said("user", "meanwhile"))
        await putting
        assert sorted(str(m.content) for m in memory.get_all()) == ["an answer", "meanwhile"]
        memory.reset()
        assert memory.get_all() == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_end_of_a_run_does_not_wait_for_a_summary() -> None:
    """LlamaIndex's agents ask their memory once more when they are done."""
    release = threading.Event()
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(waits=release), token_limit=20, tokenizer_fn=tokenize)
    memory.put(said("user", "go"))
    assert len(memory.get()) == 1, "the run begins"
    for i in range(9):
        memory.put_messages(turn_of(4, 4, 0, i)[bool(not i) :])
    before = time.monotonic()
    assert len(memory.get()) == 18
    assert time.monotonic() - before < 20, "it would have waited for 30 s"
    release.set()
    settled(memory)
    memory.put(said("user", "next"))
    assert is_summary(memory.get()[0])


def test_a_long_system_text_counts() -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(
        llm=Writer(), token_limit=150, tokenizer_fn=tokenize, chat_history=[said("system", WORD * 60)]
    )
    commits = 0
    for i in range(40):
        memory.put(said("user", f"{i} {WORD * 3}"))
        before = memory.get_all()
        got = memory.get()
        commits += len(got) < len(before)
        size = sum(len(tokenize(str(m.content))) for m in got)
        assert size <= 150 * 1.25
        assert plain(got)[0] == ("system", WORD * 60)
        memory.put(said("assistant", WORD * 3))
        settled(memory)
    assert 2 <= commits <= 8, "not on every turn"


def test_a_history_that_is_set_again_keeps_its_summary() -> None:
    """A chat engine that is given its history sets it on every call."""
    asked: list[str] = []
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(asked=asked), token_limit=30, tokenizer_fn=tokenize)
    for i in range(4):
        memory.put_messages(turn_of(3, 2, 0, i))
    settled(memory)
    assert len(asked) == 1
    memory.set([m.model_copy(deep=True) for m in memory.get_all()])
    memory.put(said("user", WORD * 6))
    assert is_summary(memory.get()[0])
    assert len(asked) == 1, "nothing had to be asked on the spot"


def test_a_summary_is_its_sessions_own() -> None:
    """One block in the memories of two sessions; and a session that another process has reset."""

    async def main(path: Path) -> None:
        block = SummaryMemoryBlock(llm=Writer())
        uri = f"sqlite+aiosqlite:///{path}"
        kept: dict[str, Any] = {"token_limit": 60, "token_flush_size": 10, "tokenizer_fn": tokenize, "strict": True}
        one = Memory.from_defaults(session_id="one", memory_blocks=[block], async_database_uri=uri, **kept)
        two = Memory.from_defaults(session_id="two", memory_blocks=[block], async_database_uri=uri, **kept)
        again = Memory.from_defaults(session_id="one", memory_blocks=[block], async_database_uri=uri, **kept)
        for i in range(8):
            await one.aput_messages(turn_of(3, 3, 0, i))
        assert any("SUM" in str(m.content) for m in await one.aget())
        await two.aput(said("user", "another's"))
        assert plain(await two.aget()) == [("user", "another's")]
        await again.areset()
        await one.aput(said("user", "anew"))
        assert plain(await one.aget()) == [("user", "anew")]
        await closed(one, two, again)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder) / "db"))


def test_two_processes_on_one_session_leave_nothing_out(tmp_path: Path) -> None:
    """While one asks for a summary on the spot, the other takes its own."""

    async def main() -> None:
        release = threading.Event()
        asked: list[str] = []

        class Waiting(Writer):
            async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
                return await asyncio.to_thread(self.chat, messages)

        slow = memory_of(Waiting(waits=release, asked=asked), tmp_path / "db")
        fast = memory_of(Writer(asked=asked), tmp_path / "db")
        for i in range(8):
            await slow.aput_messages(turn_of(3, 3, 0, i))
        slow._running.drop()
        await slow.aput(said("user", "the question"))
        getting = asyncio.create_task(slow.aget())
        while not asked:  # noqa: ASYNC110  it is a thread that asks
            await asyncio.sleep(0.005)
        theirs = await fast.aget()
        release.set()
        got = await getting
        summary = await summary_in(slow.sql_store, "s")
        assert summary
        for given_ in (got, theirs):
            assert sum(summary in str(m.content) for m in given_) == 1, "the one that stands for what has left"
            assert plain(given_)[-1] == ("user", "the question")
        await closed(slow, fast)

    asyncio.run(main())


def test_a_block_that_fails_keeps_nothing_from_the_others() -> None:
    class Failing(StaticMemoryBlock):
        async def _aput(self, messages: list[ChatMessage]) -> None:
            raise ValueError("no facts today")

    class Noting(StaticMemoryBlock):
        got: Any = None

        async def _aput(self, messages: list[ChatMessage]) -> None:
            await asyncio.sleep(0)
            self.got = [*(self.got or []), *plain(messages)]

    async def main() -> None:
        other = Noting(name="other", static_content=WORDS)
        blocks = [SummaryMemoryBlock(llm=Writer()), Failing(name="facts", static_content=WORDS), other]
        memory = memory_of(Writer(), memory_blocks=blocks, strict=True)
        failed = 0
        for i in range(8):
            try:
                await memory.aput_messages(turn_of(3, 3, 0, i))
            except ValueError:
                failed += 1
        gone = [m for m in await memory.aget_all(MessageStatus.ARCHIVED) if not is_summary(m)]
        assert failed
        assert other.got == plain(gone)
        await closed(memory)

    asyncio.run(main())


def test_a_block_that_is_given_messages_twice_at_once_has_them_all() -> None:
    async def main() -> None:
        asked: list[str] = []

        class Waiting(Writer):
            async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
                await asyncio.sleep(0.01 if "first" in str(messages[-1].content) and not asked else 0)
                return self.chat(messages)

        block = SummaryMemoryBlock(llm=Waiting(asked=asked))
        await asyncio.gather(block._aput([said("user", "first")]), block._aput([said("user", "second")]))
        assert block.pending == []
        assert any("first" in a and "second" in a for a in asked) or ("SUM" in asked[-1] and len(asked) >= 2)

    asyncio.run(main())


def test_a_memory_with_a_server_of_its_own_can_be_copied() -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(
        llm=Writer(), token_limit=20, tokenizer_fn=tokenize, backend=OpenAIBackend("http://127.0.0.1:9/v1", "m")
    )
    twin = copy.deepcopy(memory)
    assert twin.backend is memory.backend
    assert twin._running is not memory._running


def test_a_store_of_the_users_own_is_not_read_past_its_methods() -> None:
    class Reversed(SQLAlchemyChatStore):
        """Keeps texts backwards."""

        async def add_messages(self, key: str, messages: list[ChatMessage], status: Any = MessageStatus.ACTIVE) -> None:
            await super().add_messages(key, [said(m.role, str(m.content)[::-1]) for m in messages], status)

        async def get_messages(self, key: str, *args: Any, **kwargs: Any) -> list[ChatMessage]:
            found = await super().get_messages(key, *args, **kwargs)
            return [m if is_summary(m) else said(m.role, str(m.content)[::-1]) for m in found]

    async def main() -> None:
        memory = memory_of(Writer(), strict=True)
        memory.sql_store = Reversed(table_name="t")  # the first of the range has no argument for it
        for i in range(8):
            await memory.aput_messages(turn_of(3, 3, 0, i))
        got = plain(await memory.aget())
        assert got[-1] == ("assistant", WORD * 3 + "a")
        assert sum("SUM" in str(text) for _, text in got) == 1
        await closed(memory)

    asyncio.run(main())


class Echo(CustomLLM):
    """Answers at once."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="echo", context_window=8000, is_chat_model=True)

    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        return ChatResponse(message=said("assistant", WORD * 5))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("fresh", [False, True])
def test_engines_that_ask_before_they_put_the_question_stay_within_limits(fresh: bool) -> None:
    """As context chat engines do; with one memory object for all turns, or one for each."""
    store = SimpleChatStore()

    def made() -> ChatSummaryMemoryBuffer:
        return ChatSummaryMemoryBuffer.from_defaults(
            llm=Writer(), token_limit=40, tokenizer_fn=tokenize, chat_store=store
        )

    memory, sizes = made(), list[int]()
    for i in range(16):
        memory = made() if fresh else memory
        history = memory.get(input=f"{i} {WORD * 4}")
        sizes.append(sum(len(tokenize(str(m.content))) for m in history))
        memory.put(said("user", f"{i} {WORD * 4}"))
        memory.put(said("assistant", WORD * 5))
        if not fresh:
            settled(memory)
    assert max(sizes) <= 40 * 1.25
    assert any(map(is_summary, memory.get_all()))


def test_simple_and_context_engines_of_llamaindex_work_on_them() -> None:
    from llama_index.core.chat_engine import ContextChatEngine, SimpleChatEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode

    class Found(BaseRetriever):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            return [NodeWithScore(node=TextNode(text=f"found for {query_bundle.query_str}"), score=1.0)]

    for kind in ("simple", "context"):
        memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(), token_limit=40, tokenizer_fn=tokenize)
        engine: Any = (
            SimpleChatEngine.from_defaults(llm=Echo(), memory=memory)
            if kind == "simple"
            else ContextChatEngine.from_defaults(retriever=Found(), llm=Echo(), memory=memory)
        )
        for i in range(14):
            assert str(engine.chat(f"{i} {WORD * 4}"))
            settled(memory)
        stored = memory.get_all()
        assert sum(map(is_summary, stored)) == 1, kind
        assert sum(len(tokenize(str(m.content))) for m in stored) <= 40 * 1.25 + 12, kind


def test_summaries_are_nobodys_messages() -> None:
    async def main() -> None:
        memory = memory_of(Writer(), strict=True)
        for i in range(8):
            await memory.aput_messages(turn_of(3, 3, 0, i))
        assert len(await memory.aget_all()) == 16
        assert not any(map(is_summary, await memory.aget_all()))
        await closed(memory)

    asyncio.run(main())


def test_a_database_that_fails_at_a_commit_costs_the_commit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        memory = memory_of(Writer(), strict=True)

        async def locked(*args: Any) -> bool:
            raise OSError("database is locked")

        monkeypatch.setattr(memory_module, "put_summary", locked)
        for i in range(8):
            await memory.aput_messages(turn_of(3, 3, 0, i))
        assert len(await memory.aget()) == 16
        await closed(memory)

    asyncio.run(main())


# ---- what a reading has found --------------------------------------------------------------------


@pytest.mark.parametrize("first", ["assistant", "system"])
@pytest.mark.parametrize("size", [1, 40])
def test_a_history_that_begins_otherwise_than_with_a_question(first: str, size: int) -> None:
    """Engines ask before they put the question; a greeting alone, or a system text alone, may be all there is."""
    history = [said(first, WORD * size)]
    ours = ChatSummaryMemoryBuffer.from_defaults(chat_history=list(history), token_limit=20, tokenizer_fn=tokenize)
    assert ours.get(input="the question") in ([], history)
    ours.put(said("user", "the question"))
    assert plain(ours.get())[-1] == ("user", "the question")


def test_a_run_longer_than_the_limit_is_summarized_ahead() -> None:
    """Nothing of it can stay once the next question has come, so that is known when it ends."""
    asked: list[str] = []
    memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(asked=asked), token_limit=30, tokenizer_fn=tokenize)
    for number in range(4):
        first, *rest = turn_of(5, 9, 12, number)
        memory.put(first)
        before = len(asked)
        got = memory.get()
        assert got[-1].content == first.content
        # What was asked for by the time of the question is used; nobody waits for another one.
        assert len(asked) == before
        if number:
            assert is_summary(got[0])
            assert len(got) == 2
        memory.put_messages(rest)
        settled(memory)
    assert len(asked) == 4


def test_a_run_longer_than_the_queue_is_summarized_ahead() -> None:
    async def main() -> None:
        asked: list[str] = []
        memory = memory_of(Writer(asked=asked))
        memory.token_limit, memory.token_flush_size = 50, 5
        for number in range(4):
            first, *rest = turn_of(5, 9, 12, number)
            await memory.aput(first)
            before = len(asked)
            got = await memory.aget()
            assert plain(got)[-1][1] == first.content or str(first.content) in str(got[-1].content)
            assert len(asked) == before
            await memory.aput_messages(rest)
            await asyncio.to_thread(settled, memory)
        assert len(asked) >= 3
        await closed(memory)

    asyncio.run(main())


def test_a_question_that_reaches_the_limit_is_not_kept_waiting() -> None:
    memory = ChatSummaryMemoryBuffer.from_defaults(
        llm=Writer(waits=threading.Event()), token_limit=40, tokenizer_fn=tokenize
    )
    memory.put_messages(turn_of(5, 9, 0, 0))
    memory.put_messages(turn_of(5, 9, 0, 1))
    memory.put(said("user", WORD * 15))
    got = memory.get()
    assert len(got) == 5, "as they are, up to a quarter above the limit"
    assert memory._running.busy
    memory._running.drop()


def test_several_tasks_on_one_memory_lose_nothing_and_have_nothing_twice() -> None:
    """Two runs at once are two threads, since LlamaIndex's async methods are the sync ones in threads."""

    def words(messages: Sequence[Any]) -> list[str]:
        return re.findall(r"\bm\d+\b", " ".join(str(m) for m in messages))

    class Tells(Writer):
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            time.sleep(0.001)
            return ChatResponse(message=said("assistant", " ".join(words([messages[-1].content]))))

    async def main() -> None:
        memory = ChatSummaryMemoryBuffer.from_defaults(llm=Tells(), token_limit=40, tokenizer_fn=tokenize)
        numbers = iter(range(1000))
        put: set[str] = set()

        async def work() -> None:
            for _ in range(20):
                for role in ("user", "assistant"):
                    name = f"m{next(numbers)}"
                    put.add(name)
                    await memory.aput(said(role, f"{name} {WORD}"))
                    found = words([m.content for m in await memory.aget()])
                    assert len(found) == len(set(found)), "nothing is twice"

        await asyncio.gather(*(work() for _ in range(5)))
        found = words([m.content for m in memory.get_all()])
        assert set(found) == put
        assert len(found) == len(put)
        await asyncio.to_thread(settled, memory)

    asyncio.run(main())


def test_put_messages_is_many_puts() -> None:
    """As in the built-ins: what a subclass does with a message it does with each."""
    for kind in (ChatMemoryBuffer, ChatSummaryMemoryBuffer):
        seen: list[Any] = []

        class Own(kind):  # type: ignore[misc, valid-type]
            def put(self, message: ChatMessage) -> None:
                seen.append(message.content)  # noqa: B023
                super().put(message)

        memory: Any = Own.from_defaults(token_limit=100, tokenizer_fn=tokenize)
        memory.put_messages([said("user", "a"), said("assistant", "b")])
        assert seen == ["a", "b"]


def test_flush_makes_what_is_due() -> None:
    history = [m for n in range(12) for m in turn_of(3, 3, 0, n)]
    memory = ChatSummaryMemoryBuffer.from_defaults(
        chat_history=history, llm=Writer(), token_limit=30, tokenizer_fn=tokenize
    )
    memory.flush()
    assert is_summary(memory.get_all()[0])
    assert len(memory.get_all()) < 24


def test_another_tokenizer_counts_anew() -> None:
    kept: dict[str, Any] = {"token_limit": 30, "tokenizer_fn": tokenize}
    ours = ChatSummaryMemoryBuffer.from_defaults(strict=True, **kept)
    theirs = BuiltInSummary.from_defaults(**kept)
    for memory in (ours, theirs):
        memory.put_messages(turn_of(3, 3, 0, 0))
        memory.put(said("user", "x"))
        assert len(memory.get()) == 3
        memory.tokenizer_fn = list
        memory.put(said("user", "y"))
    assert plain(ours.get()) == plain(theirs.get())


def test_sizes_are_those_of_the_messages_that_are_there(tmp_path: Path) -> None:
    """SQLite gives ids again where a session that was alone is deleted."""

    async def main() -> None:
        memory = memory_of(Writer(), tmp_path / "memory.db")
        await memory.aput_messages([said("user", "short"), said("assistant", "short")])
        await memory.aget()
        ids = [row.id for row in await queue_of(memory.sql_store, memory.session_id)]
        small = memory._tokens(await queue_of(memory.sql_store, memory.session_id))
        await memory.areset()
        await memory.aput_messages([said("user", WORD * 500), said("assistant", WORD * 500)])
        rows = await queue_of(memory.sql_store, memory.session_id)
        assert [row.id for row in rows] == ids
        assert memory._tokens(rows) > 10 * small
        await closed(memory)

    asyncio.run(main())


def test_a_summary_is_not_put_over_another_history_with_the_same_ids(tmp_path: Path) -> None:
    async def main() -> None:
        memory = memory_of(Writer(), tmp_path / "memory.db")
        await memory.aput_messages([said("user", "the first"), said("assistant", "history")])
        rows = await queue_of(memory.sql_store, memory.session_id)
        await memory.areset()
        await memory.aput_messages([said("user", "another"), said("assistant", "one")])
        assert [r.id for r in await queue_of(memory.sql_store, memory.session_id)] == [r.id for r in rows]
        assert not await put_summary(memory.sql_store, memory.session_id, rows, "of the first")
        assert [r.message.content for r in await queue_of(memory.sql_store, memory.session_id)] == ["another", "one"]
        await closed(memory)

    asyncio.run(main())


def test_commits_at_once_to_a_store_of_the_users_own_cover_what_they_say() -> None:
    class Own(SQLAlchemyChatStore):
        async def archive_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
            await asyncio.sleep(0.01)
            return await super().archive_oldest_messages(key, n)

    async def main() -> None:
        store: Any = Own(table_name="messages")
        await store.add_messages("s", [said("user", str(i)) for i in range(6)])
        rows = (await queue_of(store, "s"))[:2]
        done = await asyncio.gather(*(put_summary(store, "s", rows, f"summary {i}") for i in range(3)))
        assert sorted(done) == [False, False, True]
        assert [m.content for m in await store.get_messages("s", status=MessageStatus.ACTIVE)] == ["2", "3", "4", "5"]
        await store._async_engine.dispose()

    asyncio.run(main())


def test_a_memory_can_be_copied_while_something_is_under_way() -> None:
    async def main() -> None:
        with serving(AgentServer(turns=0)) as server:
            llm = llm_of(server, is_function_calling_model=True)
            memory = ChatMemoryBuffer.from_defaults(token_limit=60, tokenizer_fn=tokenize)
            agent: Any = BuiltInAgent(tools=[], llm=llm, system_prompt="S")
            for i in range(4):
                await agent.run(user_msg=f"{i} {WORD * 9}", memory=memory)
            copied = copy.deepcopy(memory)
            assert copied.get_all() == memory.get_all()
            await asyncio.to_thread(settled, memory)

    asyncio.run(main())


@pytest.mark.parametrize("agent_of", ["react", "code"])
def test_agents_that_take_a_system_message_for_their_own_send_the_summary(agent_of: str) -> None:
    from smoothagent_llamaindex import CodeActAgent, ReActAgent

    async def main() -> AgentServer:
        server = AgentServer(turns=0)
        with serving(server):
            llm = llm_of(server)
            memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(), token_limit=30, tokenizer_fn=tokenize)
            made = server.answer

            def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
                message, why = made(body)
                text = "Thought: I can answer.\nAnswer: done" if agent_of == "react" else "done"
                return ({"role": "assistant", "content": text} if message.get("content") == "done" else message), why

            server.answer = answer
            agent: Any = (
                ReActAgent(tools=[], llm=llm)
                if agent_of == "react"
                else CodeActAgent(code_execute_fn=lambda code: "", tools=[], llm=llm)
            )
            for i in range(8):
                await agent.run(user_msg=f"{i} {WORD * 9}", memory=memory)
                await asyncio.to_thread(settled, memory)
        return server

    server = asyncio.run(main())
    assert any("SUM " in str(b["messages"]) for b in server.main)
    first_gone = next(i for i, b in enumerate(server.main) if "0 word" not in str(b["messages"]))
    assert all("SUM " in str(b["messages"]) for b in server.main[first_gone:])


def test_a_conversation_that_is_told_by_its_memory_is_one() -> None:
    """Whatever a memory gives of its history, each copy would hold slots of the server's."""
    from smoothagent import KeepRecent
    from smoothagent_llamaindex import FunctionAgent

    async def main() -> int:
        with serving(AgentServer(turns=0)) as server:
            llm = llm_of(server)
            memory = ChatSummaryMemoryBuffer.from_defaults(llm=Writer(), token_limit=30, tokenizer_fn=tokenize)
            agent: Any = FunctionAgent(
                tools=[], llm=llm, system_prompt="S", strategy=lambda: KeepRecent(5, at_turns=50)
            )
            for i in range(8):
                await agent.run(user_msg=f"{i} {WORD * 9}", memory=memory)
                await asyncio.to_thread(settled, memory)
            assert any("SUM " in str(b["messages"]) for b in server.main)
            assert memory._upcoming.idle, "the conversation warms its own view"
            return len(agent.llm._lookahead.conversations.pool)

    assert asyncio.run(main()) == 1
