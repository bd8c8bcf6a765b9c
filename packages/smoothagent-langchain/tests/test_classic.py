"""The classic memories: the built-ins' results, without their pause, and what is warmed is what is sent."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_anthropic import ChatAnthropic
from langchain_classic import memory as built_in
from langchain_classic.chains import ConversationChain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import BaseChatMessageHistory, InMemoryChatMessageHistory
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI
from pydantic import PrivateAttr, SecretStr

from agent_server import AgentServer, serving
from examples import examples
from smoothagent import OpenAIBackend, running
from smoothagent_langchain import classic
from smoothagent_langchain.models import backend_for, speaks_chat

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")


class Llm(BaseChatModel):
    """Counts characters; its summary is all it was given, so that nothing can be lost unseen."""

    _gate: threading.Event | None = PrivateAttr(default=None)
    _fail: list[Exception] = PrivateAttr(default_factory=list[Exception])
    _asked: list[str] = PrivateAttr(default_factory=list[str])

    @property
    def _llm_type(self) -> str:
        return "counting"

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        return sum(len(str(m.content)) for m in messages)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        prompt = str(messages[-1].content)
        self._asked.append(prompt)
        if self._gate is not None:
            self._gate.wait(60)
        if self._fail:
            raise self._fail.pop(0)
        body = prompt.rpartition("Current summary:\n")[2]
        existing, _, lines = body.partition("\n\nNew lines of conversation:\n")
        lines = lines.partition("\n\nNew summary:")[0].replace("\n", "/")
        return ChatResult(generations=[ChatGeneration(message=AIMessage("/".join(p for p in (existing, lines) if p)))])


class Elsewhere(BaseChatMessageHistory):
    """A history that hands out copies, as files and databases do."""

    def __init__(self) -> None:
        self.kept: list[BaseMessage] = []

    @property
    def messages(self) -> list[BaseMessage]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [m.model_copy() for m in self.kept]

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        self.kept.extend(messages)

    def clear(self) -> None:
        self.kept.clear()


turns = st.lists(st.tuples(st.text("ab\n", max_size=30), st.text("cd\n", max_size=30)), max_size=8)


def loaded(memory: Any, pairs: list[tuple[str, str]], *, asynchronous: bool) -> list[Any]:
    """What each load gives, the first one before any turn."""

    async def talk() -> list[Any]:
        seen = [copy.deepcopy(await memory.aload_memory_variables({}))]
        for human, ai in pairs:
            await memory.asave_context({"input": human}, {"output": ai})
            seen.append(copy.deepcopy(await memory.aload_memory_variables({})))
        return seen

    if asynchronous:
        return asyncio.run(talk())
    seen = [copy.deepcopy(memory.load_memory_variables({}))]
    for human, ai in pairs:
        memory.save_context({"input": human}, {"output": ai})
        seen.append(copy.deepcopy(memory.load_memory_variables({})))
    return seen


@examples(60)
@given(turns, st.integers(0, 4), st.booleans(), st.booleans(), st.booleans())
def test_windows_are_the_built_ins(
    pairs: list[tuple[str, str]], k: int, as_messages: bool, asynchronous: bool, elsewhere: bool
) -> None:
    more: dict[str, Any] = {"k": k, "return_messages": as_messages, "memory_key": "talk", "ai_prefix": "Bot"}
    theirs = loaded(built_in.ConversationBufferWindowMemory(**more), pairs, asynchronous=False)
    history: Any = Elsewhere() if elsewhere else InMemoryChatMessageHistory()
    memory = classic.ConversationBufferWindowMemory(**more, chat_memory=history, llm=Llm())
    assert loaded(memory, pairs, asynchronous=asynchronous) == theirs
    assert len(history.messages) == 2 * len(pairs)


@examples(60)
@given(turns, st.integers(0, 90), st.booleans(), st.booleans(), st.booleans())
def test_token_buffers_are_the_built_ins(
    pairs: list[tuple[str, str]], limit: int, as_messages: bool, asynchronous: bool, elsewhere: bool
) -> None:
    """Also asynchronously, where the built-in never prunes, and over a history that is kept elsewhere."""
    more: dict[str, Any] = {"max_token_limit": limit, "return_messages": as_messages, "llm": Llm()}
    theirs = loaded(built_in.ConversationTokenBufferMemory(**more), pairs, asynchronous=False)
    history: Any = Elsewhere() if elsewhere else InMemoryChatMessageHistory()
    memory = classic.ConversationTokenBufferMemory(**more, chat_memory=history)
    assert loaded(memory, pairs, asynchronous=asynchronous) == theirs
    if elsewhere:
        assert len(history.messages) == 2 * len(pairs)  # nothing is deleted that is not in memory only


@examples(40)
@given(turns, st.booleans(), st.booleans())
def test_strict_summaries_are_the_built_ins(
    pairs: list[tuple[str, str]], as_messages: bool, asynchronous: bool
) -> None:
    more: dict[str, Any] = {"return_messages": as_messages, "llm": Llm()}
    theirs = loaded(built_in.ConversationSummaryMemory(**more), pairs, asynchronous=False)
    ours = classic.ConversationSummaryMemory(**more, strict=True)
    assert loaded(ours, pairs, asynchronous=asynchronous) == theirs


numbered = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=10).map(
    lambda sizes: [(f"h{i}" + "x" * a, f"a{i}" + "y" * b) for i, (a, b) in enumerate(sizes)]
)


@examples(60)
@given(numbered, st.integers(10, 200), st.booleans(), st.booleans(), st.booleans(), st.none() | st.floats(0.2, 0.9))
def test_a_summary_buffer_says_everything_once_and_stays_within_its_limit(
    pairs: list[tuple[str, str]], limit: int, asynchronous: bool, elsewhere: bool, strict: bool, soft: float | None
) -> None:
    history: Any = Elsewhere() if elsewhere else InMemoryChatMessageHistory()
    llm = Llm()
    memory = classic.ConversationSummaryBufferMemory(
        llm=llm, max_token_limit=limit, strict=strict, soft=soft, chat_memory=history
    )
    seen = loaded(memory, pairs, asynchronous=asynchronous)
    for i, given_ in enumerate(seen):
        said = given_["history"].replace("System: ", "").replace("/", "\n")
        assert said == "\n".join(f"Human: {h}\nAI: {a}" for h, a in pairs[:i])
    tail = memory._present(history.messages)  # pyright: ignore[reportPrivateUsage]
    assert llm.get_num_tokens_from_messages(tail) <= limit or (not strict and memory._running.busy)  # pyright: ignore[reportPrivateUsage]
    if elsewhere:
        assert len(history.messages) == 2 * len(pairs)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_steady_summary_buffer_is_ready_before_it_is_due(asynchronous: bool) -> None:
    llm = Llm()
    memory = classic.ConversationSummaryBufferMemory(llm=llm, max_token_limit=100)
    pairs = [(f"{i} " + "x" * 8, f"{i} " + "y" * 8) for i in range(4)]  # 20 a turn
    loaded(memory, pairs, asynchronous=asynchronous)
    assert not llm._asked  # pyright: ignore[reportPrivateUsage]
    loaded(memory, [("4 " + "x" * 8, "4 " + "y" * 8)], asynchronous=asynchronous)
    think(memory)
    assert len(llm._asked) == 1  # pyright: ignore[reportPrivateUsage]
    assert not memory.moving_summary_buffer
    loaded(memory, [("5 " + "x" * 8, "5 " + "y" * 8)], asynchronous=asynchronous)
    assert memory.moving_summary_buffer == "Human: 0 xxxxxxxx/AI: 0 yyyyyyyy"


MEMORIES: list[Callable[..., Any]] = [
    lambda llm, **more: classic.ConversationSummaryMemory(llm=llm, **more),
    lambda llm, **more: classic.ConversationSummaryBufferMemory(llm=llm, max_token_limit=20, **more),
]


@pytest.mark.parametrize("make", MEMORIES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_waits_for_a_summary(
    make: Callable[..., Any], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.01)
    llm = Llm()
    llm._gate = threading.Event()  # pyright: ignore[reportPrivateUsage]
    memory = make(llm)
    [_, late] = loaded(memory, [("where?", "here, as I see it")], asynchronous=asynchronous)
    assert late == {"history": "Human: where?\nAI: here, as I see it"}
    llm._gate.set()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(running, "_GRACE", 10)
    [ready] = loaded(memory, [], asynchronous=asynchronous)
    assert ready != late
    assert ready["history"].removeprefix("System: ").replace("/", "\n") == late["history"]


@pytest.mark.parametrize("make", MEMORIES)
def test_one_that_hangs_is_waited_for_in_vain_and_nothing_is_lost(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.01)
    monkeypatch.setattr(running, "_AT_MOST", 0.02)
    llm = Llm()
    llm._gate = threading.Event()  # pyright: ignore[reportPrivateUsage]
    memory = make(llm)
    pairs = [(f"h{i}", f"a{i}") for i in range(12)]
    seen = loaded(memory, pairs, asynchronous=False)
    assert seen[-1] == {"history": "\n".join(f"Human: {h}\nAI: {a}" for h, a in pairs)}
    llm._gate.set()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("make", MEMORIES)
def test_a_summary_that_fails_costs_nothing_and_is_asked_for_again(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    llm = Llm()
    llm._fail.append(ConnectionError("no model"))  # pyright: ignore[reportPrivateUsage]
    memory = make(llm, strict=True)
    pairs = [(f"h{i}" * 4, f"a{i}" * 4) for i in range(3)]
    seen = loaded(memory, pairs, asynchronous=False)
    for i, given_ in enumerate(seen):
        said = given_["history"].replace("System: ", "").replace("/", "\n")
        assert said == "\n".join(f"Human: {h}\nAI: {a}" for h, a in pairs[:i])
    assert "/" in seen[-1]["history"]
    assert "no model" in caplog.text


def test_a_summary_of_messages_that_were_edited_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.01)
    llm = Llm()
    llm._gate = threading.Event()  # pyright: ignore[reportPrivateUsage]
    memory = classic.ConversationSummaryBufferMemory(llm=llm, max_token_limit=20)
    memory.save_context({"input": "my name is Ann"}, {"output": "hello Ann, how are you?"})
    memory.chat_memory.messages[0] = HumanMessage("my name is Bea")
    llm._gate.set()  # pyright: ignore[reportPrivateUsage]
    deadline = time.monotonic() + 10
    while memory._running.ready() is None:  # pyright: ignore[reportPrivateUsage]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert memory.load_memory_variables({}) == {"history": "Human: my name is Bea\nAI: hello Ann, how are you?"}
    assert not memory.moving_summary_buffer


def test_a_summary_of_messages_that_were_edited_in_place_is_dropped() -> None:
    memory = classic.ConversationSummaryBufferMemory(llm=Llm(), max_token_limit=20)
    memory.save_context({"input": "my name is Ann"}, {"output": "hello, how are you?"})
    think(memory)
    memory.chat_memory.messages[0].content = "[removed]"
    assert "Ann" not in str(memory.load_memory_variables({}))


@pytest.mark.parametrize("make", MEMORIES)
def test_a_strict_memory_can_be_saved_after_each_turn(make: Callable[..., Any]) -> None:
    """A memory made anew for each request: the summary is in the fields, as the built-in's is."""
    memory = make(Llm(), strict=True)
    memory.save_context({"input": "my name is Ann"}, {"output": "hello, how are you?"})
    fields = memory.model_dump(include={"buffer", "moving_summary_buffer"})
    assert "Ann" in str(fields)
    lazy = make(Llm())
    lazy.save_context({"input": "my name is Ann"}, {"output": "hello, how are you?"})
    lazy.flush()
    assert lazy.model_dump(include={"buffer", "moving_summary_buffer"}) == fields


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_memory_that_is_reset_by_hand_or_given_another_history_has_forgotten(elsewhere: bool) -> None:
    def history() -> Any:
        return Elsewhere() if elsewhere else InMemoryChatMessageHistory()

    used = classic.ConversationSummaryMemory(llm=Llm(), chat_memory=history())
    used.save_context({"input": "my name is Ann"}, {"output": "hello"})
    other = used.model_copy(update={"chat_memory": history(), "buffer": ""})
    assert other.load_memory_variables({}) == {"history": ""}
    other.save_context({"input": "x"}, {"output": "y"})
    assert "Ann" not in str(other.load_memory_variables({}))
    used.load_memory_variables({})
    if not elsewhere:
        used.chat_memory.clear()
    used.buffer = ""
    assert used.load_memory_variables({}) == {"history": ""}
    used.save_context({"input": "x"}, {"output": "y"})
    assert "Ann" not in str(used.load_memory_variables({}))


