"""The law, on the runtime under a virtual clock, for every strategy and way of handing the history in."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from conversations import (
    PROMPT,
    Call,
    Conversation,
    Form,
    Hand,
    Plan,
    Step,
    Turn,
    converse,
    moves_of,
    plans,
    runtime_of,
    same,
    steady,
    wire_of,
    wires_of,
)
from examples import examples
from oracle import Wires
from scripted import HANG, WHO, ScriptedBackend, Sent, tokens_of
from smoothagent import (
    BackendUnreachableError,
    ClosedError,
    Generated,
    KeepRecent,
    LookaheadStrategy,
    Offload,
    OffloadStore,
    Pipeline,
    Prompt,
    RateLimitedError,
    Reference,
    SlidingWindow,
    StoreUnavailableError,
    Summarize,
    Usage,
)
from smoothagent.machine import Command, Do
from smoothagent.store import parse_reference
from virtual_clock import run_virtual

STORE = OffloadStore("memory://law")
MIN_CHARS = 120
SUMMARY_TOKENS = 50
TEMPLATE = Summarize(9_000)


@dataclass(frozen=True)
class Kit:
    """A strategy with what its commits should be.

    ``due`` says whether the trigger is reached; ``right`` gives the view that a commit should leave, given the
    view before and the boundary it reports (where summaries are written after offloading: any that it may leave).
    """

    name: str
    make: Callable[[], LookaheadStrategy]
    due: Callable[[Wires], bool]
    right: Callable[[Wires, int], list[Wires]]
    model_free: bool = True
    waits: bool = False
    hard: int | None = None
    keep: int = 0

    def __repr__(self) -> str:
        return self.name


def completed(view: Wires) -> int:
    return len(oracle.turns(view))


def offload_due(view: Wires, hard: int, keep: int) -> bool:
    old = view[oracle.leading(view) : oracle.offload_cut(view, keep)]
    return oracle.total(view) >= hard and any(oracle.bulky(m, MIN_CHARS) for m in old)


def summary_due(view: Wires, hard: int, keep: int) -> bool:
    cut = oracle.summary_cut(view, summary_limit(view, hard, keep))
    return oracle.total(view) >= hard and cut > oracle.leading(view)


def summary_limit(view: Wires, hard: int, keep: int) -> int:
    """The synchronous cut leaves ``keep`` of hard or, where that would be too much to stay below it, of the whole."""
    cut = oracle.summary_cut(view, hard - keep)
    lead = oracle.leading(view)
    left = [*view[:lead], *oracle.latest_user(view[lead:cut]), *view[cut:]]
    overdue = oracle.total(view) > hard + keep or oracle.total(left) + SUMMARY_TOKENS >= hard
    return oracle.total(view) - keep if overdue else hard - keep


def summary(hard: int, keep: int) -> Summarize:
    return Summarize(hard, keep=keep, max_tokens=SUMMARY_TOKENS)


def offload(hard: int, keep: int) -> Offload:
    return Offload(hard, keep=keep, store=STORE, min_chars=MIN_CHARS)


def summarized(view: Wires, boundary: int) -> list[Wires]:
    return [oracle.summarized(view, boundary, TEMPLATE.prefix, TEMPLATE.question)]


def wide_due(view: Wires) -> bool:
    return summary_due(view, 900, 400)


def offload_then_summarize(view: Wires, boundary: int) -> list[Wires]:
    through = oracle.offloaded(view, 1, MIN_CHARS, STORE) if offload_due(view, 600, 1) else view
    if not summary_due(through, 900, 250):
        return [through]
    # Which outputs were the newest, and so verbatim to the summarizer, was decided when it was prepared.
    out: list[Wires] = []
    for cut in range(oracle.leading(view), boundary + 1):
        if oracle.safe(through, cut):
            seen = {oracle.text_of(w[oracle.leading(view)]): w for w in _seen(view, through, cut)}
            out += seen.values()
    return out


def _seen(view: Wires, through: Wires, cut: int) -> list[Wires]:
    befores = [oracle.offloaded_before(view[:cut], i, MIN_CHARS, STORE) for i in range(cut + 1)]
    return [w for before in befores for w in summarized([*before, *through[cut:]], cut)]


KEEP_RECENT = Kit(
    "KeepRecent(3, at_turns=6)",
    lambda: KeepRecent(3, at_turns=6),
    lambda view: completed(view) >= 6,
    lambda view, _: [oracle.keep_turns(view, 3)],
)
OFFLOAD = Kit(
    "Offload(700, keep=2)",
    lambda: offload(700, 2),
    lambda view: offload_due(view, 700, 2),
    lambda view, _: [oracle.offloaded(view, 2, MIN_CHARS, STORE)],
    waits=True,
    hard=700,
)
SUMMARIZE = Kit(
    "Summarize(900, keep=250)",
    lambda: summary(900, 250),
    lambda view: summary_due(view, 900, 250),
    summarized,
    model_free=False,
    waits=True,
    hard=900,
    keep=250,
)
SUMMARIZE_WIDE = replace(SUMMARIZE, name="Summarize(900, keep=400)", due=wide_due, keep=400)
WINDOWS = [
    KEEP_RECENT,
    Kit(
        "KeepRecent(2, at_tokens=700)",
        lambda: KeepRecent(2, at_tokens=700),
        lambda view: oracle.total(view) >= 700 and completed(view) > 2,
        lambda view, _: [oracle.keep_turns(view, 2)],
        waits=True,
        hard=700,
    ),
    Kit(
        "SlidingWindow(4)",
        lambda: SlidingWindow(4),
        lambda view: completed(view) > 4,
        lambda view, _: [oracle.keep_turns(view, 4)],
    ),
    Kit(
        "SlidingWindow(5, stride=3)",
        lambda: SlidingWindow(5, stride=3),
        lambda view: completed(view) > 5,
        lambda view, _: [oracle.keep_turns(view, 3)],
    ),
    Kit(
        "SlidingWindow(tokens=800, stride=200)",
        lambda: SlidingWindow(tokens=800, stride=200),
        lambda view: oracle.total(view) > 800 and oracle.keep_tokens(view, 600) != view,
        lambda view, _: [oracle.keep_tokens(view, 600)],
        hard=800,
    ),
    Kit(
        "Pipeline(Offload(500), KeepRecent(3, at_turns=6))",
        lambda: Pipeline(offload(500, 1), KeepRecent(3, at_turns=6)),
        lambda view: offload_due(view, 500, 1) or completed(view) >= 6,
        lambda view, _: [offload_then_keep(view)],
    ),
]
MODEL_FREE = [*WINDOWS, OFFLOAD]
PIPELINE = Kit(
    "Pipeline(Offload(600), Summarize(900, keep=250))",
    lambda: Pipeline(offload(600, 1), summary(900, 250)),
    lambda view: offload_due(view, 600, 1) or summary_due(view, 900, 250),
    offload_then_summarize,
    model_free=False,
    waits=True,
    hard=900,
)
ALL = [*MODEL_FREE, SUMMARIZE, PIPELINE]
HANDS: list[Hand] = ["view", "raw", "fresh"]
FORMS: list[Form] = ["dict", "Message", "openai"]


def offload_then_keep(view: Wires) -> Wires:
    through = oracle.offloaded(view, 1, MIN_CHARS, STORE) if offload_due(view, 500, 1) else view
    return oracle.keep_turns(through, 3) if completed(view) >= 6 else through


def backend(
    *,
    delay: float = 1.0,
    pause: Callable[[str, int], float | None] = lambda kind, n: None,
    fault: Callable[[str, int], Exception | None] = lambda kind, n: None,
    generated: Callable[[int, Generated], Generated] = lambda n, answer: answer,
) -> ScriptedBackend:
    return ScriptedBackend(delay=delay, answer=oracle.answer, pause=pause, fault=fault, generated=generated)


@dataclass(frozen=True)
class Talk:
    """A plan, how the harness hands it in, and how slow the server is."""

    plan: Plan
    hand: Hand
    form: Form
    delay: float
    classes: bool
    warms: bool

    def play(self, kit: Kit) -> Conversation:
        server = backend(delay=self.delay)
        server.classes, server.warms = self.classes, self.warms
        return converse(self.plan, kit.make(), backend=server, hand=self.hand, form=self.form)


TALKS = st.builds(
    Talk,
    plans(),
    st.sampled_from(HANDS),
    st.sampled_from(FORMS),
    st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    st.booleans(),
    st.sampled_from([True, True, True, False]),
)


def every(kits: list[Kit]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kit", kits, ids=repr)


# ---- 1. Equality -----------------------------------------------------------------------------------------------------


def check_equal(step: Step, kit: Kit) -> None:
    """The agent got the unchanged view or a right commit of it."""
    if step.report is None:
        assert same(step.sent, step.view)
        return
    assert kit.due(step.view)
    assert any(same(step.sent, right) for right in kit.right(step.view, step.report.boundary))
    assert step.report.before_tokens == step.tokens
    assert step.report.after_tokens == oracle.total(step.sent)
    assert (step.report.before_messages, step.report.after_messages) == (len(step.view), len(step.sent))
    if kit.keep:
        check_summary(step, kit)


def check_summary(step: Step, kit: Kit) -> None:
    assert step.report is not None
    assert kit.hard is not None
    boundary = step.report.boundary
    assert oracle.safe(step.view, boundary)
    if step.report.kind != "sync":
        tail = oracle.total(step.view[boundary:])
        # Where a single turn is longer than that, what the last cut that leaves ``keep`` leaves.
        latest = oracle.summary_cut(step.view, step.tokens - kit.keep)
        assert kit.keep <= tail <= max(2 * kit.keep, oracle.total(step.view[latest:]))
        assert oracle.total(step.sent) < kit.hard
    else:
        assert boundary == oracle.summary_cut(step.view, summary_limit(step.view, kit.hard, kit.keep))


@every([kit for kit in WINDOWS if not kit.waits])
@given(plan=plans(), hand=st.sampled_from(HANDS))
@examples(15)
def test_where_nothing_is_waited_for_all_is_as_if_it_were_synchronous(kit: Kit, plan: Plan, hand: Hand) -> None:
    """Every way of cutting the past into segments gives the same requests as no lookahead at all."""
    beside = converse(plan, kit.make(), backend=backend(), hand=hand)
    plain = converse(plan, kit.make(), hand=hand, lookahead=False)
    assert [s.sent for s in beside.steps] == [s.sent for s in plain.steps]
    for step in beside.steps:
        assert (step.report is not None) == kit.due(step.view)


@given(plan=plans())
@examples(15)
def test_an_untouched_message_comes_back_as_the_same_object(plan: Plan) -> None:
    conversation = converse(plan, KEEP_RECENT.make(), backend=backend())
    known: set[int] = {id(n) for n in conversation.raw}
    for step in conversation.steps:
        assert all(id(n) in known for n in step.out)


# ---- 2. Prefix -------------------------------------------------------------------------------------------------------


def check_prefix(steps: list[Step]) -> None:
    """Each request extends the one before, unless it commits."""
    for before, step in itertools.pairwise(steps):
        if step.report is None:
            assert same(step.sent[: len(before.sent)], before.sent)


def check_warmth(step: Step) -> None:
    """A commit claims no warmth that is not there."""
    if step.report is not None:
        assert step.report.warmed_tokens <= warm_tokens(step)
        assert step.report.warmed_tokens <= step.report.known_tokens <= step.report.after_tokens


def warm_tokens(step: Step) -> int:
    """Tokens of the request's messages that the server held warm."""
    warm = 0
    for i, wire in enumerate(step.sent):
        tokens = tokens_of(step.sent[: i + 1])
        if step.warm[: len(tokens)] != tokens:
            break
        warm += oracle.size(wire)
    return warm


