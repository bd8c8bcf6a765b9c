"""What shows after many turns only: work done again and again, counts that are off, records that are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2
import pytest
from openai import OpenAI

import oracle
from conversations import Call, Conversation, Plan, Turn, converse, runtime_of, steady
from scripted import HANG, CharCounter, ScriptedBackend, client_of, tokens_of
from smoothagent import (
    Budget,
    ConfigurationError,
    KeepRecent,
    Ledger,
    LookaheadRuntime,
    LookaheadStrategy,
    Message,
    Offload,
    OffloadStore,
    Pipeline,
    Prompt,
    Reference,
    SlidingWindow,
    Stream,
    Summarize,
    Usage,
)
from smoothagent.machine import MOST_STALE, Boundary, CommitPoint, Do, State, Transformed, step
from smoothagent.store import parse_reference
from smoothagent.strategy import Prediction
from test_runtime_sync import history
from test_runtime_sync import runtime_of as threaded
from test_wrap import WHOLE
from virtual_clock import run_virtual


def commits(conversation: Conversation) -> list[str]:
    return [s.report.kind for s in conversation.steps if s.report is not None]


# ---- nothing prepared in vain ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [1.0, 8.0, 20.0])
@pytest.mark.parametrize(("hard", "keep"), [(3000, 750), (6000, 1500), (9000, 1200)])
def test_summaries_that_take_turns_are_used_all_the_same(hard: int, keep: int, delay: float) -> None:
    """Begun so early that more than twice ``keep`` stayed verbatim, each would be thrown away and made again."""
    server = ScriptedBackend(
        delay=0.1, answer=oracle.answer, pause=lambda kind, n: delay if kind == "generate" else None
    )
    conversation = converse(
        steady(150, output=150, tool=4.0), Summarize(hard, keep=keep, max_tokens=50), backend=server
    )
    kinds = commits(conversation)
    assert len(kinds) >= 3
    assert "sync" not in kinds
    dropped = [c.why for s in conversation.steps for _, _, cs in s.moves for c in cs if c.do is Do.CANCEL]
    assert dropped == []


@pytest.mark.parametrize("keep", [100, 300])
def test_a_keep_of_less_than_two_turns_is_no_reason_to_summarize_in_the_foreground(keep: int) -> None:
    conversation = converse(
        steady(100, output=150, tool=4.0),
        Summarize(3000, keep=keep, max_tokens=50),
        backend=ScriptedBackend(delay=0.1, answer=oracle.answer),
    )
    assert set(commits(conversation)) == {"lookahead"}


def test_a_beginning_that_changes_on_every_turn_stops_lookahead_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    server = ScriptedBackend(delay=0.1, answer=oracle.answer)

    def redate(conversation: Conversation, turn: int) -> bool:
        conversation.raw[0] = conversation.view[0] = {"role": "system", "content": f"today is {turn}"}
        return True

    with caplog.at_level(logging.WARNING):
        conversation = converse(steady(60, output=100), Summarize(1500, keep=700), backend=server, before_commit=redate)
    kinds = commits(conversation)
    assert set(kinds) == {"sync"}
    dropped = [c.why for s in conversation.steps for _, _, cs in s.moves for c in cs if c.do is Do.CANCEL]
    assert dropped.count("stale") <= MOST_STALE + len(kinds)
    assert caplog.text.count("in a row were for a history or a prompt that had changed") == 1


def test_now_and_then_another_history_does_not_end_lookahead() -> None:
    """A sub-task's messages between two turns: what lasted until a commit point was not in vain."""
    state = State()
    for _ in range(4 * MOST_STALE):
        state, _ = step(state, Boundary(10, "d", "", "p", wants=True))
        assert state.job is not None
        state, _ = step(state, Transformed(state.job.id, 8, "mine"))
        state, _ = step(state, CommitPoint(10, "mine", "p", due=False))
        state, commands = step(state, CommitPoint(10, "other", "p", due=False))
        assert commands[0].why == "stale"
    assert state.stale <= 1


