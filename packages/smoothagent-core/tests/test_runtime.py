"""The runtime's surface: Listing 2, the paper's own strategies, records, refusals."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import itertools
import json
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import oracle
from conversations import (
    PROMPT,
    Conversation,
    Form,
    Hand,
    Plan,
    converse,
    dressed,
    plans,
    runtime_of,
    same,
    steady,
    wire_of,
    wires_of,
)
from examples import examples
from listing import FORMS, Llm, aagent, execute_tool
from scripted import CharCounter, ScriptedBackend, tokens_of
from smoothagent import (
    Caps,
    ClosedError,
    CommitRecord,
    ConfigurationError,
    EstimateCounter,
    Generated,
    HistoryError,
    KeepRecent,
    LookaheadRuntime,
    LookaheadStrategy,
    Message,
    Offload,
    OffloadStore,
    OpenAICodec,
    Pipeline,
    Prompt,
    SlidingWindow,
    Stream,
    Summarize,
    ToolCall,
    Usage,
    lookahead,
    machine,
    observe,
)
from smoothagent.lane import LoopLane
from smoothagent.machine import Event, State
from smoothagent.record import Whole
from smoothagent.remembered import remembered
from smoothagent.telemetry import Telemetry
from virtual_clock import run_virtual

STORE = OffloadStore("memory://runtime")


class Shorten(LookaheadStrategy):
    """The paper's offloading in its own four methods: each finished segment is rewritten once."""

    def __init__(self, limit: int = 700) -> None:
        super().__init__()
        self.limit = limit
        self.transforms: list[int] = []

    def should_lookahead(self) -> bool:
        return len(self.main.messages) > self.la.last_segment_end

    def transform(self) -> Awaitable[None] | None:
        segment = self.main.messages[self.la.last_segment_end :]
        self.transforms.append(len(segment))
        self.la.transformed.extend(shortened(m) for m in segment)
        self.la.last_segment_end = len(self.main.messages)
        return None

    def should_commit(self) -> bool:
        return self.tokens >= self.limit


class SlowShorten(Shorten):
    """The same, asynchronous, with a model."""

    def transform(self) -> Awaitable[None] | None:
        return self._later(self.main.messages[self.la.last_segment_end :])

    async def _later(self, segment: Sequence[Message]) -> None:
        if any(m.role == "tool" for m in segment) and self.model is not None:
            await self.model.generate(list(segment), max_tokens=5)
        super().transform()


def shortened(message: Message) -> Message:
    return message.with_content(message.text[:10]) if message.role == "tool" and len(message.text) > 10 else message


def short_wire(wire: dict[str, Any]) -> dict[str, Any]:
    return {**wire, "content": wire["content"][:10]} if wire["role"] == "tool" else wire


# ---- Listing 2 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_listing_2_as_printed_asynchronous(form: Form) -> None:
    async def main() -> None:
        llm = Llm(form)
        runtime = runtime_of(Shorten(), ScriptedBackend(delay=0.1))
        messages = await aagent(runtime, llm, execute_tool(form), llm.begin(), turns=12)
        assert runtime.last_commit is not None
        assert llm.paired()
        sizes = [oracle.total(sent) for sent in llm.sent]
        assert max(sizes) < 900
        assert len(messages) == len(llm.begin()) + 2 * 12
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "strategy", [KeepRecent(3, at_turns=5), SlidingWindow(tokens=700)], ids=lambda s: type(s).__name__
)
def test_listing_2_with_our_strategies(form: Form, strategy: LookaheadStrategy) -> None:
    async def main() -> None:
        llm = Llm(form)
        runtime = runtime_of(strategy, ScriptedBackend(delay=0.1))
        messages = await aagent(runtime, llm, execute_tool(form), llm.begin(), turns=12)
        assert runtime.last_commit is not None
        assert llm.paired()
        # Untouched messages are the very objects that the model and the tools made.
        assert all(any(m is mine for mine in llm.objects) for m in messages if wire_of(m)["role"] == "assistant")
        await runtime.aclose()

    run_virtual(main())