@given(talk=TALKS)
@examples(30)
def test_a_summary_is_asked_with_the_main_streams_own_prompt(talk: Talk) -> None:
    """The server prefills the question only; all that was warmed is of use."""
    conversation = talk.play(SUMMARIZE)
    assert conversation.backend is not None
    views = [tokens_of(s.view) for s in conversation.steps] + [tokens_of(wires_of(conversation.view))]
    for sent in conversation.backend.sent:
        if sent.kind == "generate":
            asked = tokens_of(sent.messages[:-1])
            assert any(view[: len(asked)] == asked for view in views)
            assert sent.messages[-1]["role"] == "user"
    for step in conversation.steps:
        if step.report is not None and step.report.kind == "lookahead":
            tokens = tokens_of(step.sent)
            assert step.warm == tokens[: len(step.warm)]


STEADY = [(OFFLOAD, 390), (KEEP_RECENT, 390), (WINDOWS[2], 390), (WINDOWS[3], 390), (WINDOWS[4], 150), (SUMMARIZE, 150)]


@pytest.mark.parametrize(("kit", "output"), STEADY, ids=repr)
@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("parallel", [1, 3])
def test_a_steady_conversation_hits_every_time(kit: Kit, output: int, hand: Hand, parallel: int) -> None:
    """With time between the turns, all that was known at the last boundary is warm, from the third commit on."""
    plan = steady(24, output=output, parallel=parallel)
    conversation = converse(plan, kit.make(), backend=backend(delay=0.1), hand=hand)
    commits = [s for s in conversation.steps if s.report is not None]
    assert len(commits) > 5
    for step in commits[2:]:
        assert step.report is not None
        assert step.report.kind == "lookahead"
        # The results that end the history came just now.
        fresh = itertools.takewhile(lambda m: m["role"] != "assistant", reversed(step.sent))
        assert step.report.known_tokens == step.report.after_tokens
        assert step.report.known_tokens - step.report.warmed_tokens == oracle.total(list(fresh))
        assert step.warm == tokens_of(step.sent)[: len(step.warm)]
        assert step.seconds == 0
    # A large output that came just now is no misprediction.
    assert conversation.runtime.ledger.snapshot().mispredictions <= 2


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("hand", HANDS)
def test_a_window_that_is_cold_at_its_turn_is_committed_there(hand: Hand, parallel: int) -> None:
    """It moves on with every turn, so it would be as cold a turn later."""
    server = backend(delay=0.1, pause=lambda kind, n: HANG)
    conversation = converse(steady(20, parallel=parallel), KeepRecent(3, at_turns=6), backend=server, hand=hand)
    commits = [s for s in conversation.steps if s.report is not None]
    assert [s.turn for s in commits] == [6, 9, 12, 15, 18]
    assert all(s.report is not None and s.report.kind == "late" for s in commits)
    assert all(s.seconds == 0 for s in commits)