def test_a_summary_in_flight_for_a_history_that_is_gone_is_given_up() -> None:
    """At the ceiling the agent would wait for it in vain."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1, pause=lambda kind, n: HANG if kind == "generate" else None)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server, ceiling=905)
        runtime.on_segment_boundary(history(3))
        await asyncio.sleep(1)
        assert server.running == 1
        other = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 600}]
        began = asyncio.get_running_loop().time()
        await runtime.aon_commit(other)
        await asyncio.sleep(0)
        assert asyncio.get_running_loop().time() - began < 1
        assert server.running == 0
        await runtime.aclose()

    run_virtual(main())


def test_a_call_that_waits_for_somebody_makes_no_commits_that_change_nothing() -> None:
    """The cut cannot pass it, so the same first message would be 'kept' on every turn."""
    waits = Turn(None, "user", None, (Call("human", "g" * 20, "r" * 60, 0.0),), 0.1, (1, 0, 1))
    for strategy in (KeepRecent(3, at_turns=6), SlidingWindow(4)):
        plan = steady(30)
        conversation = converse(Plan(plan.system, (plan.turns[0], waits, *plan.turns[1:])), strategy)
        assert all(s.report.before_messages > s.report.after_messages for s in conversation.steps if s.report)

    async def main() -> None:
        runtime = runtime_of(KeepRecent(3, at_turns=6), None)
        call = {"id": "h", "type": "function", "function": {"name": "ask", "arguments": "{}"}}
        messages: list[Any] = [
            {"role": "user", "content": "task"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        for turn in range(20):
            messages = await runtime.aon_commit([*messages, {"role": "user", "content": f"and {turn}"}])
            messages.append({"role": "assistant", "content": f"yes {turn}"})
        assert runtime.ledger.snapshot().sync_commits + runtime.ledger.snapshot().commits == 0
        await runtime.aclose()

    run_virtual(main())


# ---- a commit that extends inline may use the model ------------------------------------------------------------------


class Digest(LookaheadStrategy):
    """The paper's four methods with a model: every finished segment becomes one line."""

    def should_lookahead(self) -> bool:
        return len(self.main.messages) > self.la.last_segment_end

    async def _line(self, segment: Sequence[Message]) -> Message:
        assert self.model is not None
        return Message("user", await self.model.generate(list(segment), max_tokens=5))

    def transform(self) -> Awaitable[None] | None:
        return self._transform(self.main.messages[self.la.last_segment_end :])

    async def _transform(self, segment: Sequence[Message]) -> None:
        if segment:
            self.la.transformed.append(await self._line(segment))
        self.la.last_segment_end = len(self.main.messages)

    def should_commit(self) -> bool:
        return self.tokens >= 500 and not any(m.role == "assistant" and m.tool_calls for m in self.main.messages[-1:])


def test_what_is_extended_at_the_commit_has_the_model() -> None:
    server = ScriptedBackend(delay=0.1, answer=lambda wires: "a line")
    plan = Plan((), tuple(Turn("u" * 60, "user", "a" * 60, (), 0.5, (1, 0, 0)) for _ in range(12)))
    conversation = converse(plan, Digest(), backend=server)
    assert "lookahead" in commits(conversation)
    assert conversation.runtime.ledger.snapshot().failures == 0


# ---- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipelines_summary_is_prepared_in_time_although_its_first_trigger_is_far_below() -> None:
    store = OffloadStore("memory://in-time")
    server = ScriptedBackend(delay=0.1, answer=oracle.answer, pause=lambda kind, n: 5.0 if kind == "generate" else None)
    # Outputs too small to offload fill the context.
    strategy = Pipeline(Offload(1500, keep=1, store=store, min_chars=500), Summarize(4000, keep=1000, max_tokens=50))
    conversation = converse(steady(80, output=150), strategy, backend=server)
    assert len(commits(conversation)) >= 2
    assert "sync" not in commits(conversation)
    assert all(s.seconds == 0 for s in conversation.steps)