# ---- a user's own strategy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Shorten, SlowShorten])
@given(
    plan=plans(),
    hand=st.sampled_from(["view", "raw", "fresh"]),
    delay=st.sampled_from([0.0, 0.5, 30.0]),
    form=st.sampled_from(FORMS),
)
@examples(30)
def test_a_strategy_in_the_papers_methods_is_extended_inline(
    make: type[Shorten], plan: Plan, hand: Hand, delay: float, form: Form
) -> None:
    """``la.transformed ++ T(messages[la.last_segment_end:])``: the synchronous result, however it was prepared."""
    conversation = converse(plan, make(), backend=ScriptedBackend(delay=delay), hand=hand, form=form)
    for step in conversation.steps:
        wanted = [short_wire(w) for w in step.view]
        assert same(step.sent, step.view if step.report is None else wanted)


def test_segments_are_transformed_once_each() -> None:
    strategy = Shorten(limit=10_000)
    conversation = converse(steady(6), strategy, backend=ScriptedBackend(delay=0.1))
    # What the last boundary brought had no time to be transformed.
    assert sum(strategy.transforms) == len(conversation.raw) - 1


@pytest.mark.parametrize("window", [None, 1000])
def test_a_strategy_that_names_no_trigger_has_a_ceiling_too(window: int | None) -> None:
    """A lookahead that never comes must not let the context grow for ever."""

    class Windowed(ScriptedBackend):
        async def caps(self) -> Caps:
            return replace(await super().caps(), window=window)

    server = Windowed(delay=0.1, pause=lambda kind, n: float("inf") if kind == "generate" else None)
    conversation = converse(steady(16), SlowShorten(700), backend=server)
    first = next(s for s in conversation.steps if s.report is not None)
    assert first.tokens < 1.5 * 700
    assert first.sent == [short_wire(w) for w in first.view]