def test_what_is_pending_outlives_what_others_do_to_the_history() -> None:
    llm = Llm()
    memory = classic.ConversationSummaryMemory(llm=llm)
    memory.save_context({"input": "my name is Ann"}, {"output": "hello"})
    memory.chat_memory.add_messages([AIMessage("a notice")])
    memory.save_context({"input": "and I am 7"}, {"output": "fine"})
    del memory.chat_memory.messages[:2]
    memory.flush()
    assert "Ann" in memory.buffer
    assert "7" in memory.buffer
    memory.chat_memory.clear()  # to keep it small; the buffer has it all
    assert "Ann" in memory.load_memory_variables({})["history"]


def test_one_object_for_several_sessions_mixes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The summaries are swapped by hand, as the built-in lets one do."""
    memory = classic.ConversationSummaryMemory(llm=Llm())
    memory.save_context({"input": "my name is Ann"}, {"output": "hello"})
    memory.buffer = "Bea's summary"
    assert memory.load_memory_variables({}) == {"history": "Bea's summary"}
    memory.save_context({"input": "x"}, {"output": "y"})
    memory.flush()
    assert memory.buffer == "Bea's summary/Human: x/AI: y"
    assert "set by hand while 2 messages" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("make", MEMORIES)
def test_a_strict_memory_raises_what_the_built_in_raises(make: Callable[..., Any], asynchronous: bool) -> None:
    llm = Llm()
    llm._fail.extend(ConnectionError("no model") for _ in range(2))  # pyright: ignore[reportPrivateUsage]
    memory = make(llm, strict=True)
    with pytest.raises(ConnectionError, match="no model"):
        loaded(memory, [("where?", "here, as far as I see")], asynchronous=asynchronous)
    [again] = loaded(memory, [], asynchronous=asynchronous)
    assert again["history"].removeprefix("System: ").replace("/", "\n") == "Human: where?\nAI: here, as far as I see"


class AsyncOnly(Elsewhere):
    """A database that can only be awaited."""

    @property
    def messages(self) -> list[BaseMessage]:
        raise ValueError("use aget_messages")

    async def aget_messages(self) -> list[BaseMessage]:
        return [m.model_copy() for m in self.kept]


@pytest.mark.parametrize("strict", [False, True])
def test_a_history_that_can_only_be_awaited_is_awaited(strict: bool) -> None:
    pairs = [(f"h{i}" * 4, f"a{i}" * 4) for i in range(6)]
    window = classic.ConversationBufferWindowMemory(k=1, chat_memory=AsyncOnly())
    assert loaded(window, pairs, asynchronous=True)[-1] == {"history": f"Human: {'h5' * 4}\nAI: {'a5' * 4}"}
    tokens = classic.ConversationTokenBufferMemory(llm=Llm(), max_token_limit=20, chat_memory=AsyncOnly())
    assert loaded(tokens, pairs, asynchronous=True)[-1] == {"history": f"Human: {'h5' * 4}\nAI: {'a5' * 4}"}
    for make in MEMORIES:
        memory = make(Llm(), chat_memory=AsyncOnly(), strict=strict)
        last = loaded(memory, pairs, asynchronous=True)[-1]["history"]
        said = last.replace("System: ", "").replace("/", "\n")
        assert said == "\n".join(f"Human: {h}\nAI: {a}" for h, a in pairs)


class Shared(BaseChatMessageHistory):
    """Not LangChain's own class, but one that hands out its own list."""

    def __init__(self) -> None:
        self.messages: list[BaseMessage] = []

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        self.messages.extend(messages)

    def clear(self) -> None:
        self.messages.clear()


