"""The drop-in contexts give what AutoGen's give, but for orphans; and what they will give next is warm."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from autogen_core import model_context as built_in
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import LLMMessage, UserMessage
from hypothesis import given
from hypothesis import strategies as st

import smoothagent_autogen as ours
from ag import answer, calls, client_of, conversation, played, results, settled, user, warmed_before
from agent_server import AgentServer, serving
from examples import examples
from smoothagent_autogen.contexts.windows import SKIPPED

Pair = tuple[LLMMessage, LLMMessage]


class Counting:
    """A model client that counts characters, and nothing else."""

    def __init__(self) -> None:
        self.model_info = {"vision": False}

    def count_tokens(self, messages: list[LLMMessage], *, tools: Any = ()) -> int:
        return sum(len(json.dumps(m.model_dump(mode="json")["content"])) for m in messages)

    def remaining_tokens(self, messages: list[LLMMessage], *, tools: Any = ()) -> int:
        return 800 - self.count_tokens(messages)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[LLMMessage], list[Pair]]:
    """Messages in the order agents add them, and which belong together."""
    messages: list[LLMMessage] = []
    pairs: list[Pair] = []
    for number in range(draw(st.integers(0, 8))):
        match draw(st.sampled_from(["said", "answered", "called", "pending"])):
            case "said":
                messages.append(user("u" * draw(st.integers(0, 60))))
            case "answered":
                messages.append(answer(f"answer {number}"))
            case kind:
                # Some servers mint ids anew in every answer.
                ids = draw(st.lists(st.sampled_from(["a", "b", f"c{number}"]), min_size=1, max_size=3, unique=True))
                call = calls(*ids, thought=draw(st.sampled_from([None, "because"])))
                messages.append(call)
                if kind == "called":
                    result = results(*ids, text="r" * draw(st.integers(0, 200)))
                    messages.append(result)
                    pairs.append((call, result))
    return messages, pairs


def of(kind: str, module: Any, a: int, b: int) -> ChatCompletionContext:
    match kind:
        case "buffered":
            return module.BufferedChatCompletionContext(a)
        case "head and tail":
            return module.HeadAndTailChatCompletionContext(a, b)
        case "limited":
            return module.TokenLimitedChatCompletionContext(Counting(), token_limit=100 * a)
        case "remaining":
            return module.TokenLimitedChatCompletionContext(Counting())
        case _:
            return module.UnboundedChatCompletionContext()


KINDS = ["buffered", "head and tail", "limited", "remaining", "unbounded"]


@pytest.mark.parametrize("kind", KINDS)
@examples(100)
@given(history=histories(), a=st.integers(1, 6), b=st.integers(1, 6))
def test_the_messages_are_the_built_ins_without_orphans(
    kind: str, history: tuple[list[LLMMessage], list[Pair]], a: int, b: int
) -> None:
    async def compare() -> None:
        messages, pairs = history
        theirs, mine = of(kind, built_in, a, b), of(kind, ours, a, b)
        for number, message in enumerate(messages):
            await theirs.add_message(message)
            await mine.add_message(message)
            there = {id(m) for m in messages[: number + 1]}
            window = await theirs.get_messages()
            inside = {id(m) for m in window}
            halves = {id(m) for p in pairs if {id(p[0]), id(p[1])} <= there for m in p if not _both(p, inside)}
            expected = window if kind == "unbounded" else [m for m in window if id(m) not in halves]
            got = await mine.get_messages()
            # What is warmed is worked out in another way where the built-in's takes long.
            assert list(map(id, mine._window(messages[: number + 1]))) == list(map(id, got))  # type: ignore[attr-defined]
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                # The same objects; only what stands for skipped ones is another.
                assert one is other or (one is SKIPPED and str(other.content).startswith("Skipped "))
            assert got is not mine._messages  # pyright: ignore[reportPrivateUsage]

    asyncio.run(compare())


def _both(pair: Pair, inside: set[int]) -> bool:
    return id(pair[0]) in inside and id(pair[1]) in inside


def test_what_stands_for_skipped_messages_never_changes() -> None:
    async def main() -> None:
        context = ours.HeadAndTailChatCompletionContext(1, 4)
        seen: set[str] = set()
        for message in conversation(8):
            await context.add_message(message)
            got = await context.get_messages()
            seen |= {m.content for m in got if isinstance(m, UserMessage) and m.source == "System"}  # type: ignore[misc]
        assert seen == {"Skipped messages."}

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_saved_states_are_read_by_both(kind: str) -> None:
    async def main() -> None:
        theirs, mine = of(kind, built_in, 3, 3), of(kind, ours, 3, 3)
        for message in conversation(4):
            await mine.add_message(message)
        saved = json.loads(json.dumps(await mine.save_state()))
        await theirs.load_state(saved)
        other = of(kind, ours, 3, 3)
        await other.load_state(json.loads(json.dumps(await theirs.save_state())))
        assert await other.get_messages() == await mine.get_messages()
        await mine.clear()
        assert await mine.get_messages() == []

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["buffered", "head and tail", "unbounded", "limited"])
def test_a_dumped_component_is_ours_again(kind: str) -> None:
    first: list[LLMMessage] = [user("from the start")]
    server = AgentServer(url="http://127.0.0.1:9/v1")
    made: dict[str, Callable[[], Any]] = {
        "buffered": lambda: ours.BufferedChatCompletionContext(3, first, warm=False),
        "head and tail": lambda: ours.HeadAndTailChatCompletionContext(1, 2, first, warm=False),
        "unbounded": lambda: ours.UnboundedChatCompletionContext(first, warm=False),
        "limited": lambda: ours.TokenLimitedChatCompletionContext(
            client_of(server), token_limit=100, initial_messages=list(first), warm=False
        ),
    }
    context = made[kind]()
    dumped = context.dump_component()
    assert dumped.provider.startswith("smoothagent_autogen.")
    loaded = ChatCompletionContext.load_component(json.loads(dumped.model_dump_json()))
    assert type(loaded) is type(context)
    assert loaded.dump_component().model_dump_json() == dumped.model_dump_json()
    assert loaded._messages == first  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ours.BufferedChatCompletionContext(0), "buffer_size"),
        (lambda: ours.HeadAndTailChatCompletionContext(0, 1), "head_size"),
        (lambda: ours.HeadAndTailChatCompletionContext(1, -1), "tail_size"),
    ],
)
def test_what_the_built_in_refuses_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [5, 6])
def test_the_requests_are_the_built_ins_and_the_next_window_is_warm(size: int, streams: bool) -> None:
    more: dict[str, Any] = {"model_client_stream": streams}
    theirs, agent = played(built_in.BufferedChatCompletionContext(size), **more)
    mine, other = played(ours.BufferedChatCompletionContext(size), **more)
    assert [b for b in mine.main if b] == theirs.main
    assert other._model_client.total_usage() == agent._model_client.total_usage()  # pyright: ignore[reportPrivateUsage]
    # Only what the tool says is not known before it has said it.
    moved = [b for b in mine.main[1:] if "the task" not in json.dumps(b["messages"])]
    assert len(moved) >= 8
    assert [warmed_before(mine, b) for b in moved] == [len(b["messages"]) - 1 for b in moved]
    # The built-in never warms.
    assert theirs.prefills == []


def test_the_next_tail_is_warm_behind_the_head() -> None:
    mine, _ = played(ours.HeadAndTailChatCompletionContext(1, 4))
    moved = [b for b in mine.main if any("Skipped" in str(m["content"]) for m in b["messages"])]
    assert len(moved) >= 8
    assert [warmed_before(mine, b) for b in moved[1:]] == [len(b["messages"]) - 1 for b in moved[1:]]


def test_windows_by_tokens_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def count(self: Any, messages: list[LLMMessage], *, tools: Any = ()) -> int:
        return Counting().count_tokens(messages)

    monkeypatch.setattr(OpenAIChatCompletionClient, "count_tokens", count)
    client = client_of(AgentServer(url="http://127.0.0.1:9/v1"))
    theirs, _ = played(built_in.TokenLimitedChatCompletionContext(client, token_limit=2_000))
    mine, _ = played(ours.TokenLimitedChatCompletionContext(client, token_limit=2_000))
    whole = [b for b in theirs.main if len(b["messages"]) == 2 * theirs.main.index(b) + 2]
    assert mine.main[: len(whole)] == whole
    moved = mine.main[len(whole) + 1 :]
    assert len(moved) >= 4
    for body in moved:
        asked = {c["id"] for m in body["messages"] for c in m.get("tool_calls") or ()}
        assert asked == {m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"}
    assert sum(warmed_before(mine, b) == len(b["messages"]) - 1 for b in moved) >= len(moved) - 1


@pytest.mark.parametrize("size", [3, 5, 6, 8])
def test_an_agent_that_asks_once_for_each_task_is_foreseen(size: int) -> None:
    """AutoGen's default: between a tool's results and the next call there is what the user says."""
    server, _ = played(ours.BufferedChatCompletionContext(size), turns=1000, tasks=12, max_tool_iterations=1)
    moved = server.main[size:]
    assert len(moved) >= 4
    # All but what the user says, and the results before it.
    for body in moved:
        cold = len(body["messages"]) - warmed_before(server, body)
        assert cold <= 2


def test_a_context_that_is_dropped_is_gone() -> None:
    """What it held on the server is let go later, and holds nothing of the conversation."""
    context = ours.BufferedChatCompletionContext(4)
    played(context)
    gone = weakref.ref(context._ahead)  # pyright: ignore[reportPrivateUsage]
    asyncio.run(context.clear())
    del context
    gc.collect()
    assert gone() is None


def test_what_is_found_out_too_late_is_not_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call has come: beside it an older window would be in its way, and take its place after it."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    over, begun, finding = threading.Event(), threading.Semaphore(0), set[threading.Thread]()
    last = False

    def count(self: Any, messages: list[LLMMessage], *, tools: Any = ()) -> int:
        if threading.current_thread() is not threading.main_thread() and not last:
            finding.add(threading.current_thread())
            begun.release()
            over.wait(30)
        return Counting().count_tokens(messages)

    monkeypatch.setattr(OpenAIChatCompletionClient, "count_tokens", count)

    async def main() -> None:
        nonlocal last
        with serving(AgentServer()) as server:
            client = client_of(server)
            context = ours.TokenLimitedChatCompletionContext(client, token_limit=2_500)
            for number in range(6):
                await context.add_message(user(f"{number} " + "u" * 300))
                await client.create(await context.get_messages())
                last = number == 5
                await context.add_message(answer("a" * 300))
                assert last or await asyncio.to_thread(begun.acquire, timeout=30)
            await settled(context)
            in_time = list(server.prefills)
            assert any("5 u" in str(m["content"]) for m in in_time[-1]["messages"])
            over.set()
            for thread in finding:
                await asyncio.to_thread(thread.join, 30)
            await settled(context)
            assert server.prefills == in_time

    asyncio.run(main())


def test_few_counts_are_enough_to_find_the_next_window() -> None:
    class Counted(Counting):
        asked = 0

        def count_tokens(self, messages: list[LLMMessage], *, tools: Any = ()) -> int:
            self.asked += 1
            return super().count_tokens(messages)

    client: Any = Counted()
    theirs = built_in.TokenLimitedChatCompletionContext(client, token_limit=2_000)
    mine = ours.TokenLimitedChatCompletionContext(client, token_limit=2_000)
    messages: list[LLMMessage] = [user("u" * (20 + i % 7)) for i in range(300)]
    for message in messages:
        asyncio.run(theirs.add_message(message))
    expected = asyncio.run(theirs.get_messages())
    before = client.asked
    assert before > 100
    assert mine._window(messages) == expected  # pyright: ignore[reportPrivateUsage]
    assert client.asked - before <= 10


def test_a_window_that_does_not_move_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the cache as it is; a shorter one in its place would be a step back."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def count(self: Any, messages: list[LLMMessage], *, tools: Any = ()) -> int:
        return Counting().count_tokens(messages)

    monkeypatch.setattr(OpenAIChatCompletionClient, "count_tokens", count)
    client = client_of(AgentServer(url="http://127.0.0.1:9/v1"))
    server, _ = played(ours.TokenLimitedChatCompletionContext(client, token_limit=100_000), turns=2, tasks=6)
    assert server.prefills == []


@pytest.mark.parametrize("kind", ["buffered", "head and tail", "unbounded"])
def test_a_copy_begins_with_nothing_under_way(kind: str) -> None:
    context = of(kind, ours, 3, 3)
    played(context, turns=8)
    copied = copy.deepcopy(context)
    assert asyncio.run(copied.get_messages()) == asyncio.run(context.get_messages())


def test_a_reflection_has_a_prefix_of_its_own() -> None:
    """It is asked for without tools, so that nothing of the calls before it is in a cache."""
    mine, _ = played(ours.UnboundedChatCompletionContext(), tasks=4, max_tool_iterations=1, reflect_on_tool_use=True)
    reflections = [b for b in mine.main if not b.get("tools")]
    assert len(reflections) == 4
    assert [warmed_before(mine, b) for b in reflections[1:]] == [len(b["messages"]) - 1 for b in reflections[1:]]


def test_nothing_is_warmed_where_the_user_does_not_want_it() -> None:
    mine, _ = played(ours.BufferedChatCompletionContext(4, warm=False))
    assert mine.prefills == []