@pytest.mark.parametrize("overshoot", range(0, 400, 50))
def test_offload_is_warmed_as_it_grows_and_never_again_before_its_commit(overshoot: int) -> None:
    """The planned turn is known early, so each turn warms what it brought; and where the trigger is reached a turn
    before the planned one, the commit waits for that turn rather than be cold."""
    fresh: list[tuple[int, int]] = []
    server, before = backend(delay=0.1), list[Any]()

    def note(sent: Sent) -> None:
        if sent.kind == "prefill":
            same = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(before, sent.messages, strict=False)))
            fresh.append((server.commits, oracle.total(sent.messages[same:])))
            before[:] = sent.messages

    server.arrived = note
    strategy = Offload(3000 + overshoot, keep=3, store=STORE, min_chars=100)
    conversation = converse(steady(24, output=300), strategy, backend=server)
    commits = [s for s in conversation.steps if s.report is not None]
    assert commits
    for step in commits:
        assert step.report is not None
        assert step.report.kind == "lookahead"
        assert step.report.known_tokens - step.report.warmed_tokens <= 300, "the output that came just now"
    assert commits[0].tokens < 3000 + overshoot + 2 * 400, "one turn is waited for at most"
    # A turn is 356 tokens; the first two, before growth is known, and the first after a commit may be more.
    for (commits_then, size), (commits_before, _) in zip(fresh[3:], fresh[2:], strict=False):
        assert size <= 2 * 356 or commits_then != commits_before