def test_a_history_that_hands_out_its_own_list_is_pruned_as_by_the_built_in() -> None:
    counts: list[list[str]] = []
    for kind in (built_in.ConversationTokenBufferMemory, classic.ConversationTokenBufferMemory):
        history = Shared()
        loaded(kind(llm=Llm(), max_token_limit=20, chat_memory=history), [("a" * 9, "b" * 9)] * 3, asynchronous=False)
        counts.append([str(m.content) for m in history.messages])
    assert counts[0] == counts[1]


def test_saves_at_once_and_a_clear_in_between_lose_nothing_of_another_conversation() -> None:
    class Slow(Llm):
        def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
            time.sleep(0.01)
            return super().get_num_tokens_from_messages(messages)

    async def both() -> list[str]:
        memory = classic.ConversationTokenBufferMemory(llm=Slow(), max_token_limit=20)
        await memory.asave_context({"input": "a" * 9}, {"output": "b" * 9})
        await asyncio.gather(*(memory.asave_context({"input": str(i) * 9}, {"output": "b" * 9}) for i in range(3)))
        kept = [str(m.content) for m in memory.chat_memory.messages]
        saving = asyncio.ensure_future(memory.asave_context({"input": "x" * 9}, {"output": "y" * 9}))
        await asyncio.sleep(0.005)
        await memory.aclear()
        memory.chat_memory.add_messages([HumanMessage("z")])
        await saving
        assert [m.content for m in memory.chat_memory.messages] == ["z"]
        return kept

    kept = asyncio.run(both())
    assert 18 - 9 <= sum(map(len, kept)) <= 20 + 18


