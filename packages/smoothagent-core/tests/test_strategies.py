"""Each strategy by itself: where it cuts, what it reads, what it keeps, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from conversations import Plan, dressed, plans, steady
from examples import examples
from scripted import CharCounter
from smoothagent import (
    READ_OFFLOADED_TOOL,
    ConfigurationError,
    CutStrategy,
    KeepRecent,
    LookaheadStrategy,
    Message,
    Offload,
    OffloadStore,
    Pipeline,
    Prompt,
    SlidingWindow,
    StoreUnavailableError,
    Summarize,
    SummaryRejectedError,
    ToolCall,
)
from smoothagent.message import leading_system
from smoothagent.state import LookaheadState, MainState
from smoothagent.store import parse_reference
from smoothagent.turns import safe_cuts

STORE = OffloadStore("memory://strategies")


def offload(hard: int = 500, keep: int = 2) -> Offload:
    return Offload(hard, keep=keep, store=STORE, min_chars=120)


class Echo:
    """A model that says how many messages it was shown."""

    def __init__(self, answer: str | None = None) -> None:
        self.answer = answer
        self.asked: list[list[Message]] = []

    async def generate(self, messages: Sequence[Message], *, max_tokens: int, accept_cut_off: bool = False) -> str:
        self.asked.append(list(messages))
        return f"saw {len(messages)}" if self.answer is None else self.answer


CUTTING: list[tuple[str, Callable[[], CutStrategy]]] = [
    ("Offload", offload),
    ("Offload all", lambda: offload(keep=0)),
    ("KeepRecent", lambda: KeepRecent(3, at_turns=6)),
    ("KeepRecent tokens", lambda: KeepRecent(2, at_tokens=500)),
    ("SlidingWindow", lambda: SlidingWindow(3)),
    ("SlidingWindow stride", lambda: SlidingWindow(5, stride=3)),
    ("SlidingWindow tokens", lambda: SlidingWindow(tokens=500, stride=100)),
    ("Summarize", lambda: Summarize(600, keep=150, max_tokens=50)),
]
DROPPING = CUTTING[2:]
MODEL_FREE = CUTTING[:-1]


def strategies(
    which: list[tuple[str, Callable[[], CutStrategy]]],
) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", [m for _, m in which], ids=[n for n, _ in which])


def history_of(plan: Plan, *, pending: bool = False) -> list[Message]:
    wires: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in plan.system]
    for number, turn in enumerate(plan.turns):
        if turn.user is not None:
            wires.append({"role": turn.role, "content": turn.user + str(number)})
        calls = [
            {"id": c.id, "type": "function", "function": {"name": "sed", "arguments": c.arguments}} for c in turn.calls
        ]
        wires.append({"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})})
        results = [{"role": "tool", "tool_call_id": c.id, "content": c.result} for c in turn.calls]
        last = number + 1 == len(plan.turns)
        wires += results[:-1] if last and pending else results
    return [dressed(w, "Message") for w in wires]


def look(strategy: LookaheadStrategy, history: list[Message]) -> None:
    """What the runtime lets a strategy see."""
    count = CharCounter().count
    sizes = [count(m) for m in history]
    strategy.main = MainState(
        history,
        {"tokens": sum(sizes), "sizes": sizes, "count": count, "turns": sum(m.role == "assistant" for m in history)},
    )


def rewritten(strategy: CutStrategy, covered: list[Message]) -> list[Message]:
    out = strategy.rewrite(covered)
    return out if isinstance(out, list) else asyncio.run(_awaited(out))


async def _awaited(work: Awaitable[list[Message]]) -> list[Message]:
    return await work


def _history(plan: Plan, pending: bool) -> list[Message]:
    return history_of(plan, pending=pending)


HISTORIES = st.builds(_history, plans(max_turns=8), st.booleans())


@strategies(CUTTING)
@given(history=HISTORIES)
@examples(30)
def test_a_cut_keeps_the_system_messages_and_splits_no_pair(
    make: Callable[[], CutStrategy], history: list[Message]
) -> None:
    strategy = make()
    look(strategy, history)
    cut = strategy.cut(history)
    assert leading_system(history) <= cut <= len(history)
    if not strategy.positional:
        assert cut in safe_cuts(history)


@strategies(DROPPING)
@given(history=HISTORIES)
@examples(40)
def test_the_latest_user_message_of_what_is_dropped_stays(
    make: Callable[[], CutStrategy], history: list[Message]
) -> None:
    """agent-framework#8441, langmem#111; what follows the system messages is the user's (llama_index#20256)."""
    strategy = make()
    strategy.model = Echo()
    look(strategy, history)
    lead, cut = leading_system(history), strategy.cut(history)
    covered = history[lead:cut]
    users = [m for m in covered if m.role == "user"]
    out = rewritten(strategy, covered)
    if users:
        assert users[-1] in out
        assert out[0].role == "user"
    assert len(out) <= max(len(covered), 1)


