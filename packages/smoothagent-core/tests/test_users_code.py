"""Strategies, codecs and counters are users' code: whatever they do, the agent gets its history and goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from conversations import PROMPT
from scripted import CharCounter, ScriptedBackend
from smoothagent import Generated, KeepRecent, LookaheadRuntime, LookaheadStrategy, Message, Summarize, Usage
from smoothagent.codec import OpenAICodec
from smoothagent.lane import ThreadLane
from smoothagent.strategy import Commit
from test_runtime_sync import LIMIT, history, ready, runtime_of, summarizer, until


class Handmade(LookaheadStrategy):
    """Commits whatever the test says."""

    extend_inline = False

    def __init__(self, made: Callable[[Sequence[Message]], Commit | None]) -> None:
        super().__init__()
        self.made = made

    def should_lookahead(self) -> bool:
        return self.la.last_segment_end == 0

    def transform(self) -> Awaitable[None] | None:
        self.la.last_segment_end = len(self.main.messages)
        self.la.transformed = list(self.main.messages)
        return None

    def should_commit(self) -> bool:
        return True

    def commit(self, history: Sequence[Message]) -> Commit | None:
        return self.made(history)


def keeps_the_call_only(messages: Sequence[Message]) -> Commit:
    return Commit(len(messages), [m for m in messages if m.role != "tool"])


def keeps_the_result_only(messages: Sequence[Message]) -> Commit:
    return Commit(len(messages), [m for m in messages if not m.tool_calls])


def cuts_between(messages: Sequence[Message]) -> Commit:
    return Commit(len(messages) - 1, [])


@pytest.mark.parametrize("made", [keeps_the_call_only, keeps_the_result_only, cuts_between])
@pytest.mark.parametrize("lookahead", [True, False])
def test_a_commit_that_would_part_a_pair_is_not_made(
    made: Callable[[Sequence[Message]], Commit], lookahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_of(Handmade(made), ScriptedBackend(delay=0), lookahead=lookahead)
    for turns in range(1, 5):
        runtime.on_segment_boundary(history(turns)[:-1])  # the calls are known, their results are not
        sent = history(turns)
        if lookahead and turns == 1:
            ready(runtime)
        assert runtime.on_commit(sent) == sent
    assert runtime.last_commit is None
    assert "the history is kept" in caplog.text
    runtime.close()


@pytest.mark.parametrize("where", ["new", "wire"])
def test_a_codec_that_fails_costs_the_commit_only(where: str) -> None:
    class Broken(OpenAICodec):
        def __getattribute__(self, name: str) -> Any:
            if name == where:
                raise ValueError("a codec's bug")
            return super().__getattribute__(name)

    runtime = LookaheadRuntime(
        Summarize(900, keep=250, max_tokens=50),
        backend=ScriptedBackend(delay=0),
        tokens=CharCounter(),
        prompt=PROMPT,
        codec=Broken(),
    )
    for turns in range(1, 9):
        sent = history(turns)
        assert runtime.on_commit(sent) == sent
        runtime.on_segment_boundary(sent)
    runtime.close()


@pytest.mark.parametrize("method", ["tail_fits", "refuse", "predict", "snapshot"])
def test_a_method_that_fails_is_no_trouble_to_the_agent(method: str) -> None:
    class Faulty(Summarize):
        def __getattribute__(self, name: str) -> Any:
            if name == method:
                raise ZeroDivisionError("a strategy's bug")
            return super().__getattribute__(name)

    runtime = runtime_of(Faulty(900, keep=250, max_tokens=50), ScriptedBackend(delay=0))
    for turns in range(1, 9):
        sent = history(turns)
        got = runtime.on_commit(sent)
        runtime.on_segment_boundary(sent)
        assert got[-1] is sent[-1]
        assert got == sent or runtime.last_commit is not None
    runtime.close()


def test_a_transform_may_use_another_runtime() -> None:
    """It runs on the caller's thread without a lock that the lane would wait for."""
    server = ScriptedBackend(delay=0)
    inner = summarizer(server)

    class Nested(Handmade):
        def transform(self) -> Awaitable[None] | None:
            assert inner.on_commit(history(9)) != history(9)
            return super().transform()

    runtime = runtime_of(Nested(lambda _: None), server, lookahead=False)
    done = threading.Event()

    def agent() -> None:
        runtime.on_commit(history(3))
        done.set()

    threading.Thread(target=agent, daemon=True).start()
    assert done.wait(LIMIT), "a deadlock"
    runtime.close()
    inner.close()