def test_what_a_subclass_has_made_its_own_is_asked() -> None:
    class Redacting(classic.ConversationTokenBufferMemory):
        @property
        def buffer_as_str(self) -> str:
            return super().buffer_as_str.replace("secret", "***")

    class Pruned(classic.ConversationSummaryBufferMemory):
        def prune(self) -> None:
            del self.chat_memory.messages[:1]

    memory = Redacting(llm=Llm())
    for asynchronous in (False, True):
        [*_, last] = loaded(memory, [("a secret", "b")], asynchronous=asynchronous)
        assert "***" in last["history"]
        assert "secret" not in last["history"]
    pruned = Pruned(llm=Llm(), max_token_limit=10_000)
    [*_, last] = loaded(pruned, [("a", "b")], asynchronous=False)
    assert last == {"history": "AI: b"}


def test_a_model_that_cannot_count_costs_an_async_chain_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Llm):
        def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
            raise NotImplementedError("no tokenizer")

    with caplog.at_level("INFO"):
        seen = loaded(classic.ConversationTokenBufferMemory(llm=Mute()), [("a", "b"), ("c", "d")], asynchronous=True)
    assert seen[-1] == {"history": "Human: a\nAI: b\nHuman: c\nAI: d"}
    assert caplog.text.count("cannot count tokens") == 1