def test_a_large_output_that_came_just_now_is_no_misprediction() -> None:
    """All that was warmed is of use, although most of the new view is cold."""
    conversation = converse(steady(20, output=390), SlidingWindow(tokens=800, stride=200), backend=backend(delay=0.1))
    commits = [s for s in conversation.steps if s.report is not None]
    assert len(commits) > 5
    assert all(s.warm == tokens_of(s.sent)[: len(s.warm)] for s in commits[2:])
    assert conversation.runtime.ledger.snapshot().mispredictions <= 2


# ---- 3. No wait ------------------------------------------------------------------------------------------------------


def check_no_wait(step: Step, kit: Kit, bound: float, ceiling: int | None = None) -> None:
    ceiling = ceiling or ceiling_of(kit)
    if step.seconds > 0:
        assert step.did(Do.WAIT, Do.SYNCHRONOUS)
        assert step.seconds <= bound
    for state, event, commands in step.moves:
        if any(c.do is Do.WAIT for c in commands):
            assert ceiling is not None
            assert step.tokens >= ceiling
        if any(c.do is Do.SYNCHRONOUS for c in commands) and state.job is not None and not step.edited:
            why = [c.why for c in commands if c.do is Do.CANCEL]
            # A pipeline offloads outputs from the tail of what it has summarized already.
            assert why in (["waited"], ["long"]) or (why == ["short"] and kit is PIPELINE)
            assert ceiling is not None
            assert step.tokens >= ceiling
        assert event is not None


def check_ceiling(step: Step, kit: Kit) -> None:
    """No request reaches the ceiling that could have been transformed."""
    ceiling = ceiling_of(kit)
    if ceiling is not None and step.tokens >= ceiling and step.report is None and kit.due(step.view):
        boundary = oracle.summary_cut(step.view, summary_limit(step.view, kit.hard or 0, kit.keep))
        saved = step.tokens - oracle.total(kit.right(step.view, boundary)[0])
        # A transformation that saves less than 2% is not made, and not tried again on the same messages.
        assert saved < step.tokens * 0.02 or any(s.failures or s.barred >= 0 for s, _, _ in step.moves)


def ceiling_of(kit: Kit) -> int | None:
    return kit.hard + kit.hard // 4 if kit.hard else None


def promotions_of(conversation: Conversation, job: int) -> int:
    moves = moves_of(conversation.runtime.events)
    return sum(c == Command(Do.PROMOTE, job) for _, _, commands in moves for c in commands)


@pytest.mark.parametrize("hand", HANDS)
def test_a_lookahead_that_never_comes_is_waited_for_once_and_for_a_bounded_time(hand: Hand) -> None:
    server = backend(pause=lambda kind, n: HANG if kind == "generate" and n == 1 else None, delay=0.1)
    plan = steady(30, output=60, tool=1.0)
    conversation = converse(plan, summary(900, 400), backend=server, hand=hand, ceiling=1000)
    waits = [s for s in conversation.steps if s.did(Do.WAIT)]
    assert len(waits) == 1
    assert waits[0].tokens >= 1000
    assert waits[0].seconds == pytest.approx(30.1)
    assert waits[0].report is not None
    assert waits[0].report.kind == "sync"
    assert promotions_of(conversation, 1) == 1
    # Until there it went on uncommitted, without waiting.
    before = conversation.steps[: waits[0].turn]
    assert any(s.tokens >= 890 for s in before)
    assert all(s.report is None and s.seconds == 0 for s in before)
    for step in conversation.steps:
        check_equal(step, SUMMARIZE_WIDE)
        check_no_wait(step, SUMMARIZE_WIDE, 40.0, ceiling=1000)


def test_a_lookahead_that_comes_while_waited_for_is_committed() -> None:
    server = backend(pause=lambda kind, n: 12.0 if kind == "generate" and n == 1 else None, delay=0.1)
    conversation = converse(steady(30, output=60, tool=1.0), summary(900, 400), backend=server, ceiling=1000)
    waits = [s for s in conversation.steps if s.did(Do.WAIT)]
    assert len(waits) == 1
    assert waits[0].report is not None
    assert waits[0].report.kind == "late"
    assert 0 < waits[0].report.waited == waits[0].seconds < 12
    assert server.generations <= 1 + len([s for s in conversation.steps if s.report is not None])
    for step in conversation.steps:
        check_equal(step, SUMMARIZE_WIDE)


def test_a_result_that_would_leave_too_much_is_not_waited_for() -> None:
    """What must be made anew in any case would only make the agent slower than the plain framework."""
    server = backend(pause=lambda kind, n: 25.0 if kind == "generate" and n == 1 else None, delay=0.1)
    conversation = converse(steady(30, tool=1.0), summary(900, 250), backend=server)
    for step in conversation.steps:
        check_equal(step, SUMMARIZE)
        assert step.seconds <= 0.1 or (step.report is not None and step.report.kind == "late")