class Faulty(Shorten):
    """A user's strategy with a bug in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError("a bug of the user's")

    def should_lookahead(self) -> bool:
        self._maybe("should_lookahead")
        return super().should_lookahead()

    def should_commit(self) -> bool:
        self._maybe("should_commit")
        return super().should_commit()

    def should_promote(self) -> bool:
        self._maybe("should_promote")
        return super().should_promote()

    def transform(self) -> Awaitable[None] | None:
        self._maybe("transform")
        return super().transform()


@pytest.mark.parametrize("where", ["should_lookahead", "should_commit", "should_promote", "transform"])
def test_a_bug_in_a_users_strategy_never_stops_the_agent(where: str, caplog: pytest.LogCaptureFixture) -> None:
    conversation = converse(steady(10), Faulty(where), backend=ScriptedBackend(delay=0.1))
    for step in conversation.steps:
        wanted = [short_wire(w) for w in step.view]
        assert step.sent == (step.view if step.report is None else wanted)
    if where in ("should_commit", "transform"):
        assert all(s.report is None for s in conversation.steps)
    assert any("ZeroDivisionError" in (r.exc_text or "") + r.getMessage() for r in caplog.records)


def test_a_strategy_may_be_given_as_a_factory() -> None:
    async def main() -> None:
        runtime = runtime_of(Shorten, None)  # type: ignore[arg-type]
        other = runtime_of(Shorten, None)  # type: ignore[arg-type]
        assert isinstance(runtime.strategy, Shorten)
        assert runtime.strategy is not other.strategy

    run_virtual(main())


# ---- again and again -------------------------------------------------------------------------------------------------


SINGLE_TASK = [
    KeepRecent(2, at_turns=4),
    SlidingWindow(3),
    SlidingWindow(tokens=600),
    Summarize(700, keep=200, max_tokens=50),
    Offload(600, keep=1, store=STORE, min_chars=100),
]


@pytest.mark.parametrize("strategy", SINGLE_TASK, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("hand", ["raw", "fresh"])
def test_a_raw_history_that_begins_as_its_head_does_stays_committed(strategy: LookaheadStrategy, hand: Hand) -> None:
    """One task, then only turns: what a window keeps is also how the raw history begins."""
    conversation = converse(steady(20), copy.deepcopy(strategy), backend=ScriptedBackend(delay=0.1), hand=hand)
    view = converse(steady(20), copy.deepcopy(strategy), backend=ScriptedBackend(delay=0.1), hand="view")
    assert [s.sent for s in conversation.steps] == [s.sent for s in view.steps]


@pytest.mark.parametrize("hand", ["view", "raw", "fresh"])
@pytest.mark.parametrize("strategy", SINGLE_TASK[:3], ids=lambda s: type(s).__name__)
def test_turns_that_are_all_alike_are_not_mistaken_for_one_another(strategy: LookaheadStrategy, hand: Hand) -> None:
    """An agent that polls: the same call with the same result, again and again."""
    turn = steady(1).turns[0]
    plan = Plan((("system", "s"),), (turn, *[replace(turn, user=None)] * 19))
    conversation = converse(plan, copy.deepcopy(strategy), backend=ScriptedBackend(delay=0.1), hand=hand)
    plain = converse(plan, copy.deepcopy(strategy), hand="view", lookahead=False)
    assert [len(s.sent) for s in conversation.steps] == [len(s.sent) for s in plain.steps]
    if hand == "view":
        assert [s.report is None for s in conversation.steps] == [s.report is None for s in plain.steps]


class Reminted(Conversation):
    """A harness that mints all ids anew each time it parses its history."""

    def given(self) -> list[Any]:
        out = wires_of(self.raw)
        self.minted = getattr(self, "minted", 0) + 1
        for wire in out:
            for call in wire.get("tool_calls", []):
                call["id"] = f"{self.minted}-{call['id']}"
            if "tool_call_id" in wire:
                wire["tool_call_id"] = f"{self.minted}-{wire['tool_call_id']}"
        return out


@pytest.mark.parametrize("strategy", SINGLE_TASK, ids=lambda s: type(s).__name__)
def test_ids_that_are_minted_anew_each_time_are_followed(strategy: LookaheadStrategy) -> None:
    async def main() -> list[oracle.Wires]:
        server = ScriptedBackend(delay=0.1)
        conversation = Reminted(runtime_of(copy.deepcopy(strategy), server), server, "raw")
        await conversation.run(steady(16, parallel=2, output=300))
        await conversation.runtime.aclose()
        assert any(s.report is not None for s in conversation.steps)
        for step in conversation.steps:
            assert oracle.paired(step.sent)
        return [s.sent for s in conversation.steps]

    reminted = run_virtual(main())
    plain = converse(
        steady(16, parallel=2, output=300), copy.deepcopy(strategy), backend=ScriptedBackend(delay=0.1), hand="raw"
    )
    assert all(same(a, b.sent) for a, b in zip(reminted, plain.steps, strict=True))


@pytest.mark.parametrize("strategy", SINGLE_TASK, ids=lambda s: type(s).__name__)
def test_a_persisted_record_carries_a_raw_history_over_a_restart(strategy: LookaheadStrategy) -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        conversation = Conversation(runtime_of(copy.deepcopy(strategy), server), server, "fresh")
        plan = steady(9, output=180)
        await conversation.run(plan)
        saved = conversation.runtime.record
        assert saved is not None
        data = saved.to_dict(wire_of)
        view = wires_of(conversation.view)
        await conversation.runtime.aclose()

        again = runtime_of(copy.deepcopy(strategy), server)
        again.restore(CommitRecord[Any].from_dict(data, loaded))
        raw = [*conversation.given(), {"role": "user", "content": "go on"}]
        out = await again.aon_commit(raw)
        if again.last_commit is None:
            assert wires_of(out) == [*view, {"role": "user", "content": "go on"}]
        else:
            assert len(out) <= len(view) + 1
        await again.aclose()

    run_virtual(main())


def loaded(wire: dict[str, Any]) -> dict[str, Any]:
    return dict(wire)


def test_a_record_of_an_older_version_is_read_too() -> None:
    data: dict[str, Any] = {"covered": 2, "digest": "d", "head": [], "head_digest": "h"}
    assert CommitRecord.from_dict(data, loaded) == CommitRecord(2, "d", [], "h", None)
    whole = CommitRecord(2, "d", [{"role": "user", "content": "x"}], "h", Whole(3, "a", 2, "b"))
    assert CommitRecord.from_dict(whole.to_dict(wire_of), loaded) == whole


def test_a_record_that_matches_neither_side_is_not_applied() -> None:
    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), None)
        runtime.restore(CommitRecord(3, "unknown", [{"role": "user", "content": "gone"}], "also unknown"))
        messages = [{"role": "user", "content": "hello"}]
        assert await runtime.aon_commit(messages) == messages

    run_virtual(main())


def test_a_foreign_history_in_between_does_not_cost_the_record() -> None:
    """A sub-task's messages, or another branch: the raw history that comes back is still that of the commit."""

    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), None)
        conversation = Conversation(runtime, None, hand="raw")
        await conversation.run(steady(6))
        assert runtime.last_commit is not None
        raw = [*conversation.raw, {"role": "user", "content": "go on"}]
        view = await runtime.aon_commit(raw)
        assert len(view) < len(raw)
        other = [{"role": "user", "content": "another thing"}]
        assert await runtime.aon_commit(other) == other
        assert await runtime.aon_commit(raw) == view
        await runtime.aclose()

    run_virtual(main())