def test_a_pipelines_late_summary_leaves_no_more_verbatim_than_any_other() -> None:
    store = OffloadStore("memory://leaves")
    slow = ScriptedBackend(delay=0.1, answer=oracle.answer, pause=lambda k, n: 6.0 if k == "generate" else None)
    strategy = Pipeline(Offload(1500, keep=1, store=store, min_chars=500), Summarize(4000, keep=600, max_tokens=50))
    conversation = converse(steady(90, output=150), strategy, backend=slow)
    made = [s for s in conversation.steps if s.report is not None and s.report.kind != "sync"]
    assert made
    for made_at in made:
        assert made_at.report is not None
        assert 600 <= oracle.total(made_at.view[made_at.report.boundary :]) <= 1200


def test_a_pipelines_offloading_is_not_held_back_by_a_stage_that_is_not_due() -> None:
    """Its own ceiling holds, however slow the warming is."""
    store = OffloadStore("memory://held")
    server = ScriptedBackend(delay=0.1, answer=oracle.answer, classes=False, pause=lambda kind, n: 2.0)
    strategy = Pipeline(Offload(3000, keep=1, store=store, min_chars=100), Summarize(20_000, keep=2000, max_tokens=50))
    conversation = converse(steady(20, output=300), strategy, backend=server)
    assert commits(conversation)
    assert all(s.tokens < 3000 * 1.25 + 2 * 400 for s in conversation.steps)


def test_a_pipeline_hurries_nothing_before_it_is_due() -> None:
    store = OffloadStore("memory://hurries")
    hurried: list[int] = []
    # Past the first trigger, and nothing that is large enough to offload.
    strategy = Pipeline(Offload(1500, keep=1, store=store, min_chars=500), Summarize(4000, keep=1000, max_tokens=50))

    def note(kind: str, n: int) -> None:
        if kind == "promote":
            hurried.append(strategy.tokens)

    server = ScriptedBackend(delay=2.0, answer=oracle.answer, fault=note)
    converse(steady(60, output=150), strategy, backend=server)
    assert server.generations
    assert all(tokens >= 4000 for tokens in hurried)


def test_a_window_behind_offloading_moves_on_every_turn() -> None:
    store = OffloadStore("memory://behind")
    strategy = Pipeline(Offload(50_000, keep=1, store=store), SlidingWindow(40))
    conversation = converse(steady(60, output=100), strategy, backend=ScriptedBackend(delay=0.1))
    assert len(commits(conversation)) >= 15


def test_an_output_that_somebody_removed_is_there_again_when_its_reference_is_committed() -> None:
    """The hooks have stored it, a cleaner has removed it, and then the commit is due."""

    async def main() -> None:
        store = OffloadStore("memory://removed")
        runtime = runtime_of(Offload(2000, keep=1, store=store, min_chars=100), ScriptedBackend(delay=0.1))
        conversation = Conversation(runtime, None)
        turns = steady(20, output=300).turns
        for number, turn in enumerate(turns):
            for wire in conversation.raw:
                if wire["role"] == "tool" and parse_reference(wire["content"]) is None:
                    store.forget(store.put(wire["content"]))
            await conversation.take(number, turn)
            if runtime.last_commit is not None:
                break
        keys = [parse_reference(w["content"]) for w in conversation.steps[-1].sent if w["role"] == "tool"]
        outputs = [store.get(k) for k in keys if k is not None]
        assert len(outputs) >= 3
        assert all(len(text) == 300 for text in outputs)
        await runtime.aclose()

    run_virtual(main())


def test_a_pipeline_saves_as_much_as_each_of_its_stages_asks() -> None:
    """Or it would break the cache on every turn for the few tokens of one more output."""
    store = OffloadStore("memory://saves")
    strategy = Pipeline(Offload(2000, keep=1, store=store, min_chars=200), KeepRecent(30, at_turns=60))
    conversation = converse(steady(40, output=210), strategy, backend=ScriptedBackend(delay=0.1))
    for report in (s.report for s in conversation.steps if s.report is not None):
        assert report.before_tokens - report.after_tokens >= int(0.02 * report.before_tokens)