def test_a_result_that_is_late_is_committed_as_soon_as_it_is_there() -> None:
    """Between hard and the ceiling nobody waits."""
    server = backend(pause=lambda kind, n: 6.0 if kind == "generate" and n == 1 else None, delay=0.1)
    conversation = converse(steady(30, output=60, tool=1.0), summary(900, 250), backend=server)
    assert all(s.seconds == 0 for s in conversation.steps)
    first = next(s for s in conversation.steps if s.report is not None)
    assert first.tokens >= 900
    for step in conversation.steps:
        check_equal(step, SUMMARIZE)


# ---- 4. Pairs --------------------------------------------------------------------------------------------------------


def check_pairs(conversation: Conversation) -> None:
    """No call without its results and no result without its call."""
    assert conversation.backend is not None
    for step in conversation.steps:
        assert oracle.paired(step.sent)
    for sent in conversation.backend.sent:
        # Pending calls may be warmed, never summarized.
        assert oracle.paired(sent.messages, pending=sent.kind == "prefill")


@every(ALL)
@given(talk=TALKS)
@examples(60)
def test_the_first_four_laws_hold_for_any_conversation(kit: Kit, talk: Talk) -> None:
    token = WHO.set("the caller")
    conversation = talk.play(kit)
    WHO.reset(token)
    for step in conversation.steps:
        check_equal(step, kit)
        check_warmth(step)
        check_no_wait(step, kit, bound=30.0 + 2 * 20.0)
        check_ceiling(step, kit)
        if kit.model_free:
            assert step.seconds == 0
        # Nothing that was prepared is lost where the harness changes nothing.
        assert not any(c.why == "stale" for _, _, commands in step.moves for c in commands)
    check_prefix(conversation.steps)
    check_pairs(conversation)
    # The seventh: the caller's context does not follow onto the lane.
    assert conversation.backend is not None
    assert {s.who for s in conversation.backend.sent} <= {"nobody"}


def test_a_pipeline_summarizes_where_that_is_due_although_offloading_would_do_a_turn_later() -> None:
    """The newest output counts in full at this commit; what is transformed on the critical path is for this one."""
    said = [Turn("u" * n, "user", "done", (), 0.0, (0, 0, 0)) for n in (6, 6, 61)]
    asked: list[tuple[str | None, int]] = [("u" * 91, 150), (None, 30), (None, 150), (None, 400)]
    called = [Turn(user, "user", None, (Call("c0", "g" * 20, "r" * n, 0.0),), 0.0, (0, 0, 0)) for user, n in asked]
    turns = [*said, *called, said[-1]]
    conversation = converse(Plan((), tuple(turns)), PIPELINE.make(), backend=backend())
    last = conversation.steps[-1]
    assert last.report is not None
    assert last.report.kind == "sync"
    assert last.tokens > 900 > last.report.after_tokens
    check_equal(last, PIPELINE)


# ---- 5. Nothing lost -------------------------------------------------------------------------------------------------

EMPTY = Generated("  ", "stop", tool_calls=False, usage=Usage(100, 1, 0))
CUT_OFF = Generated("half a sum", "length", tool_calls=False, usage=Usage(100, 50, 0))
CALLED = Generated("", "tool_calls", tool_calls=True, usage=Usage(100, 9, 0))
ERRORS: list[Exception] = [
    BackendUnreachableError("nothing answers"),
    RateLimitedError("slow down", retry_after=1.0),
    RuntimeError("a bug in the client"),
    TimeoutError(),
]


@dataclass(frozen=True)
class Faults:
    """What goes wrong, by kind of request and its number; ``None`` as number: every time."""

    errors: dict[tuple[str, int | None], int]
    hangs: frozenset[tuple[str, int]]
    answers: dict[int, int]

    def backend(self, delay: float) -> ScriptedBackend:
        def fault(kind: str, n: int) -> Exception | None:
            which = self.errors.get((kind, n), self.errors.get((kind, None)))
            return None if which is None else ERRORS[which]

        def generated(n: int, answer: Generated) -> Generated:
            which = self.answers.get(n)
            return answer if which is None else (EMPTY, CUT_OFF, CALLED)[which]

        return backend(
            delay=delay, fault=fault, generated=generated, pause=lambda k, n: HANG if (k, n) in self.hangs else None
        )


KINDS = st.sampled_from(["prefill", "generate", "synchronous", "promote"])
FAULTS = st.builds(
    Faults,
    st.dictionaries(st.tuples(KINDS, st.one_of(st.none(), st.integers(1, 5))), st.integers(0, 3), max_size=4),
    st.frozensets(st.tuples(st.sampled_from(["prefill", "generate"]), st.integers(1, 4)), max_size=2),
    st.dictionaries(st.integers(1, 5), st.integers(0, 2), max_size=2),
)