# ---- compacting again and again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "x" * 5000, "fine"], ids=["rejected", "longer than what it stands for", "good"])
def test_the_same_history_is_not_transformed_again_without_new_tokens(answer: str) -> None:
    """codex#13279, OpenHands#8630, deer-flow#2622."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1, answer=lambda wires: answer)
        runtime = runtime_of(Summarize(700, keep=200, max_tokens=50), server)
        conversation = Conversation(runtime, None)
        await conversation.run(Plan((("system", "s"),), steady(4).turns))
        first = list(conversation.view)
        for _ in range(3):
            await asyncio.sleep(1)
            first = await runtime.aon_commit(first)
            runtime.on_segment_boundary(first)
        await asyncio.sleep(1)
        generations = server.generations
        for _ in range(5):
            assert await runtime.aon_commit(first) == first
            runtime.on_segment_boundary(first)
            await asyncio.sleep(1)
        assert server.generations == generations
        await runtime.aclose()

    run_virtual(main())


def test_commits_are_apart_by_what_was_made_room_for() -> None:
    conversation = converse(
        steady(60), Summarize(900, keep=250, max_tokens=50), backend=ScriptedBackend(delay=0.1, answer=oracle.answer)
    )
    commits = [s.turn for s in conversation.steps if s.report is not None]
    assert len(commits) > 5
    assert min(b - a for a, b in itertools.pairwise(commits)) >= 2


# ---- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [Prompt(system="s" * 900), Prompt(tools=[{"type": "function", "x": "y" * 4000}])])
def test_system_text_and_tools_count(prompt: Prompt) -> None:
    """langchain#34664, llama_index#21950."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        lane = LoopLane(asyncio.get_running_loop())
        counter = CharCounter() if prompt.system else None
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(
            KeepRecent(1, at_tokens=850), prompt=prompt, backend=server, lane=lane, tokens=counter
        )
        conversation = Conversation(runtime, server)
        await conversation.run(steady(3, output=20))
        await conversation.commit(3)
        assert any(s.report is not None for s in conversation.steps)
        await runtime.aclose()

    run_virtual(main())


def test_the_models_own_output_does_not_inflate_the_trigger() -> None:
    """letta#3242: the next prompt counts, not what the last call generated."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        lane = LoopLane(asyncio.get_running_loop())
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(KeepRecent(1, at_tokens=10_000), backend=server, lane=lane)
        conversation = Conversation(runtime, server)
        for number, turn in enumerate(steady(4).turns):
            await conversation.take(number, turn)
            async with runtime.main_request() as request:
                request.usage({"prompt_tokens": 60 * (number + 1), "completion_tokens": 50_000})
        assert await runtime.aon_commit(conversation.view) == conversation.view
        assert runtime.last_commit is None
        await runtime.aclose()

    run_virtual(main())


def test_the_servers_usage_calibrates_the_trigger() -> None:
    """langchain#39754: text that was undercounted three times over."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        lane = LoopLane(asyncio.get_running_loop())
        strategy = KeepRecent(1, at_tokens=1200)
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(strategy, backend=server, lane=lane)
        conversation = Conversation(runtime, server)
        await conversation.run(steady(6))
        assert runtime.last_commit is None
        before = strategy.tokens
        async with runtime.main_request() as request:
            request.usage(Usage(prompt_tokens=3 * before))
        out = await runtime.aon_commit(conversation.view)
        assert strategy.tokens < 3 * before
        assert runtime.last_commit is not None
        assert runtime.last_commit.before_tokens == pytest.approx(3 * before, rel=0.1)
        assert len(out) < len(conversation.view)
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_the_servers_own_count_calibrates_the_trigger_where_no_usage_comes(factor: float) -> None:
    """Where only the two hooks are called."""

    async def main() -> None:
        estimate, codec = EstimateCounter(), OpenAICodec()

        def counts(wires: Sequence[Any]) -> int:
            return round(factor * sum(estimate.count(codec.decode(w)) for w in wires))

        server = ScriptedBackend(delay=0.1, counts=counts)
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(
            KeepRecent(1, at_tokens=60_000), backend=server, lane=LoopLane(asyncio.get_running_loop())
        )
        conversation = Conversation(runtime, server)
        await conversation.run(steady(40))
        assert runtime.strategy.tokens == pytest.approx(counts(conversation.view), rel=0.05)
        # Again only when the length has changed by a quarter.
        assert 2 <= server.counted <= 20
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize("answer", [None, ZeroDivisionError("a bug"), 0], ids=["has none", "broken", "nonsense"])
def test_a_server_that_does_not_count_is_not_asked_for_ever(answer: Exception | int | None) -> None:
    def counts(wires: Sequence[Any]) -> int | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        server = ScriptedBackend(delay=0.1, counts=counts)
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(
            KeepRecent(1, at_tokens=60_000), backend=server, lane=LoopLane(asyncio.get_running_loop())
        )
        conversation = Conversation(runtime, server)
        await conversation.run(steady(40))
        assert runtime.strategy.tokens == sum(map(EstimateCounter().count, runtime.strategy.main.messages))
        assert server.counted <= 20
        await runtime.aclose()

    run_virtual(main())