def test_two_prunes_at_once_lose_nothing() -> None:
    llm = Llm()
    memory = classic.ConversationSummaryBufferMemory(llm=llm, max_token_limit=20)
    for i in range(6):
        memory.chat_memory.add_messages([HumanMessage(f"h{i}" * 3), AIMessage(f"a{i}" * 3)])

    async def both() -> None:
        await asyncio.gather(memory.aprune(), memory.aprune())

    asyncio.run(both())
    said = memory.load_memory_variables({})["history"].removeprefix("System: ").replace("/", "\n")
    assert said == "\n".join(f"Human: {f'h{i}' * 3}\nAI: {f'a{i}' * 3}" for i in range(6))


@pytest.mark.parametrize("make", MEMORIES)
def test_two_memories_of_the_same_are_equal(make: Callable[..., Any]) -> None:
    llm = Llm()
    one, two = make(llm), make(llm)
    assert one == two
    assert copy.deepcopy(one).chat_memory == one.chat_memory


def test_a_model_that_speaks_another_api_is_no_trouble() -> None:
    """ChatAnthropic has a payload of the same name as OpenAI's, without system messages among the others."""
    model = ChatAnthropic(model_name="m", api_key=SecretStr("x"), base_url="http://127.0.0.1:9", timeout=1, stop=None)
    assert not speaks_chat(model)
    window = classic.ConversationBufferWindowMemory(k=1, llm=model, return_messages=True)
    loaded(window, [("a", "b"), ("c", "d")], asynchronous=False)
    assert not isinstance(backend_for(model), OpenAIBackend)