@strategies(CUTTING)
@given(history=HISTORIES, later=HISTORIES)
@examples(15)
def test_a_rewrite_depends_on_nothing_after_the_cut(
    make: Callable[[], CutStrategy], history: list[Message], later: list[Message]
) -> None:
    """Segment-decomposability: whatever comes later, the prefix becomes the same."""
    for cut in safe_cuts(history)[:6]:
        covered = history[leading_system(history) : cut]
        results: list[list[Message]] = []
        for seen in (history, [*history[:cut], *later]):
            strategy = make()
            strategy.model = Echo()
            look(strategy, seen)
            results.append(rewritten(strategy, list(covered)))
        assert results[0] == results[1]


@strategies(MODEL_FREE)
@given(history=HISTORIES, segments=st.lists(st.integers(1, 5), max_size=6))
@examples(40)
def test_every_way_of_cutting_the_past_into_segments_gives_the_same_commit(
    make: Callable[[], CutStrategy], history: list[Message], segments: list[int]
) -> None:
    whole = make()
    look(whole, history)
    expected = whole.commit(history)
    bit_by_bit = make()
    end = leading_system(history)
    for size in segments:
        end = min(len(history), end + size)
        look(bit_by_bit, history[:end])
        if bit_by_bit.should_lookahead():
            twin = bit_by_bit.snapshot()
            assert twin.transform() is None
            bit_by_bit.la = twin.la
    look(bit_by_bit, history)
    assert bit_by_bit.commit(history) == expected


@strategies(CUTTING)
def test_an_unchanged_message_is_the_same_object(make: Callable[[], CutStrategy]) -> None:
    history = history_of(steady(8))
    strategy = make()
    strategy.model = Echo()
    look(strategy, history)
    covered = history[leading_system(history) : strategy.cut(history)]
    known = {id(m) for m in covered}
    for message in rewritten(strategy, covered):
        assert (
            id(message) in known
            or (message.origin is not None and id(message.origin) in known)
            or (isinstance(strategy, Summarize) and strategy.is_summary(message))
        )


@strategies(CUTTING)
def test_a_copy_for_the_lane_shares_nothing_that_changes(make: Callable[[], CutStrategy]) -> None:
    strategy = make()
    look(strategy, history_of(steady(4)))
    twin = strategy.snapshot()
    twin.main.messages.append(Message("user", "later"))
    twin.main.strategy_data["tokens"] = 0
    twin.la.transformed.append(Message("user", "later"))
    twin.la.strategy_data["x"] = 1
    assert len(strategy.main.messages) + 1 == len(twin.main.messages)
    assert strategy.tokens > 0
    assert strategy.la == LookaheadState()


# ---- offload ---------------------------------------------------------------------------------------------------------


@given(history=HISTORIES, keep=st.integers(0, 4))
@examples(40)
def test_offload_counts_outputs_as_the_built_ins_do(history: list[Message], keep: int) -> None:
    """The newest n outputs stay, whatever turn they are in; all others that are bulky go."""
    strategy = offload(1, keep)
    look(strategy, history)
    done = strategy.commit(history)
    assert done is not None
    view = [*done.head, *history[done.covered :]]
    assert len(view) == len(history)
    outputs = [i for i, m in enumerate(history) if m.role == "tool"]
    newest = set(outputs[max(0, len(outputs) - keep) :])
    for i, (old, new) in enumerate(zip(history, view, strict=True)):
        if old.role == "tool" and i not in newest and len(old.text) >= 120:
            reference = parse_reference(new.text)
            assert reference is not None
            assert STORE.get(reference) == old.text
            assert (new.role, new.tool_call_id, new.origin) == (old.role, old.tool_call_id, old)
        else:
            assert new is old