def test_each_message_is_counted_once_however_often_the_hooks_are_called() -> None:
    """deepagents#1530."""

    class Counting(CharCounter):
        asked = 0

        def count(self, message: Any) -> int:
            self.asked += 1
            return super().count(message)

    async def main() -> None:
        counter = Counting()
        lane = LoopLane(asyncio.get_running_loop())
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(
            KeepRecent(50, at_turns=99), backend=ScriptedBackend(), lane=lane, tokens=counter
        )
        conversation = Conversation(runtime, None)
        await conversation.run(steady(30))
        for _ in range(20):
            await runtime.aon_commit(conversation.view)
            runtime.on_segment_boundary(conversation.view)
        assert counter.asked == len({(m["role"], m["content"]) for m in conversation.view})
        await runtime.aclose()

    run_virtual(main())


class Asked(CharCounter):
    """A tokenizer that is slow: in another process, perhaps."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def count(self, message: Any) -> int:
        self.asked.append((message.role, message.text))
        return super().count(message)


class CountedAsItCommits(Conversation):
    """Notes how many messages each commit hook has had counted."""

    counted: ClassVar[list[int]] = []

    async def ask(self, given: list[Any], turn: int) -> list[Any]:
        counter = cast("Any", self.runtime)._conversation.counter._counter
        before = len(counter.asked)
        out = await super().ask(given, turn)
        self.counted.append(len(counter.asked) - before)
        return out


@pytest.mark.parametrize(
    "strategy",
    [
        Offload(900, store=STORE, min_chars=100),
        KeepRecent(2, at_turns=5),
        SlidingWindow(3),
        Summarize(900, keep=250, max_tokens=50),
        Pipeline(Offload(900, store=STORE, min_chars=100), Summarize(1400, keep=250, max_tokens=50)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_what_a_commit_sends_was_counted_ahead(strategy: LookaheadStrategy) -> None:
    """What a lookahead made is counted on the lane: a tokenizer in another process took most of a hook's time."""
    CountedAsItCommits.counted.clear()

    async def main() -> Conversation:
        counter, lane = Asked(), LoopLane(asyncio.get_running_loop())
        server = ScriptedBackend(answer=oracle.answer)
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(
            strategy, backend=server, tokens=counter, lane=lane, prompt=PROMPT
        )
        conversation = CountedAsItCommits(runtime, server)
        await conversation.run(steady(14))
        assert len(set(counter.asked)) == len(counter.asked)
        await runtime.aclose()
        return conversation

    steps = run_virtual(main()).steps
    kinds = [(step.report.kind if step.report else None) for step in steps]
    assert kinds.count("lookahead") >= 2
    counted = list(zip(kinds, CountedAsItCommits.counted, strict=True))[1:]  # the first hook sees the user's message
    assert all(n == 0 for kind, n in counted if kind == "lookahead")
    # Where a commit is due and not made yet, an output may be looked at that the next one was planned without.
    assert all(n <= 1 for kind, n in counted if kind is None)