@every([OFFLOAD, KEEP_RECENT, SUMMARIZE, PIPELINE])
@given(plan=plans(), hand=st.sampled_from(HANDS), delay=st.sampled_from([0.0, 0.5, 3.0]), faults=FAULTS)
@examples(50)
def test_whatever_fails_the_agent_gets_its_history_or_a_right_commit(
    kit: Kit, plan: Plan, hand: Hand, delay: float, faults: Faults
) -> None:
    conversation = converse(plan, kit.make(), backend=faults.backend(delay), hand=hand)
    for step in conversation.steps:
        check_equal(step, kit)
        check_no_wait(step, kit, bound=40.0)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@every([OFFLOAD, SUMMARIZE, PIPELINE])
def test_a_server_that_cannot_be_warmed_does_not_hold_up_the_commit(kit: Kit, error: Exception) -> None:
    """The transformation alone runs ahead: the commit comes at hard, not at the ceiling."""
    server = backend(delay=0.1, fault=lambda kind, n: error if kind == "prefill" else None)
    conversation = converse(steady(12, output=150), kit.make(), backend=server, ceiling=10_000)
    first = next(s for s in conversation.steps if kit.due(s.view))
    assert first.report is not None
    assert first.report.kind == "lookahead"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_summarizer_that_always_fails_leaves_the_history_alone(error: Exception) -> None:
    server = backend(delay=0.1, fault=lambda kind, n: error if kind in ("generate", "synchronous") else None)
    conversation = converse(steady(20), summary(900, 250), backend=server)
    assert all(s.report is None and s.sent == s.view for s in conversation.steps)
    assert server.generations > 1  # retried later
    assert server.generations < 20  # and not on every turn


@pytest.mark.parametrize("answer", [EMPTY, CUT_OFF, CALLED], ids=["empty", "cut off", "tool call"])
def test_an_answer_that_is_no_summary_is_rejected_and_asked_for_again(answer: Generated) -> None:
    server = backend(delay=0.1, generated=lambda n, good: answer if n == 1 else good)
    conversation = converse(steady(20), summary(900, 250), backend=server)
    for step in conversation.steps:
        check_equal(step, SUMMARIZE)
    assert any(s.report is not None for s in conversation.steps)


def test_usage_that_is_garbage_changes_nothing_but_the_books() -> None:
    server = backend(delay=0.1, generated=lambda n, good: replace(good, usage=Usage(-3, -1, 99)))
    conversation = converse(steady(20), summary(900, 250), backend=server)
    for step in conversation.steps:
        check_equal(step, SUMMARIZE)
        assert step.seconds == 0
    assert any(s.report is not None for s in conversation.steps)


@given(
    plan=plans(),
    hand=st.sampled_from(HANDS),
    delay=st.sampled_from([0.5, 3.0, 20.0]),
    patience=st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.2, 2.0, 25.0])), min_size=14, max_size=14),
)
@examples(40)
def test_a_caller_that_gives_up_loses_nothing(
    plan: Plan, hand: Hand, delay: float, patience: list[float | None]
) -> None:
    conversation = converse(
        plan, summary(900, 250), backend=backend(delay=delay), hand=hand, patience=lambda turn: patience[turn]
    )
    for step in conversation.steps:
        check_equal(step, SUMMARIZE)


def test_a_cancelled_caller_does_not_cancel_the_lookahead() -> None:
    server = backend(pause=lambda kind, n: 12.0 if kind == "generate" and n == 1 else None, delay=0.1)
    conversation = converse(
        steady(9, output=60, tool=1.0), summary(900, 400), backend=server, ceiling=1000, patience=lambda turn: 1.0
    )
    assert conversation.gave_up == [8]
    report = conversation.steps[8].report
    assert report is not None
    assert report.kind == "late"
    assert ("generate", 1) not in server.cancelled


@given(plan=plans(), at=st.integers(0, 13), delay=st.sampled_from([0.0, 0.5, 20.0]), kit=st.sampled_from(ALL))
@examples(30)
def test_closing_in_the_middle_stops_the_work_and_says_so_afterwards(
    plan: Plan, at: int, delay: float, kit: Kit
) -> None:
    server = backend(delay=delay)

    async def main() -> None:
        runtime = runtime_of(kit.make(), server)
        conversation = Conversation(runtime, server)
        await conversation.run(replace(plan, turns=plan.turns[: at + 1]))
        await runtime.aclose()
        assert server.running == 0
        assert server.released == [runtime.session]
        for step in conversation.steps:
            check_equal(step, kit)
        with pytest.raises(ClosedError, match=runtime.session):
            await runtime.aon_commit(conversation.view)
        with pytest.raises(ClosedError):
            runtime.on_segment_boundary(conversation.view)
        await runtime.aclose()
        assert server.released == [runtime.session]

    run_virtual(main())


def test_a_dropped_lookahead_lets_go_of_the_server_before_the_next_begins() -> None:
    """One ordered lane a conversation."""
    server = backend(delay=5.0)
    server.unwind = 1.0
    overlaps: list[str] = []
    server.arrived = lambda sent: overlaps.append(sent.kind) if server.running else None

    async def main() -> None:
        runtime = runtime_of(summary(900, 250), server)
        conversation = Conversation(runtime, None)
        await conversation.run(steady(4))
        runtime.on_segment_boundary(conversation.view)
        await asyncio.sleep(0.5)
        assert server.running == 1
        forked = [*conversation.view[:4], *wires_of(conversation.view[4:]), {"role": "user", "content": "x"}]
        forked[1] = {"role": "user", "content": "another task"}
        runtime.on_segment_boundary(forked, prompt=Prompt(model="another"))
        await asyncio.sleep(0.5)
        runtime.on_segment_boundary(forked)
        await asyncio.sleep(3.0)
        assert server.generations == 2
        assert server.cancelled == [("generate", 1)]
        assert overlaps == []
        await runtime.aclose()
        assert server.running == 0

    run_virtual(main())