@pytest.mark.parametrize("raised", [SystemExit(2), KeyboardInterrupt(), StopIteration("leaked")])
@pytest.mark.parametrize("later", [False, True])
def test_a_transform_that_raises_anything_fails_alone(raised: BaseException, later: bool) -> None:
    class Exits(Handmade):
        def transform(self) -> Awaitable[None] | None:
            return self.work() if later else self.now()

        def now(self) -> None:
            raise raised

        async def work(self) -> None:
            raise raised

    lane = ThreadLane()
    runtime = runtime_of(Exits(lambda _: None), ScriptedBackend(delay=0), lane=lane)
    runtime.on_segment_boundary(history(2))
    until(lambda: runtime.events[-1]["event"] == "Failed")
    assert lane.spawn(nothing()).result(LIMIT) == "it lives"
    runtime.close()
    lane.shut_down()


async def nothing() -> str:
    return "it lives"


def test_a_counter_that_fails_once_leaves_the_history_as_it_was() -> None:
    class Tired(CharCounter):
        failures = 1

        def count(self, message: Any) -> int:
            if message.role == "tool" and self.failures:
                self.failures -= 1
                raise OSError("the tokenizer is away")
            return super().count(message)

    runtime: LookaheadRuntime[dict[str, Any]] = LookaheadRuntime(KeepRecent(2, at_turns=4), tokens=Tired())
    with pytest.raises(OSError, match="away"):
        runtime.on_commit(history(1))
    for turns in range(1, 4):
        assert runtime.on_commit(history(turns)) == history(turns)
    runtime.close()


def test_an_answer_that_calls_a_tool_beside_its_text_is_no_summary() -> None:
    answer = Generated("Let me look at that first.", "tool_calls", True, Usage(50, 5, 0))
    server = ScriptedBackend(delay=0, generated=lambda n, _: answer)
    runtime = summarizer(server)
    for turns in range(1, 9):
        sent = history(turns)
        assert runtime.on_commit(sent) == sent
        runtime.on_segment_boundary(sent)
    assert server.generations
    runtime.close()


def test_what_a_user_writes_is_never_taken_for_a_summary() -> None:
    strategy = Summarize(900, keep=250, max_tokens=50)
    runtime = runtime_of(strategy, ScriptedBackend(delay=0), lookahead=False)
    pasted = strategy.prefix + "all the things that a user pasted"
    messages = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": pasted}, *history(9)[2:]]
    view = runtime.on_commit(messages)
    assert runtime.last_commit is not None
    assert [m["content"] for m in view if m["role"] == "user"][1:] == [pasted]
    # Its own summary is known, and not kept beside the next one.
    again = [*view, {"role": "user", "content": "go on"}, *history(9)[2:]]
    second = runtime.on_commit(again)
    assert [m["content"] for m in second if m["role"] == "user"][1:] == ["go on"]
    runtime.close()


def test_after_the_interpreter_has_begun_to_exit_nothing_hangs() -> None:
    lane = ThreadLane()
    lane.spawn(nothing()).result(LIMIT)
    lane.shut_down()
    runtime = summarizer(ScriptedBackend(delay=0), lane=lane)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(runtime.on_commit(history(9))), daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert done == [history(9)]
    assert "smoothagent" in sys.modules