def test_each_content_is_counted_once_and_no_text_is_kept() -> None:
    """deepagents#1530."""
    counter = Asked()
    known = remembered(counter)
    picture = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}}
    messages = [
        Message("user", "text"),
        Message("tool", "text", tool_call_id="c"),
        Message("tool", "text", tool_call_id="d"),
        Message("user", ({"type": "text", "text": "text"}, picture)),
        Message("assistant", "text", extra={"reasoning_content": "because"}),
        Message("assistant", "text", extra={"thinking_blocks": ["because"]}),
        Message("assistant", "text"),
        Message("assistant", "text", (ToolCall("i", "n", "{}"),)),
        Message("user", "\ud800"),
        Message("assistant", "text", cast("Any", [ToolCall("i", "a list", "{}")])),
    ]
    same = [replace(m) for m in messages]
    for _ in range(3):
        assert [known.count(m) for m in [*messages, *same]] == [CharCounter().count(m) for m in messages] * 2
    assert len(counter.asked) == len(messages)
    for i in range(10_000):
        known.count(Message("user", str(i)))
    known.count(messages[0])
    assert len(counter.asked) == len(messages) + 10_000
    counted = cast("Any", known)
    assert len(counted._by_object) == len(messages) * 2  # of those that are still there
    assert len(counted._by_content) <= 8192
    assert all(isinstance(key, bytes) and len(key) == 16 for key in counted._by_content)
    assert remembered(known) is known
    assert isinstance(remembered(EstimateCounter()), EstimateCounter)


@pytest.mark.parametrize("turns", [6, 40])
def test_the_log_replays_to_the_present_state_after_a_rest_and_where_it_was_cut(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "_LOG_EVENTS", 30)

    async def main() -> None:
        server = ScriptedBackend(answer=oracle.answer)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server)
        conversation = Conversation(runtime, None)
        for part in range(3):
            conversation.raw, conversation.view = [], []
            await conversation.run(steady(turns))
            for wait in (False, True):
                events = [Event.decode(json.loads(json.dumps(e))) for e in runtime.events]
                assert len(events) <= 31
                state = functools.reduce(lambda s, e: machine.step(s, e)[0], events, State())
                assert state == cast("Any", runtime)._lookahead.state
                if wait or part:
                    break
                runtime.rest()
        await runtime.aclose()

    run_virtual(main())


def test_what_is_wrong_with_the_server_is_said_when_it_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    class Mismatched(ScriptedBackend):
        async def caps(self) -> Caps:
            raise ConfigurationError("the second server has another window")

    async def main() -> None:
        runtime = runtime_of(KeepRecent(50, at_turns=99), Mismatched())
        history = [{"role": "user", "content": "x"}]
        await runtime.aon_commit(history)
        async with runtime.main_request():
            pass
        assert "another window" in caplog.text
        await runtime.aclose()

    run_virtual(main())


def test_a_trigger_that_the_server_cannot_reach_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Small(ScriptedBackend):
        async def caps(self) -> Caps:
            return replace(await super().caps(), window=500)

    async def main() -> None:
        for hard, said in ((900, True), (400, False)):
            caplog.clear()
            runtime = runtime_of(Summarize(hard, keep=100, max_tokens=50), Small())
            await runtime.aon_commit([{"role": "user", "content": "x"}])
            async with runtime.main_request():
                pass
            assert ("trigger is 900 tokens and the server's window is 500" in caplog.text) is said
            await runtime.aclose()

    run_virtual(main())


def test_what_a_summary_found_in_the_cache_costs_what_it_costs() -> None:
    async def main() -> None:
        def cached(n: int, answer: Generated) -> Generated:
            return replace(answer, usage=replace(answer.usage, cached_tokens=answer.usage.prompt_tokens - 3))

        server = ScriptedBackend(answer=oracle.answer, generated=cached, warms=False)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server)
        await Conversation(runtime, server).run(steady(8))
        counts = runtime.ledger.snapshot()
        asked = [s for s in server.sent if s.kind == "generate"]
        assert asked
        assert counts.reused_tokens == sum(len(tokens_of(s.messages)) - 3 for s in asked)
        await runtime.aclose()

    run_virtual(main())