def test_closing_waits_for_what_was_cancelled_to_have_stopped() -> None:
    server = backend(delay=50.0)
    server.unwind = 1.0

    async def main() -> None:
        runtime = runtime_of(summary(900, 250), server)
        conversation = Conversation(runtime, None)
        await conversation.run(steady(4))
        await asyncio.sleep(0.5)
        assert server.running == 1
        await runtime.aclose()
        assert server.running == 0
        assert server.cancelled == [("generate", 1)]

    run_virtual(main())


@pytest.mark.parametrize("after", [0.0, 0.05, 5.0])
def test_closing_while_the_caller_waits_gives_it_its_history(after: float) -> None:
    server = backend(pause=lambda kind, n: 20.0)

    async def main() -> None:
        runtime = runtime_of(summary(400, 100), server)
        conversation = Conversation(runtime, server)
        await conversation.run(replace(steady(2), turns=steady(2).turns[:1]))
        conversation.add({"role": "user", "content": "u" * 300})
        waiting = asyncio.ensure_future(runtime.aon_commit(list(conversation.view)))
        await asyncio.sleep(after)
        assert not waiting.done()
        await runtime.aclose()
        out = await asyncio.wait_for(waiting, 60)
        view = wires_of(conversation.view)
        assert wires_of(out) == view or any(
            same(wires_of(out), w) for c in range(len(view)) for w in summarized(view, c)
        )
        assert server.running == 0

    run_virtual(main())
    gc.collect()  # nothing was left unawaited


@given(talk=TALKS)
@examples(20)
def test_offloaded_text_comes_back(talk: Talk) -> None:
    conversation = talk.play(OFFLOAD)
    originals = {wire_of(m)["content"] for m in conversation.raw}
    for step in conversation.steps:
        for wire in step.sent:
            reference = parse_reference(wire["content"] or "") if wire["role"] == "tool" else None
            if reference is not None:
                assert STORE.get(reference) in originals


class Unwritable(OffloadStore):
    """A store whose disk is full at some times."""

    def __init__(self, failing: Callable[[int], bool]) -> None:
        super().__init__("memory://unwritable")
        self.failing, self.puts = failing, 0

    def put(self, content: str) -> Reference:
        self.puts += 1
        if self.failing(self.puts):
            raise StoreUnavailableError("cannot write: the disk is full")
        return super().put(content)


@pytest.mark.parametrize("hand", HANDS)
def test_where_the_store_cannot_be_written_the_outputs_stay(hand: Hand) -> None:
    """The reference is committed only after a durable write (deepagentsjs#621)."""
    full = Unwritable(lambda n: True)
    strategy = Offload(700, keep=2, store=full, min_chars=MIN_CHARS)
    conversation = converse(steady(12), strategy, backend=backend(delay=0.1), hand=hand)
    assert full.puts > 0
    assert all(s.sent == s.view for s in conversation.steps)


@pytest.mark.parametrize("where", ["view", "raw"])
def test_an_output_edited_in_place_is_offloaded_as_it_is_now(where: Hand) -> None:
    """Also where the lookahead has had no time to begin."""
    store = OffloadStore("memory://edited")

    async def main() -> None:
        runtime = runtime_of(Offload(700, keep=1, store=store, min_chars=MIN_CHARS), backend(delay=0.1))
        conversation = Conversation(runtime, None, where)
        await conversation.run(steady(2))
        history = conversation.view if where == "view" else conversation.raw
        for number in range(2):
            conversation.add(
                {"role": "assistant", "content": None, "tool_calls": [_call(str(number))]},
            )
            conversation.add({"role": "tool", "tool_call_id": str(number), "content": f"{number}" * 400})
        runtime.on_segment_boundary(history)
        history[-3]["content"] = "the corrected output" * 20
        out = wires_of(await runtime.aon_commit(history))
        reference = parse_reference(out[-3]["content"])
        assert reference is not None
        assert store.get(reference) == "the corrected output" * 20
        await runtime.aclose()

    run_virtual(main())


def _call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "sed", "arguments": "{}"}}


@given(failing=st.frozensets(st.integers(1, 30)), plan=plans())
@examples(25)
def test_a_store_that_fails_now_and_then_costs_time_only(failing: frozenset[int], plan: Plan) -> None:
    strategy = Offload(700, keep=2, store=Unwritable(lambda n: n in failing), min_chars=MIN_CHARS)
    for step in converse(plan, strategy, backend=backend(delay=0.1)).steps:
        check_equal(step, OFFLOAD)


# ---- 6. Stale is never spliced ---------------------------------------------------------------------------------------

EDITS = ["in place", "replaced", "truncated", "forked", "inserted", "model", "tools"]