@pytest.mark.parametrize("text", ["\ud800" * 200, "\0" * 200, "é\r\n" * 100, "x" * 200])
def test_hard_texts_come_back_from_the_store(text: str) -> None:
    strategy = offload(1, keep=0)
    (moved,) = strategy.rewrite([Message("tool", text, tool_call_id="c")])
    reference = parse_reference(moved.text)
    assert reference is not None
    assert STORE.get(reference) == text


def test_text_in_parts_is_offloaded_and_anything_else_stays() -> None:
    strategy = offload(1, keep=0)
    parts = Message(
        "tool", ({"type": "text", "text": "x" * 100}, {"type": "text", "text": "y" * 100}), tool_call_id="c"
    )
    image = Message("tool", ({"type": "text", "text": "x" * 200}, {"type": "image_url", "image_url": {}}))
    moved, kept = strategy.rewrite([parts, image])
    assert kept is image
    reference = parse_reference(moved.text)
    assert reference is not None
    assert STORE.get(reference) == "x" * 100 + "y" * 100


def test_a_reference_is_not_offloaded_again() -> None:
    strategy = offload(1, keep=0)
    once = strategy.rewrite([Message("tool", "x" * 300, tool_call_id="c")])
    assert strategy.rewrite(once) == once


def test_the_agent_must_be_able_to_read_its_outputs() -> None:
    with pytest.raises(ConfigurationError, match="read_offloaded"):
        offload().check(Prompt())
    offload().check(Prompt(tools=[READ_OFFLOADED_TOOL]))
    Offload(500, store=STORE, allow_unreadable=True).check(Prompt())


class FullStore(OffloadStore):
    def __init__(self) -> None:
        super().__init__("memory://full")

    def put(self, content: str) -> Any:
        raise StoreUnavailableError("cannot write: the disk is full")


def test_a_reference_is_made_only_after_the_write() -> None:
    """deepagentsjs#621."""
    strategy = Offload(1, keep=0, store=FullStore())
    with pytest.raises(StoreUnavailableError):
        strategy.rewrite([Message("tool", "x" * 300, tool_call_id="c")])


# ---- windows ---------------------------------------------------------------------------------------------------------


@given(history=HISTORIES, turns=st.integers(1, 5))
@examples(40)
def test_keep_recent_keeps_k_completed_turns_and_what_has_begun(history: list[Message], turns: int) -> None:
    strategy = KeepRecent(turns, at_turns=turns + 1)
    look(strategy, history)
    done = strategy.commit(history)
    assert done is not None
    view = [*done.head, *history[done.covered :]]
    before = sum(m.role == "assistant" for m in history)
    after = sum(m.role == "assistant" for m in view)
    assert after == min(before, turns)
    assert view[: leading_system(history)] == history[: leading_system(history)]


def test_the_latest_user_message_may_go_where_a_drop_in_says_so() -> None:
    history = history_of(steady(6))
    strategy = KeepRecent(2, at_turns=4, keep_latest_user=False)
    look(strategy, history)
    done = strategy.commit(history)
    assert done is not None
    assert [m.role for m in done.head] == ["system"]


@given(history=HISTORIES, size=st.integers(100, 1500), stride=st.integers(0, 99))
@examples(40)
def test_a_token_window_fits_or_keeps_only_the_newest_turn(history: list[Message], size: int, stride: int) -> None:
    strategy = SlidingWindow(tokens=size, stride=stride)
    look(strategy, history)
    done = strategy.commit(history)
    assert done is not None
    view = [*done.head, *history[done.covered :]]
    count = CharCounter().count
    total = sum(map(count, view))
    if total > size - stride:
        # Nothing more could be dropped: the newest turn always stays.
        tail = view[len(done.head) :]
        assert sum(m.role == "assistant" for m in tail) <= 1 or not any(c > done.covered for c in safe_cuts(history))


@given(history=HISTORIES, size=st.integers(2, 5), stride=st.integers(1, 5))
@examples(40)
def test_a_stride_moves_less_often(history: list[Message], size: int, stride: int) -> None:
    if stride > size:
        return
    strategy = SlidingWindow(size, stride=stride)
    look(strategy, history)
    turns = sum(m.role == "assistant" for m in history)
    assert strategy.should_commit() == (turns > size)
    if turns > size:
        done = strategy.commit(history)
        assert done is not None
        kept = sum(m.role == "assistant" for m in [*done.head, *history[done.covered :]])
        assert kept == size - stride + 1 or not safe_cuts(history)


