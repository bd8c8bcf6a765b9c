"""The same hooks from plain threads, with the real lane: a daemon thread with a loop of its own."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import oracle
from conversations import PROMPT, Form, steady, wires_of
from listing import FORMS, Llm, aagent, agent, execute_tool
from scripted import HANG, WHO, CharCounter, ScriptedBackend, Sent
from smoothagent import (
    BackendUnreachableError,
    ClosedError,
    KeepRecent,
    LookaheadRuntime,
    LookaheadStrategy,
    Message,
    SlidingWindow,
    Summarize,
)
from smoothagent.lane import process_lane
from test_runtime import Shorten

LIMIT = 20.0
"""Real seconds after which a test is called stuck; nothing is asserted about time."""


async def _nothing() -> None:
    pass


def until(condition: Callable[[], object]) -> None:
    """Let lane and threads run until it holds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        process_lane().spawn(_nothing()).result(LIMIT)
        assert time.monotonic() < deadline, "stuck"


def ready(runtime: LookaheadRuntime[Any]) -> None:
    """Until the lookahead has nothing left to do."""
    until(lambda: runtime.events[-1]["event"] in ("Warmed", "Failed"))


def runtime_of(
    strategy: LookaheadStrategy, server: ScriptedBackend | None = None, **more: Any
) -> LookaheadRuntime[Any]:
    return LookaheadRuntime(strategy, backend=server, tokens=CharCounter(), prompt=PROMPT, **more)


def summarizer(server: ScriptedBackend, **more: Any) -> LookaheadRuntime[Any]:
    return runtime_of(Summarize(900, keep=250, max_tokens=50), server, **more)


def history(turns: int) -> list[dict[str, Any]]:
    """A conversation so far, as dicts."""
    plan = steady(turns)
    out: list[dict[str, Any]] = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": "u" * 50}]
    for turn in plan.turns:
        (call,) = turn.calls
        function = {"name": "sed", "arguments": call.arguments}
        out.append({"role": "assistant", "content": turn.text, "tool_calls": [{"id": call.id, "function": function}]})
        out.append({"role": "tool", "tool_call_id": call.id, "content": call.result})
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [Shorten, lambda: KeepRecent(3, at_turns=5), lambda: SlidingWindow(tokens=700)])
def test_listing_2_as_printed(form: Form, make: Callable[[], LookaheadStrategy]) -> None:
    llm = Llm(form)
    runtime = runtime_of(make(), ScriptedBackend(delay=0))
    messages = agent(runtime, llm, execute_tool(form), llm.begin(), turns=14)
    assert runtime.last_commit is not None
    assert llm.paired()
    assert len(messages) <= len(llm.begin()) + 2 * 14
    runtime.close(LIMIT)


def test_listing_2_without_a_server() -> None:
    """``LookaheadRuntime(strategy)``: the transformation runs ahead, nothing is warmed."""
    llm = Llm("dict")
    runtime: LookaheadRuntime[Any] = LookaheadRuntime(KeepRecent(3, at_turns=5))
    agent(runtime, llm, execute_tool("dict"), llm.begin(), turns=8)
    assert runtime.last_commit is not None
    runtime.close(LIMIT)


def test_a_summary_is_prepared_and_warmed_on_the_lane() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    runtime = summarizer(server)
    early, late = history(3), history(4)
    late[: len(early)] = early
    runtime.on_segment_boundary(early)
    ready(runtime)
    runtime.on_segment_boundary(late)
    ready(runtime)
    late.append({"role": "user", "content": "u" * 60})
    out = runtime.on_commit(late)
    report = runtime.last_commit
    assert report is not None
    assert report.kind == "lookahead"
    assert report.waited == 0
    assert [s.kind for s in server.sent if not s.lookahead] == []
    assert wires_of(out) == oracle.summarized(late, report.boundary, *_template())
    runtime.close(LIMIT)
    until(lambda: server.running == 0)


def _template() -> tuple[str, str]:
    template = Summarize(9_000)
    return template.prefix, template.question


def test_where_nothing_was_started_the_caller_waits_for_the_summary() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    runtime = summarizer(server)
    messages = history(5)
    out = runtime.on_commit(messages)
    assert runtime.last_commit is not None
    assert runtime.last_commit.kind == "sync"
    assert wires_of(out) == oracle.summarized(messages, runtime.last_commit.boundary, *_template())
    assert [s.lookahead for s in server.sent if s.kind == "generate"] == [False]
    runtime.close(LIMIT)


def test_a_failing_server_gives_the_history_back() -> None:
    server = ScriptedBackend(delay=0, fault=lambda kind, n: BackendUnreachableError("gone"))
    runtime = summarizer(server)
    messages = history(5)
    runtime.on_segment_boundary(messages)
    ready(runtime)
    assert runtime.on_commit(messages) == messages
    messages.append({"role": "user", "content": "and now?"})
    assert runtime.on_commit(messages) == messages
    assert runtime.last_commit is None
    runtime.close(LIMIT)