@dataclass(frozen=True)
class Edit:
    """Something the harness does to its history between a boundary and the next commit."""

    kind: str
    turn: int
    where: int

    def __call__(self, conversation: Conversation, turn: int) -> bool:
        if turn != self.turn:
            return False
        if self.kind in ("model", "tools"):
            conversation.prompt = replace(PROMPT, **self._prompt())
            return True
        history = conversation.view if conversation.hand == "view" else conversation.raw
        places = [i for i in range(len(history)) if self._fits(conversation, wires_of(history), i)]
        if not places:
            return False
        i = places[self.where % len(places)]
        self._change(history, i)
        conversation.edited_at(i)
        return True

    def _prompt(self) -> dict[str, Any]:
        more: dict[str, Any] = {"type": "function", "function": {"name": "sed", "parameters": {}}}
        return {"model": "another"} if self.kind == "model" else {"tools": [*PROMPT.tools, more]}

    def _fits(self, conversation: Conversation, wires: Wires, i: int) -> bool:
        if self.kind in ("in place", "replaced"):
            # What is in the committed head lies in the view too, where the runtime knows it by identity.
            fresh = self.kind == "replaced" or conversation.hand != "raw" or i >= conversation.covered
            return fresh and isinstance(conversation.given()[i], dict) and wires[i]["content"] is not None
        return oracle.paired(wires[:i]) and i > 0

    def _change(self, history: list[Any], i: int) -> None:
        match self.kind:
            case "in place":
                history[i]["content"] = "changed " + "x" * len(history[i]["content"])
            case "replaced":
                history[i] = {**history[i], "content": "another " + history[i]["content"]}
            case "truncated":
                del history[i:]
            case "forked":
                history[i:] = [{"role": "user", "content": "rather this " + "y" * 200}]
            case _:
                history.insert(i, {"role": "user", "content": "and this " + "z" * 100})


@every([KEEP_RECENT, WINDOWS[4], OFFLOAD, SUMMARIZE, PIPELINE])
@given(
    plan=plans(),
    hand=st.sampled_from(HANDS),
    delay=st.sampled_from([0.0, 0.5, 20.0]),
    edit=st.builds(Edit, st.sampled_from(EDITS), st.integers(1, 13), st.integers(0, 40)),
)
@examples(40)
def test_a_history_that_changed_gets_nothing_that_was_prepared_for_another(
    kit: Kit, plan: Plan, hand: Hand, delay: float, edit: Edit
) -> None:
    conversation = converse(plan, kit.make(), backend=backend(delay=delay), hand=hand, before_commit=edit)
    for step in conversation.steps:
        check_equal(step, kit)


@pytest.mark.parametrize("change", [{"model": "another"}, {"tools": []}, {"system": "s"}, {"params": {"top_k": 1}}])
def test_a_summary_made_for_another_prompt_is_dropped(change: dict[str, Any]) -> None:
    """OpenHands#10873. The memoised answer is of the other model too."""
    changed = replace(Prompt(model="m", tools=[{"type": "function", "function": {"name": "f"}}]), **change)
    prepared: list[int] = []

    def switch(conversation: Conversation, turn: int) -> bool:
        if not prepared and wires_of(conversation.view) and oracle.total(wires_of(conversation.view)) >= 900:
            prepared.append(server.generations)
            conversation.prompt = changed
        return bool(prepared)

    server = backend(delay=0.1)
    conversation = converse(
        steady(12),
        summary(900, 250),
        backend=server,
        before_commit=switch,
        prompt=Prompt(model="m", tools=[{"type": "function", "function": {"name": "f"}}]),
    )
    assert prepared[0] > 0
    first = next(s for s in conversation.steps if s.report is not None)
    assert first.edited
    assert first.seconds == pytest.approx(0.1)  # asked again
    later = [s for s in server.sent if s.kind == "generate"][prepared[0] :]
    assert later
    assert all(s.prompt == changed for s in later)


# ---- 7. Nobody else pays ---------------------------------------------------------------------------------------------


@given(plan=plans(), other=plans(), faults=FAULTS)
@examples(15)
def test_conversations_do_not_touch_each_other(plan: Plan, other: Plan, faults: Faults) -> None:
    async def both() -> tuple[list[Wires], list[Wires]]:
        # No two things happen at one time, or their order would differ.
        server, broken = backend(delay=0.37), faults.backend(0.41)
        one = Conversation(runtime_of(summary(900, 250), server), server)
        two = Conversation(runtime_of(summary(900, 250), server), server)
        three = Conversation(runtime_of(summary(900, 250), broken), broken)
        await asyncio.gather(one.run(plan), two.run(other), three.run(plan))
        for conversation in (one, two, three):
            await conversation.runtime.aclose()
        assert {s.conversation for s in server.sent} <= {one.runtime.session, two.runtime.session}
        return [s.sent for s in one.steps], [s.sent for s in two.steps]

    together = run_virtual(both())
    alone = [converse(p, summary(900, 250), backend=backend(delay=0.37)) for p in (plan, other)]
    assert [[s.sent for s in c.steps] for c in alone] == list(together)


def test_the_agents_own_calls_are_marked_and_announced() -> None:
    server = backend(delay=0.1)
    conversation = converse(steady(5), summary(900, 250), backend=server)
    assert server.events == ["arrived", "first", "done"] * 5
    assert len(conversation.steps) == 5