# ---- summarize -------------------------------------------------------------------------------------------------------


@given(history=HISTORIES)
@examples(40)
def test_a_summary_stands_before_the_latest_user_message_and_the_tail(history: list[Message]) -> None:
    """claude-code#94197: stable material first."""
    strategy = Summarize(600, keep=150, max_tokens=50)
    strategy.model = Echo()
    look(strategy, history)
    lead, cut = leading_system(history), strategy.cut(history)
    covered = history[lead:cut]
    out = rewritten(strategy, covered)
    if len(covered) > len([m for m in covered if m.role == "user"][-1:]):
        assert strategy.is_summary(out[0])
        assert [m.role for m in out[1:]] == ["user"] * (len(out) - 1)
    else:
        assert out == covered


def test_a_summary_covers_the_last_one_and_does_not_take_it_for_the_users_words() -> None:
    strategy = Summarize(600, keep=150, max_tokens=50)
    model = strategy.model = Echo()
    look(strategy, history_of(steady(8)))
    first = rewritten(strategy, history_of(steady(4))[1:])
    again = rewritten(strategy, [*first, *history_of(steady(3))[2:]])
    assert [strategy.is_summary(m) for m in again] == [True, False]
    assert again[1].role == "user"
    assert model.asked[1][1] == first[0]


def test_the_same_past_is_summarized_once() -> None:
    strategy = Summarize(600, keep=150, max_tokens=50)
    model = strategy.model = Echo()
    look(strategy, history_of(steady(8)))
    covered = history_of(steady(5))[1:]
    assert rewritten(strategy, covered) == rewritten(strategy, list(covered))
    assert len(model.asked) == 1


def test_an_empty_summary_is_rejected() -> None:
    strategy = Summarize(600, keep=150, max_tokens=50)
    strategy.model = Echo(" \n")
    look(strategy, history_of(steady(8)))
    with pytest.raises(SummaryRejectedError, match="empty"):
        rewritten(strategy, history_of(steady(5))[1:])


def test_a_summary_without_a_model_says_what_is_missing() -> None:
    strategy = Summarize(600, keep=150, max_tokens=50)
    look(strategy, history_of(steady(8)))
    with pytest.raises(ConfigurationError, match="backend="):
        rewritten(strategy, history_of(steady(5))[1:])


@pytest.mark.parametrize(
    ("tail", "view", "fits"),
    [(99, 300, "short"), (100, 300, "ok"), (200, 300, "ok"), (201, 300, "long"), (150, 400, "long"), (150, 399, "ok")],
)
def test_a_summary_leaves_between_keep_and_twice_keep_and_a_view_below_hard(tail: int, view: int, fits: str) -> None:
    strategy = Summarize(400, keep=100, max_tokens=50)
    strategy.main = MainState([Message("user", "x")] * 40, {"tokens": 400, "sizes": [10] * 40})
    assert strategy.tail_fits(tail, view, 5) == fits
    # Where a single turn is longer than that, no other cut would leave less.
    strategy.main = MainState([Message("user", "x")] * 2, {"tokens": 400, "sizes": [10, 390]})
    assert strategy.tail_fits(tail, view, 1) == ("ok" if tail > 200 and view < 400 else fits)


@given(history=HISTORIES)
@examples(40)
def test_a_synchronous_summary_brings_the_context_below_its_trigger_where_it_can(history: list[Message]) -> None:
    """codex#13279: or it would be written again on the next turn."""
    strategy = Summarize(600, keep=150, max_tokens=50)
    look(strategy, history)
    if not strategy.should_commit():
        return
    cut = strategy.cut(history)
    fitting = [c for c in safe_cuts(history) if c > cut and sum(strategy.sizes[:c]) <= strategy.tokens - 150]
    users = [strategy.sizes[i] for i in range(leading_system(history), cut) if history[i].role == "user"]
    left = sum(strategy.sizes[: leading_system(history)]) + 50 + sum(users[-1:]) + sum(strategy.sizes[cut:])
    assert left < 600 or not fitting