def test_a_wait_at_the_ceiling_is_bounded() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer, pause=lambda kind, n: HANG if n == 1 else None)
    runtime = summarizer(server, wait=0.01, ceiling=900)
    early = history(4)
    runtime.on_segment_boundary(early)
    until(lambda: server.running == 1)
    messages = [*early, {"role": "user", "content": "u" * 60}]
    out = runtime.on_commit(messages)
    assert runtime.last_commit is not None
    assert runtime.last_commit.kind == "sync"
    assert wires_of(out) == oracle.summarized(messages, runtime.last_commit.boundary, *_template())
    until(lambda: server.cancelled == [("generate", 1)])
    runtime.close(LIMIT)


def test_the_lookahead_outlives_the_loop_that_started_it() -> None:
    """openai-agents-python#2343: each turn in an ``asyncio.run`` of its own."""
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    runtime = summarizer(server)
    messages = history(4)

    async def begin() -> None:
        runtime.on_segment_boundary(messages)

    async def end() -> list[Any]:
        return await runtime.aon_commit([*messages, {"role": "user", "content": "u" * 60}])

    asyncio.run(begin())
    ready(runtime)
    out = asyncio.run(end())
    assert runtime.last_commit is not None
    assert runtime.last_commit.kind == "lookahead"
    assert len(out) < len(messages)
    runtime.close(LIMIT)


def test_the_blocking_hooks_work_inside_a_running_loop() -> None:
    """llama_index#15293, #19026: no nested loop."""
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    runtime = summarizer(server)

    async def main() -> list[Any]:
        return runtime.on_commit(history(5))

    assert len(asyncio.run(main())) < len(history(5))
    runtime.close(LIMIT)


def test_listing_2_asynchronous_on_the_real_lane() -> None:
    class Quick(Llm):
        async def agenerate(self, messages: list[Any]) -> Any:
            return self.generate(messages)

    async def main() -> None:
        llm = Quick("openai")
        runtime = runtime_of(KeepRecent(3, at_turns=5), ScriptedBackend(delay=0))
        await aagent(runtime, llm, execute_tool("openai"), llm.begin(), turns=10)
        assert runtime.last_commit is not None
        assert llm.paired()
        await runtime.aclose()

    asyncio.run(main())


def test_a_cancelled_caller_does_not_cancel_the_lane() -> None:
    release = threading.Event()
    asked = threading.Event()

    class Slow(ScriptedBackend):
        async def generate(self, *args: Any, **more: Any) -> Any:
            asked.set()
            await asyncio.to_thread(release.wait, LIMIT)
            return await super().generate(*args, **more)

    server = Slow(delay=0, answer=oracle.answer)
    runtime = summarizer(server, ceiling=900)
    messages = history(4)
    runtime.on_segment_boundary(messages)
    assert asked.wait(LIMIT)
    messages = [*messages, {"role": "user", "content": "u" * 60}]

    async def give_up() -> None:
        call = asyncio.ensure_future(runtime.aon_commit(messages))
        await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(give_up())
    release.set()
    out = runtime.on_commit(messages)
    assert runtime.last_commit is not None
    assert runtime.last_commit.kind in ("late", "lookahead")
    assert wires_of(out) == oracle.summarized(messages, runtime.last_commit.boundary, *_template())
    assert server.generations == 1
    runtime.close(LIMIT)


def test_the_callers_context_stays_with_the_caller() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    runtime = summarizer(server)
    token = WHO.set("the caller")
    runtime.on_segment_boundary(history(4))
    ready(runtime)
    runtime.on_commit(history(7))
    WHO.reset(token)
    runtime.close(LIMIT)
    assert len(server.sent) > 1
    assert {s.who for s in server.sent} == {"nobody"}


class Blocking(Shorten):
    """A strategy whose transform blocks its thread."""

    def __init__(self) -> None:
        super().__init__(limit=600)
        self.release = threading.Event()
        self.begun = threading.Event()
        self.threads: list[str] = []

    def transform(self) -> Awaitable[None] | None:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.release.wait(LIMIT)
        return super().transform()


def test_a_transform_that_blocks_holds_up_nobody() -> None:
    """The lane goes on, other conversations too, and the hooks return."""
    strategy = Blocking()
    blocked = runtime_of(strategy, ScriptedBackend(delay=0))
    blocked.on_segment_boundary(history(2))
    assert strategy.begun.wait(LIMIT)
    blocked.on_segment_boundary(history(2))
    assert blocked.on_commit(history(2)) == history(2)

    server = ScriptedBackend(delay=0, answer=oracle.answer)
    other = summarizer(server)
    other.on_segment_boundary(history(4))
    ready(other)
    other.on_commit([*history(4), {"role": "user", "content": "u" * 60}])
    assert other.last_commit is not None
    assert other.last_commit.kind == "lookahead"
    strategy.release.set()
    assert strategy.threads[0] == "smoothagent-transform"
    blocked.close(LIMIT)
    other.close(LIMIT)