class Counting(OffloadStore):
    puts = 0

    def put(self, content: str) -> Reference:
        self.puts += 1
        return super().put(content)


@pytest.mark.parametrize("piped", [True, False])
def test_an_output_is_stored_once_however_often_it_is_looked_at(piped: bool) -> None:
    """Hooks ask many times what a commit would be; behind a URL each put is two round trips."""
    store = Counting("memory://once")
    offload = Offload(2000, keep=3, store=store, min_chars=100)
    strategy = Pipeline(offload, Summarize(4000, keep=1000, max_tokens=50)) if piped else offload
    converse(steady(40, output=300), strategy, backend=ScriptedBackend(delay=0.1, answer=oracle.answer))
    # At a hook, and once more at its commit, since somebody may have removed it meanwhile.
    assert 0 < store.puts <= 2 * 40


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_a_message_that_is_filled_in_in_place_is_counted_anew() -> None:
    """A harness that appends a placeholder and writes the output into it later."""

    async def main() -> None:
        runtime = runtime_of(KeepRecent(1, at_tokens=3000), None)
        call = {"id": "c", "type": "function", "function": {"name": "sed", "arguments": "{}"}}
        messages: list[Any] = [{"role": "user", "content": "task"}]
        for _ in range(4):
            result = {"role": "tool", "tool_call_id": "c", "content": "(running)"}
            messages += [{"role": "assistant", "content": "a", "tool_calls": [call]}, result]
            runtime.on_segment_boundary(messages)
            result["content"] = "r" * 1000
            runtime.on_segment_boundary(messages)
            messages = await runtime.aon_commit(messages)
            assert runtime.strategy.tokens == sum(map(oracle.size, messages))
        assert runtime.last_commit is not None
        await runtime.aclose()

    run_virtual(main())


def test_reasoning_that_is_sent_back_no_more_counts_no_more() -> None:
    def spoken(reasoning: bool) -> list[dict[str, Any]]:
        answer = {"role": "assistant", "content": "yes", **({"reasoning_content": "hm " * 900} if reasoning else {})}
        return [{"role": "user", "content": "so?"}, answer, {"role": "user", "content": "and?"}]

    runtime = LookaheadRuntime[Any](KeepRecent(2, at_tokens=10_000))
    runtime.on_segment_boundary(spoken(True))
    large = runtime.strategy.tokens
    runtime.on_segment_boundary(spoken(False))
    assert runtime.strategy.tokens < large / 5
    runtime.close()