def test_a_runtime_is_not_let_go_while_its_request_runs() -> None:
    async def main() -> None:
        server = ScriptedBackend()
        lane = LoopLane(asyncio.get_running_loop())
        runtime: LookaheadRuntime[Any] = LookaheadRuntime(KeepRecent(2, at_turns=5), backend=server, lane=lane)
        await runtime.aon_commit([{"role": "user", "content": "x"}])
        session, request = runtime.session, runtime.main_request()
        del runtime
        gc.collect()
        async with request:
            await asyncio.sleep(1)
            assert server.released == []
        del request
        gc.collect()
        await asyncio.sleep(0)
        assert server.released == [session]

    run_virtual(main())


def test_commits_are_linked_to_the_work_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observe, "Telemetry", lambda: Telemetry(provider))

    async def main() -> None:
        server = ScriptedBackend(answer=oracle.answer)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server)
        await Conversation(runtime, server).run(steady(8))
        await runtime.aclose()

    run_virtual(main())
    spans = exporter.get_finished_spans()
    commit = next(s for s in spans if s.name == "smoothagent.commit")
    assert (commit.attributes or {})["smoothagent.lookahead"] == "hit"
    linked = [link.context.span_id for link in commit.links]
    work = {s.context.span_id: s for s in spans if s.name != "smoothagent.commit" and s.context is not None}
    assert {work[span].name for span in linked} == {"smoothagent.transform", "smoothagent.prefill"}
    summary = next(work[span] for span in linked if work[span].name == "smoothagent.transform")
    assert (summary.attributes or {})["gen_ai.usage.output_tokens"] == 5


# ---- what is sent where ----------------------------------------------------------------------------------------------


def test_a_summary_has_the_main_streams_prompt_and_its_own_length_limit() -> None:
    """deepagents#5319, opencode#43249, letta#3279."""

    class Limited(ScriptedBackend):
        limits: list[int]

        async def generate(self, conversation: str, messages: Any, prompt: Prompt, **more: Any) -> Any:
            self.limits = [*getattr(self, "limits", []), more["max_tokens"]]
            assert more.get("extends_main", True)
            return await super().generate(conversation, messages, prompt, **more)

    server = Limited(delay=0.1, answer=oracle.answer)
    converse(steady(12), Summarize(900, keep=250, max_tokens=77), backend=server)
    assert set(server.limits) == {77}
    assert all(s.prompt == PROMPT for s in server.sent)


def test_what_lookahead_generated_is_booked_as_saved_or_as_wasted() -> None:
    """The scripted model generates 5 tokens an answer."""
    good = converse(steady(30), Summarize(900, keep=250), backend=ScriptedBackend(delay=0.1, answer=oracle.answer))
    counts = good.runtime.ledger.snapshot()
    assert counts.commits > 1
    assert counts.saved_output_tokens == 5 * counts.commits
    assert counts.generated_tokens - counts.saved_output_tokens in (0, 5), "one may be in the making"
    empty = ScriptedBackend(delay=0.1, answer=lambda wires: " ")
    counts = converse(steady(30), Summarize(900, keep=250), backend=empty).runtime.ledger.snapshot()
    assert counts.commits == 0
    assert counts.saved_output_tokens == 0
    assert 0 < counts.generated_tokens < counts.wasted_tokens <= counts.background_tokens


def test_a_lookahead_that_hung_frees_its_place() -> None:
    """openclaw#16331."""
    server = ScriptedBackend(
        delay=0.1, answer=oracle.answer, pause=lambda kind, n: float("inf") if (kind, n) == ("generate", 1) else None
    )
    conversation = converse(steady(40), Summarize(900, keep=250, max_tokens=50), backend=server)
    kinds = [s.report.kind for s in conversation.steps if s.report is not None]
    assert kinds[-1] == "lookahead"
    assert kinds.count("sync") <= 2