@pytest.mark.parametrize("make", MEMORIES)
def test_clearing_forgets_the_summary_that_is_being_written(make: Callable[..., Any]) -> None:
    for clear in (lambda m: m.clear(), lambda m: asyncio.run(m.aclear())):
        memory = make(Llm())
        memory.save_context({"input": "my name is Ann"}, {"output": "hello Ann, how are you?"})
        clear(memory)
        memory.save_context({"input": "x"}, {"output": "y"})
        assert "Ann" not in str(memory.load_memory_variables({}))


@pytest.mark.parametrize("make", MEMORIES)
def test_memories_are_copied_and_pickled_like_the_built_ins(make: Callable[..., Any]) -> None:
    memory = make(Llm(), strict=True)
    memory.save_context({"input": "my name is Ann"}, {"output": "hello Ann, how are you?"})
    twins = [copy.deepcopy(memory)]
    memory.load_memory_variables({})
    twins += [pickle.loads(pickle.dumps(memory)), memory.model_copy(deep=True)]
    for twin in twins:
        twin.save_context({"input": "more"}, {"output": "of it"})
        assert "Ann" in str(twin.load_memory_variables({}))


# ---- what is warmed --------------------------------------------------------------------------------------------------


def model_of(server: AgentServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("x"), max_retries=0, temperature=0, **more)


def chat(server: AgentServer, memory: Any, turns: int, *, asynchronous: bool, **more: Any) -> None:
    """A chain with its memory; the user thinks until what can be prepared is."""
    chain = ConversationChain(llm=model_of(server), memory=memory, **more)
    questions = [{"input": f"question {i} " + "q" * 40} for i in range(turns)]

    async def talk() -> None:
        for question in questions:
            await chain.ainvoke(question)
            await asyncio.to_thread(think, memory)

    if asynchronous:
        asyncio.run(talk())
        return
    for question in questions:
        chain.invoke(question)
        think(memory)


def _future_of(found: Any) -> Any:
    job = getattr(found, "_job", None)
    return getattr(found, "_future", None) if job is None else job.future


def think(memory: Any) -> None:
    """Until the summary is written, and then until the warming it leads to is done."""
    for wait in (lambda: getattr(memory, "_running", None), lambda: memory._upcoming):
        deadline = time.monotonic() + 10
        while (found := wait()) is not None and (future := _future_of(found)) is not None and not future.done():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        memory._upcoming.lane.wait(memory._upcoming.lane.spawn(asyncio.sleep(0)), 10)  # what follows from it has begun