def test_marks_that_a_client_moves_about_change_nothing() -> None:
    """Cline and litellm put ``cache_control`` on the newest messages of each request."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime = runtime_of(Offload(4000, keep=1, store=OffloadStore("memory://marks"), min_chars=100), server)
        plain: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
        seen = 0
        for turn in range(24):
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "sed", "arguments": "{}"}}
            plain.append({"role": "assistant", "content": None if turn % 2 else "", "tool_calls": [call]})
            plain.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn:3}" + "r" * 300})
            sent: list[dict[str, Any]] = [dict(m) for m in plain]
            mark = {"type": "text", "text": sent[-1]["content"], "cache_control": {"type": "ephemeral"}}
            sent[-1]["content"] = [mark]
            view = await runtime.aon_commit(sent)
            assert len(view) == len(sent)
            runtime.on_segment_boundary(sent)
            await asyncio.sleep(1)
            counts = runtime.ledger.snapshot()
            seen = counts.commits + counts.sync_commits
        assert 1 <= seen <= 4, "not on every turn"
        await runtime.aclose()

    run_virtual(main())


def test_what_a_synchronous_commit_would_have_found_cached_is_not_counted_as_saved() -> None:
    async def main() -> None:
        prompt = Prompt(system="s" * 5000)
        runtime = runtime_of(Summarize(8000, keep=1000, max_tokens=50), ScriptedBackend(delay=0.1), prompt)
        conversation = Conversation(runtime, None)
        await conversation.run(steady(12))
        before = runtime.ledger.snapshot().saved_tokens
        while runtime.last_commit is None:
            await conversation.take(50, steady(1).turns[0])
        report = runtime.last_commit
        assert report.kind == "lookahead"
        async with runtime.main_request() as request:
            request.usage(Usage(prompt_tokens=report.after_tokens, cached_tokens=5000))
        assert runtime.ledger.snapshot().saved_tokens == before
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize(
    "strategy", [lambda: KeepRecent(2, at_turns=6), lambda: Summarize(900, keep=200, max_tokens=50)]
)
@pytest.mark.parametrize("dropped", [True, False])
def test_a_request_that_is_cut_short_is_counted_and_wasted_if_nothing_came_of_it(
    strategy: Callable[[], Any], dropped: bool
) -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1, pause=lambda kind, n: HANG)
        runtime = runtime_of(strategy(), server)
        conversation = Conversation(runtime, server)
        number = 0
        while not server.sent:
            await conversation.take(number, steady(1).turns[0])
            number += 1
        await asyncio.sleep(1)
        spent = server.spent(runtime.session)
        assert runtime.ledger.snapshot().prefilled_tokens == 0, "it hangs"
        if dropped:
            await runtime.aclose()
        else:
            runtime.rest()
            await asyncio.sleep(1)
        counts = runtime.ledger.snapshot()
        assert (counts.prefilled_tokens, counts.generated_tokens) == (spent.prompt_tokens, spent.completion_tokens)
        assert counts.wasted_tokens == spent.prompt_tokens + spent.completion_tokens
        await runtime.aclose()

    run_virtual(main())


def test_a_later_requests_usage_is_not_taken_for_the_commits() -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime = runtime_of(KeepRecent(2, at_turns=5), server)
        await Conversation(runtime, server).run(steady(5))
        messages = [*history(6)]
        await runtime.aon_commit(messages)
        report = runtime.last_commit
        assert report is not None
        async with runtime.main_request():
            pass  # told no usage
        async with runtime.main_request() as request:
            request.usage(Usage(prompt_tokens=500, cached_tokens=480))
        assert report.cached_tokens is None
        await runtime.aclose()

    run_virtual(main())


def test_a_spent_budget_stops_warming_sub_agents_and_running_lookaheads_too() -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime = runtime_of(KeepRecent(2, at_turns=9), server, ledger=Ledger(Budget(max_background_tokens=0)))
        head = [{"role": "system", "content": "you are a sub-agent"}]
        delegation = runtime.delegate(
            prompt=Prompt(model="m"), head=head, instruction=lambda t: {"role": "user", "content": t}
        )
        delegation.feed("do it")
        await asyncio.sleep(2)
        assert server.prefills == 0
        assert delegation.on_commit("do it") == [*head, {"role": "user", "content": "do it"}]
        await delegation.aclose()
        await runtime.aclose()

    run_virtual(main())


# ---- the server's streams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [0, 1, 2])
def test_a_commit_does_not_move_to_a_stream_that_holds_less_than_the_agents_own(reach: int) -> None:
    """A late one: of the new view only the first messages were warmed, which the main stream holds, too."""

    async def main() -> None:
        server = ScriptedBackend(delay=0.1, pause=lambda kind, n: None if n <= reach else HANG, classes=False)
        store = OffloadStore("memory://colder")
        runtime = runtime_of(Offload(3000, keep=1, store=store, min_chars=100), server, ceiling=3000)
        conversation = Conversation(runtime, server)
        conversation.add({"role": "system", "content": "s" * 2000})
        await conversation.run(steady(10, output=400))
        reports = [s.report for s in conversation.steps if s.report is not None]
        assert "late" in [r.kind for r in reports]
        assert server.commits == sum(r.warmed_tokens > r.shared_tokens for r in reports)
        await runtime.aclose()

    run_virtual(main())


def test_closing_right_after_a_boundary_leaves_no_slot_leased() -> None:
    """The job may be about to lease when it is cancelled, on another thread."""

    class Leasing(ScriptedBackend):
        leased: set[str]

        async def prefill(self, conversation: str, *args: Any, **more: Any) -> Usage:
            self.leased.add(conversation)
            return await super().prefill(conversation, *args, **more)

        def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
            self.leased.add(conversation)
            return {}

        def release(self, conversation: str) -> None:
            self.leased.discard(conversation)
            super().release(conversation)

    server = Leasing(delay=0)
    server.leased = set()
    for n in range(40):
        runtime = threaded(KeepRecent(2, at_turns=6), server, session=f"s{n}")
        runtime.on_segment_boundary(history(4))
        runtime.close(5)
    deadline = 200
    while len(server.released) < 40 and deadline:
        asyncio.run(asyncio.sleep(0.01))
        deadline -= 1
    assert server.leased == set()


# ---- whose strategy, whose prompt ------------------------------------------------------------------------------------


def test_what_is_being_used_is_not_put_to_rest() -> None:
    server = ScriptedBackend(delay=0)
    runtime = threaded(KeepRecent(2, at_turns=6), server)
    with runtime.main_request():
        runtime.rest()
        assert server.released == []
    runtime.close()


def test_one_strategy_object_belongs_to_one_conversation() -> None:
    strategy = KeepRecent(2, at_turns=4)
    first = LookaheadRuntime[Any](strategy)
    with pytest.raises(ConfigurationError, match=r"belongs to session .* already: pass a factory"):
        LookaheadRuntime[Any](strategy)
    first.close()
    LookaheadRuntime[Any](strategy).close()


def test_what_the_calls_send_holds_for_every_prompt_that_says_nothing_of_it() -> None:
    """A hook with ``prompt=`` on each turn must not undo it: the lookahead would be stale on each turn."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=WHOLE)

    client = OpenAI(base_url="http://fake/v1", api_key="x", http_client=client_of(answer))
    tools: list[Any] = [{"type": "function", "function": {"name": "sed", "parameters": {}}}]
    runtime = LookaheadRuntime[Any](
        Summarize(4000, keep=900, max_tokens=50),
        backend=ScriptedBackend(delay=0),
        prompt=Prompt(model="m"),
        tokens=CharCounter(),
    )
    with client:
        wrapped = runtime.wrap(client)
        for turns in range(1, 5):
            view = runtime.on_commit(history(turns), prompt=Prompt(model="m"))
            sent: list[Any] = [{"role": "system", "content": "kept apart"}, *view]
            wrapped.chat.completions.create(model="m", messages=sent, tools=tools)
            runtime.on_segment_boundary(history(turns))
            assert list(runtime.prompt.tools) == tools
            assert runtime.prompt.system == "kept apart"
    assert not [e for e in runtime.events if e.get("why") == "stale"]
    runtime.close()