# ---- pipelines -------------------------------------------------------------------------------------------------------


@given(history=HISTORIES)
@examples(40)
def test_a_pipeline_composes_its_stages_each_over_its_own_cut(history: list[Message]) -> None:
    first, last = offload(400, keep=1), KeepRecent(3, at_turns=5)
    pipeline = Pipeline(offload(400, keep=1), KeepRecent(3, at_turns=5))
    look(pipeline, history)
    view = history
    for stage in (first, last):
        look(stage, view)
        if stage.should_commit():
            done = stage.commit(view)
            assert done is not None
            view = [*done.head, *view[done.covered :]]
    assert pipeline.should_commit() == (view != history)
    if view != history:
        done = pipeline.commit(history)
        assert done is not None
        assert [*done.head, *history[done.covered :]] == view


# ---- bad arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Offload(0, store=STORE), "hard=0"),
        (lambda: Offload(10, keep=-1, store=STORE), "keep=-1"),
        (lambda: Offload(10, min_chars=-2, store=STORE), "min_chars=-2"),
        (lambda: KeepRecent(0, at_turns=3), "keeps 0 turns"),
        (lambda: KeepRecent(3), "at_turns= or at_tokens="),
        (lambda: KeepRecent(3, at_turns=3), r"turns=3, at_turns=3"),
        (lambda: KeepRecent(3, at_tokens=0), "at_tokens=0"),
        (SlidingWindow, "exactly one"),
        (lambda: SlidingWindow(3, tokens=100), r"turns=3, tokens=100"),
        (lambda: SlidingWindow(0), "size 0"),
        (lambda: SlidingWindow(tokens=0), "size 0"),
        (lambda: SlidingWindow(3, stride=-1), "stride -1"),
        (lambda: SlidingWindow(3, stride=4), "stride 4"),
        (lambda: SlidingWindow(tokens=100, stride=100), "stride 100"),
        (lambda: Summarize(0), "hard limit is 0"),
        (lambda: Summarize(100, keep=100, max_tokens=10), "keep is 100"),
        (lambda: Summarize(100, soft=100, max_tokens=10), "soft limit is 100"),
        (lambda: Summarize(100, max_tokens=0), "max_tokens=0"),
        (lambda: Summarize(100, max_tokens=100), "max_tokens=100"),
        (Pipeline, "no stages"),
        (lambda: Pipeline(KeepRecent(2, at_turns=4), offload()), "KeepRecent moves messages"),
    ],
)
def test_a_bad_argument_is_refused_by_value(make: Callable[[], LookaheadStrategy], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_a_message_may_hold_several_calls_of_one_name() -> None:
    calls = tuple(ToolCall(f"c{i}", "sed", "{}") for i in range(2))
    message = Message("assistant", None, calls)
    assert oracle.paired([message.wire(), *(Message("tool", "r", tool_call_id=c.id).wire() for c in calls)])


def test_offload_looks_at_each_message_once_however_long_the_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is ever worth moving every boundary asks again."""
    looked: list[Message] = []
    strategy = Offload(10**6, store=OffloadStore("memory://once"), min_chars=10**6)
    real = Offload._bulky  # pyright: ignore[reportPrivateUsage]

    def bulky(self: Offload, message: Message) -> bool:
        looked.append(message)
        return real(self, message)

    monkeypatch.setattr(Offload, "_bulky", bulky)
    history: list[Message] = []
    strategy.main.messages = history
    for i in range(200):
        call = ToolCall(f"c{i}", "sed", "{}")
        history += [Message("assistant", "", (call,)), Message("tool", "out", tool_call_id=call.id)]
        assert not strategy.should_lookahead()
        assert not strategy.should_commit()
    assert len(looked) == 200
    # A copy of the list is the same history; one in which an earlier message was replaced is another.
    strategy.main.messages = list(history)
    strategy.should_lookahead()
    assert len(looked) == 200
    short = history[3]
    strategy.main.messages[3] = Message("tool", "x" * 10**6, tool_call_id=short.tool_call_id)
    assert strategy.should_lookahead()
    assert len(looked) == 400
    del strategy.main.messages[10:]
    strategy.main.messages += [replace(m) for m in history[10:]]
    strategy.should_lookahead()
    assert len(looked) == 600