def test_many_conversations_from_many_threads() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    failures: list[BaseException] = []
    done: list[int] = []

    def converse(number: int) -> None:
        try:
            llm = Llm("dict")
            runtime = summarizer(server, session=f"s{number}")
            agent(runtime, llm, execute_tool("dict"), llm.begin(), turns=15)
            assert llm.paired()
            assert runtime.last_commit is not None
            runtime.close(LIMIT)
            done.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=converse, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert failures == []
    assert sorted(done) == list(range(6))
    until(lambda: server.running == 0)
    until(lambda: sorted(server.released) == [f"s{n}" for n in range(6)])


def test_closing_waits_for_the_work_to_have_stopped() -> None:
    arrived = threading.Event()

    def note(sent: Sent) -> None:
        arrived.set()

    server = ScriptedBackend(delay=0, pause=lambda kind, n: HANG, arrived=note)
    runtime = summarizer(server)
    runtime.on_segment_boundary(history(4))
    assert arrived.wait(LIMIT)
    runtime.close(LIMIT)
    until(lambda: server.running == 0)
    assert server.cancelled == [("generate", 1)]
    with pytest.raises(ClosedError):
        runtime.on_commit(history(4))


def test_closing_while_another_thread_waits_gives_it_its_history() -> None:
    arrived = threading.Event()

    def note(sent: Sent) -> None:
        arrived.set()

    server = ScriptedBackend(delay=0, pause=lambda kind, n: HANG, arrived=note)
    runtime = summarizer(server)
    messages = history(5)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(runtime.on_commit(messages)), daemon=True)
    thread.start()
    assert arrived.wait(LIMIT)
    runtime.close(LIMIT)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert results == [messages]
    until(lambda: server.running == 0)


def test_a_blocking_hook_on_the_lane_itself_is_refused_not_a_deadlock() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    runtime = summarizer(server)

    async def wrong() -> None:
        runtime.on_commit(history(5))

    with pytest.raises(RuntimeError, match="async twin"):
        process_lane().spawn(wrong()).result(LIMIT)
    runtime.close(LIMIT)


def test_a_runtime_that_is_forgotten_leaves_no_error_behind() -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer, fault=lambda kind, n: RuntimeError("a bug"))
    runtime = summarizer(server)
    runtime.on_segment_boundary(history(4))
    ready(runtime)
    del runtime
    gc.collect()
    process_lane().spawn(_nothing()).result(LIMIT)


SCRIPT = """
import asyncio, sys
sys.path[:0] = sys.argv[1:]
from scripted import HANG, ScriptedBackend, CharCounter
from smoothagent import LookaheadRuntime, Summarize
import test_runtime_sync as t
arrived = t.threading.Event()
server = ScriptedBackend(delay=0, pause=lambda kind, n: HANG, arrived=lambda sent: arrived.set())
runtime = t.summarizer(server)
runtime.on_segment_boundary(t.history(4))
assert arrived.wait(20)
print("leaving", flush=True)
"""


def test_work_on_the_lane_never_delays_the_interpreters_exit() -> None:
    from pathlib import Path

    tests = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "tests")]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *tests], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "leaving\n", "")


FORK = """
import os, sys
sys.path[:0] = sys.argv[1:]
import oracle
from scripted import ScriptedBackend
import test_runtime_sync as t
server = ScriptedBackend(delay=0, answer=oracle.answer)
runtime = t.summarizer(server)
runtime.on_segment_boundary(t.history(4))
t.ready(runtime)
child = os.fork()
out = runtime.on_commit([*t.history(4), {"role": "user", "content": "u" * 60}])
assert len(out) < 11, out
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert runtime.last_commit.kind == "lookahead"
    print("both", flush=True)
else:
    assert runtime.last_commit.kind == "sync"
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs fork")
def test_a_forked_child_goes_on_as_the_plain_framework_would() -> None:
    from pathlib import Path

    tests = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "tests")]
    ran = subprocess.run([sys.executable, "-c", FORK, *tests], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "both\n"), ran.stderr


def test_messages_are_read_only_to_strategies_of_sequences() -> None:
    """A strategy that asks for a sequence gets one of neutral messages."""
    seen: list[Sequence[Message]] = []

    class Looking(Shorten):
        def should_lookahead(self) -> bool:
            seen.append(self.main.messages)
            return False

    runtime = runtime_of(Looking())
    runtime.on_segment_boundary(history(1))
    assert all(isinstance(m, Message) for m in seen[0])
    runtime.close()


def test_a_runtime_that_is_dropped_unclosed_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = ScriptedBackend(delay=0, answer=oracle.answer)
    for n in range(5):
        runtime = summarizer(server, session=f"dropped{n}")
        runtime.on_segment_boundary(history(4))
        ready(runtime)
        del runtime
    gc.collect()
    until(lambda: sorted(server.released) == [f"dropped{n}" for n in range(5)])
    gc.collect()
    assert "was destroyed but it is pending" not in caplog.text