# ---- a job and its snapshot ------------------------------------------------------------------------------------------


def test_a_boundary_in_the_middle_of_a_transformation_does_not_mix_two_histories() -> None:
    class Impatient(KeepRecent):
        """Copying the strategy takes a while, in which the next boundary comes."""

        later: Any = None

        def snapshot(self, la: Any = None) -> Any:
            twin = super().snapshot(la)
            if self.later is not None:
                self.later()
            return twin

        def should_lookahead(self) -> bool:
            return len(self.main.messages) > self.la.last_segment_end

        def predict(self, history: Sequence[Message]) -> Prediction | None:
            return Prediction(len(history), tail=False)

    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        strategy = Impatient(2, at_turns=50)
        runtime = runtime_of(strategy, server)
        short, long = history(3), history(6)
        runtime.on_segment_boundary(short)
        job = runtime._lookahead.job  # pyright: ignore[reportPrivateUsage]
        assert job is not None

        def grow() -> None:
            job.strategy.later = None  # type: ignore[attr-defined]
            runtime.on_segment_boundary(long)

        job.strategy.later = grow  # type: ignore[attr-defined]
        await asyncio.sleep(5)
        assert runtime.ledger.snapshot().failures == 0
        for sent in server.sent:
            assert any(tokens_of(sent.messages) == tokens_of(h[: len(sent.messages)]) for h in (short, long))
        await runtime.aclose()

    run_virtual(main())