def test_a_boundary_takes_no_time_and_a_commit_that_is_ready_none() -> None:
    """adk-python#4326, openai-agents-python#2343: the turn does not wait for the compaction."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        server = ScriptedBackend(delay=50.0, answer=oracle.answer)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server)
        conversation = Conversation(runtime, None)
        await conversation.run(steady(4))
        began = clock()
        for _ in range(3):
            runtime.on_segment_boundary(conversation.view)
        assert clock() == began
        await runtime.aclose()

    run_virtual(main())


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_result_without_its_call_is_one_clear_error_and_nothing_is_lost() -> None:
    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), ScriptedBackend())
        good: list[dict[str, Any]] = [{"role": "user", "content": "u"}]
        await runtime.aon_commit(good)
        bad = [*good, {"role": "tool", "tool_call_id": "x", "content": "r"}]
        for _ in range(2):
            with pytest.raises(HistoryError, match="call 'x'"):
                await runtime.aon_commit(bad)
            with pytest.raises(HistoryError, match="call 'x'"):
                runtime.on_segment_boundary(bad)
        assert await runtime.aon_commit(good) == good
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize(
    ("strategy", "ceiling", "said"),
    [
        (Summarize(900, max_tokens=50), None, "Summarize needs a model: pass backend="),
        (KeepRecent(2, at_tokens=900), 899, "ceiling is 899 tokens and hard is 900"),
    ],
)
def test_an_impossible_runtime_is_refused(strategy: LookaheadStrategy, ceiling: int | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        LookaheadRuntime[Any](strategy, ceiling=ceiling)


def test_a_prompt_the_strategy_cannot_work_with_is_refused_at_the_hook() -> None:
    async def main() -> None:
        runtime = runtime_of(Offload(600, store=STORE), None, Prompt())
        with pytest.raises(ConfigurationError, match="read_offloaded"):
            await runtime.aon_commit([{"role": "user", "content": "u"}])
        with pytest.raises(ConfigurationError, match="read_offloaded"):
            runtime.on_segment_boundary([{"role": "user", "content": "u"}])
        assert len(await runtime.aon_commit([{"role": "user", "content": "u"}], prompt=PROMPT)) == 1

    run_virtual(main())


def test_after_closing_every_hook_says_so() -> None:
    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), None, session="s-1")
        runtime.close()
        await runtime.aclose()
        with pytest.raises(ClosedError, match="s-1"):
            await runtime.aon_commit([])
        with pytest.raises(ClosedError, match="s-1"):
            runtime.on_segment_boundary([])

    run_virtual(main())


@pytest.mark.parametrize("form", FORMS)
def test_hard_texts_pass_through_a_commit(form: Form) -> None:
    texts = ["\0" * 3, "\ud800", "😀", "\r\n", ""]
    wires: list[dict[str, Any]] = [{"role": "user", "content": "u\ud800"}]
    for i in range(12):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        wires.append({"role": "assistant", "content": None, "tool_calls": [call]})
        wires.append({"role": "tool", "tool_call_id": "c", "content": texts[i % 5] * 100})

    async def main() -> None:
        runtime = runtime_of(Offload(100, keep=1, store=STORE, min_chars=100), ScriptedBackend(delay=0.1))
        messages = [dressed(w, form) for w in wires]
        runtime.on_segment_boundary(messages)
        out = wires_of(await runtime.aon_commit(messages))
        assert runtime.last_commit is not None
        assert same(out, oracle.offloaded(wires, 1, 100, STORE))
        await runtime.aclose()

    run_virtual(main())


def test_an_empty_history_is_no_trouble() -> None:
    async def main() -> None:
        runtime = runtime_of(SlidingWindow(3), ScriptedBackend())
        empty: list[Any] = []
        out = await runtime.aon_commit(empty)
        assert out == []
        assert out is not empty
        runtime.on_segment_boundary(empty)
        await runtime.aclose()

    run_virtual(main())


def test_the_agents_own_call_is_routed() -> None:
    async def main() -> None:
        server = ScriptedBackend()
        runtime = runtime_of(SlidingWindow(3), server, session="s-1")
        async with runtime.main_request() as request:
            assert request.extras == server.route("s-1", Stream.MAIN)
            assert server.events == ["arrived"]
        assert server.events == ["arrived", "first", "done"]
        await runtime.aclose()

    run_virtual(main())


def test_one_line_is_said_per_commit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smoothagent")
    converse(steady(12), KeepRecent(2, at_turns=4), backend=ScriptedBackend(delay=0.1))
    lines = [r.getMessage() for r in caplog.records if "→" in r.getMessage()]
    commits = [e for e in converse(steady(12), KeepRecent(2, at_turns=4)).runtime.events if e["event"] == "Committed"]
    assert len(lines) >= len(commits) > 1