def text_of(body: dict[str, Any]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


KINDS: dict[str, Callable[[ChatOpenAI, bool], Any]] = {
    "window": lambda llm, messages: classic.ConversationBufferWindowMemory(k=2, llm=llm, return_messages=messages),
    "tokens": lambda llm, messages: CountedTokens(llm=llm, max_token_limit=250, return_messages=messages),
    "summary": lambda llm, messages: classic.ConversationSummaryMemory(llm=llm, return_messages=messages, strict=True),
    "summary-buffer": lambda llm, messages: CountedSummaries(
        llm=llm, max_token_limit=250, return_messages=messages, strict=True
    ),
}


class CountedTokens(classic.ConversationTokenBufferMemory):
    """Counts characters: the model's own tokenizer would have to be fetched."""

    def _tokens(self, messages: Sequence[BaseMessage]) -> int:
        return sum(len(str(m.content)) for m in messages)


class CountedSummaries(classic.ConversationSummaryBufferMemory):
    """The same."""

    def _tokens(self, messages: Sequence[BaseMessage]) -> int:
        return sum(len(str(m.content)) for m in messages)


@pytest.mark.parametrize(("asynchronous", "as_messages"), [(False, False), (True, True)], ids=["text", "messages"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_new_question_is_warm(kind: str, asynchronous: bool, as_messages: bool) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You are brief."), MessagesPlaceholder("history"), ("human", "{input}")]
    )
    with serving(AgentServer(turns=0)) as server:
        memory = KINDS[kind](model_of(server), as_messages)
        more: dict[str, Any] = {"prompt": prompt} if as_messages else {}
        chat(server, memory, 9, asynchronous=asynchronous, **more)
        calls = [b for b in server.bodies if b in server.main]
        cold: list[int] = []
        for number, body in enumerate(calls):
            known = [text_of(b) for b in server.bodies[: server.bodies.index(body)]]
            sent = text_of(body)
            warm = max((shared(sent, k) for k in known), default=0)
            cold.append(len(sent) - warm)
            assert sum(m["content"].count(f"question {number} ") for m in body["messages"]) == 1
        # From the first call on that was seen with a history in it.
        question = len("question 8 ") + 40 + len("\nHuman: \nAI:<user>")
        assert max(cold[3:]) <= question + 12
        assert len(server.prefills) >= 4


def test_a_memory_in_a_runnable_sequence_is_warmed_too() -> None:
    """Its steps run in contexts of their own."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You are brief.\n\nSo far:\n{history}"), ("human", "{input}")]
    )
    with serving(AgentServer(turns=0)) as server:
        llm = model_of(server)
        memory = classic.ConversationBufferWindowMemory(k=2, llm=llm)
        chain: Any = (
            RunnablePassthrough.assign(history=lambda x: memory.load_memory_variables(x)["history"]) | prompt | llm
        )
        for i in range(6):
            question = {"input": f"question {i}"}
            memory.save_context(question, {"output": chain.invoke(question).content})
            think(memory)
        last = server.main[-1]
        before = [text_of(b) for b in server.bodies[: server.bodies.index(last)]]
        assert len(text_of(last)) - max(shared(text_of(last), b) for b in before) <= len("<user>question 5") + 2


def test_background_summaries_show_in_nobodys_callbacks() -> None:
    class Counting(BaseCallbackHandler):
        def __init__(self) -> None:
            self.calls = 0

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1

    with serving(AgentServer(turns=0)) as server:
        handler = Counting()
        llm = model_of(server, callbacks=[handler])
        memory = classic.ConversationSummaryMemory(llm=llm, strict=True)
        chain = ConversationChain(llm=llm, memory=memory)
        for i in range(4):
            chain.invoke({"input": f"question {i}"})
        memory.load_memory_variables({})
        assert len(server.summaries) == 4
        assert handler.calls == 4


def test_without_a_call_that_is_seen_nothing_is_warmed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), serving(AgentServer(turns=0)) as server:
        memory = classic.ConversationBufferWindowMemory(k=1, llm=model_of(server))
        loaded(memory, [("a", "b"), ("c", "d"), ("e", "f")], asynchronous=False)
        assert not server.bodies
    assert "no call of the memory's llm was seen" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        loaded(classic.ConversationBufferWindowMemory(k=1), [("a", "b"), ("c", "d")], asynchronous=False)
    assert caplog.text.count("give it as llm=") == 1
