"""The law, on the runtime under a virtual clock, for every strategy and way of handing the history in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from conversations import Conversation, Form, Hand, Plan, Step, converse, plans, same, steady, wires_of
from oracle import Wires
from scripted import ScriptedBackend, tokens_of
from smoothagent import (
    KeepRecent,
    LookaheadStrategy,
    Offload,
    OffloadStore,
    Pipeline,
    SlidingWindow,
    Summarize,
)
from smoothagent.machine import Do

STORE = OffloadStore("memory://law")
MIN_CHARS = 120


@dataclass(frozen=True)
class Kit:
    """A strategy with what its commits should be.

    ``due`` says whether the trigger is reached; ``right`` gives the view that a commit should leave, given the
    view before and the boundary it reports.
    """

    name: str
    make: Callable[[], LookaheadStrategy]
    due: Callable[[Wires], bool]
    right: Callable[[Wires, int], Wires]
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
    return oracle.total(view) >= hard and oracle.summary_cut(view, summary_limit(view, hard, keep)) > oracle.leading(
        view
    )


def summary_limit(view: Wires, hard: int, keep: int) -> int:
    """The synchronous cut: what leaves ``keep`` of hard, or, far beyond hard, of the whole."""
    return oracle.total(view) - keep if oracle.total(view) > hard + keep else hard - keep


def summary(hard: int, keep: int) -> Summarize:
    return Summarize(hard, keep=keep, max_tokens=50)


def offload(hard: int, keep: int) -> Offload:
    return Offload(hard, keep=keep, store=STORE, min_chars=MIN_CHARS)


def piped(view: Wires, boundary: int) -> Wires:
    """Offload(700, keep=1), then Summarize(900, keep=250) where that is still due."""
    through = oracle.offloaded(view, 1, MIN_CHARS, STORE) if offload_due(view, 700, 1) else view
    if not summary_due(through, 900, 250):
        return through
    template = summary(900, 250)
    candidates = [
        oracle.summarized(through, c, template.prefix, template.question)
        for c in range(oracle.leading(view), boundary + 1)
        if oracle.safe(view, c)
    ]
    return PIPED.setdefault(id(candidates), candidates) and _first(candidates)


PIPED: dict[int, list[Wires]] = {}


def _first(candidates: list[Wires]) -> Wires:
    return candidates[-1]


def summarized(view: Wires, boundary: int) -> Wires:
    template = summary(900, 250)
    return oracle.summarized(view, boundary, template.prefix, template.question)


KEEP_RECENT = Kit(
    "KeepRecent(3, at_turns=6)",
    lambda: KeepRecent(3, at_turns=6),
    lambda view: completed(view) >= 6,
    lambda view, _: oracle.keep_turns(view, 3),
)
OFFLOAD = Kit(
    "Offload(700, keep=2)",
    lambda: offload(700, 2),
    lambda view: offload_due(view, 700, 2),
    lambda view, _: oracle.offloaded(view, 2, MIN_CHARS, STORE),
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
WINDOWS = [
    KEEP_RECENT,
    Kit(
        "KeepRecent(2, at_tokens=700)",
        lambda: KeepRecent(2, at_tokens=700),
        lambda view: oracle.total(view) >= 700 and completed(view) > 2,
        lambda view, _: oracle.keep_turns(view, 2),
        hard=700,
    ),
    Kit(
        "SlidingWindow(4)",
        lambda: SlidingWindow(4),
        lambda view: completed(view) > 4,
        lambda view, _: oracle.keep_turns(view, 4),
    ),
    Kit(
        "SlidingWindow(5, stride=3)",
        lambda: SlidingWindow(5, stride=3),
        lambda view: completed(view) > 5,
        lambda view, _: oracle.keep_turns(view, 3),
    ),
    Kit(
        "SlidingWindow(tokens=800, stride=200)",
        lambda: SlidingWindow(tokens=800, stride=200),
        lambda view: oracle.total(view) > 800 and oracle.keep_tokens(view, 600) != view,
        lambda view, _: oracle.keep_tokens(view, 600),
        hard=800,
    ),
    Kit(
        "Pipeline(Offload(500), KeepRecent(3, at_turns=6))",
        lambda: Pipeline(offload(500, 1), KeepRecent(3, at_turns=6)),
        lambda view: offload_due(view, 500, 1) or completed(view) >= 6,
        lambda view, _: offload_then_keep(view),
    ),
]
MODEL_FREE = [*WINDOWS, OFFLOAD]
ALL = [*MODEL_FREE, SUMMARIZE]
HANDS: list[Hand] = ["view", "raw", "fresh"]
FORMS: list[Form] = ["dict", "Message", "openai"]


def offload_then_keep(view: Wires) -> Wires:
    through = oracle.offloaded(view, 1, MIN_CHARS, STORE) if offload_due(view, 500, 1) else view
    return oracle.keep_turns(through, 3) if completed(view) >= 6 else through


def backend(**changes: Any) -> ScriptedBackend:
    return ScriptedBackend(answer=oracle.answer, **changes)


def conversations(kit: Kit, **changes: Any) -> st.SearchStrategy[Conversation]:
    return st.builds(
        lambda plan, hand, form, delay: converse(
            plan, kit.make(), backend=backend(delay=delay), hand=hand, form=form, **changes
        ),
        plans(),
        st.sampled_from(HANDS),
        st.sampled_from(FORMS),
        st.sampled_from([0.0, 0.5, 3.0, 20.0]),
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
    assert same(step.sent, kit.right(step.view, step.report.boundary))
    assert step.report.before_tokens == step.tokens
    assert step.report.after_tokens == oracle.total(step.sent)
    assert (step.report.before_messages, step.report.after_messages) == (len(step.view), len(step.sent))
    if not kit.model_free:
        check_summary(step, kit)


def check_summary(step: Step, kit: Kit) -> None:
    assert step.report is not None
    assert kit.hard is not None
    boundary = step.report.boundary
    assert oracle.safe(step.view, boundary)
    if step.report.kind != "sync":
        assert kit.keep <= oracle.total(step.view[boundary:]) <= 2 * kit.keep
        assert oracle.total(step.sent) < kit.hard
    else:
        assert boundary == oracle.summary_cut(step.view, summary_limit(step.view, kit.hard, kit.keep))


@every(ALL)
@given(data=st.data())
@settings(max_examples=40)
def test_every_commit_equals_the_synchronous_result(kit: Kit, data: st.DataObject) -> None:
    for step in data.draw(conversations(kit)).steps:
        check_equal(step, kit)


@every(WINDOWS)
@given(plan=plans(), hand=st.sampled_from(HANDS))
@settings(max_examples=15)
def test_where_nothing_is_waited_for_all_is_as_if_it_were_synchronous(kit: Kit, plan: Plan, hand: Hand) -> None:
    """Every way of cutting the past into segments gives the same requests as no lookahead at all."""
    beside = converse(plan, kit.make(), backend=backend(), hand=hand)
    plain = converse(plan, kit.make(), hand=hand, lookahead=False)
    assert [s.sent for s in beside.steps] == [s.sent for s in plain.steps]
    for step in beside.steps:
        assert (step.report is not None) == kit.due(step.view)


@given(plan=plans())
@settings(max_examples=15)
def test_an_untouched_message_comes_back_as_the_same_object(plan: Plan) -> None:
    conversation = converse(plan, KEEP_RECENT.make(), backend=backend())
    known: set[int] = {id(n) for n in conversation.raw}
    for step in conversation.steps:
        assert all(id(n) in known for n in step.out)


# ---- 2. Prefix -------------------------------------------------------------------------------------------------------


@every(ALL)
@given(data=st.data())
@settings(max_examples=20)
def test_each_request_extends_the_one_before_unless_it_commits(kit: Kit, data: st.DataObject) -> None:
    steps = data.draw(conversations(kit)).steps
    for before, step in itertools.pairwise(steps):
        if step.report is None:
            assert same(step.sent[: len(before.sent)], before.sent)


def warm_tokens(step: Step) -> int:
    """Tokens of the request's messages that the server held warm."""
    warm = 0
    for i, wire in enumerate(step.sent):
        tokens = tokens_of(step.sent[: i + 1])
        if step.warm[: len(tokens)] != tokens:
            break
        warm += oracle.size(wire)
    return warm


@every(ALL)
@given(data=st.data())
@settings(max_examples=20)
def test_a_commit_claims_no_warmth_that_is_not_there(kit: Kit, data: st.DataObject) -> None:
    for step in data.draw(conversations(kit)).steps:
        if step.report is not None:
            assert step.report.warmed_tokens <= warm_tokens(step)
            assert step.report.warmed_tokens <= step.report.known_tokens <= step.report.after_tokens


@given(data=st.data())
@settings(max_examples=30)
def test_a_summary_is_asked_with_the_main_streams_own_prompt(data: st.DataObject) -> None:
    """The server prefills the question only; all that was warmed is of use."""
    conversation = data.draw(conversations(SUMMARIZE))
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


STEADY = [
    (OFFLOAD, 1),
    (KEEP_RECENT, 1),
    (WINDOWS[2], 1),
    (WINDOWS[3], 1),
    (WINDOWS[4], 2),
    (SUMMARIZE, 1),
]


@pytest.mark.parametrize(("kit", "after"), STEADY, ids=lambda x: repr(x))
@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("parallel", [1, 3])
def test_a_steady_conversation_hits_every_time(kit: Kit, after: int, hand: Hand, parallel: int) -> None:
    """With time between the turns, all that was known at the last boundary is warm, from the first commits on."""
    plan = steady(40, output=390, parallel=parallel)
    conversation = converse(plan, kit.make(), backend=backend(delay=0.1), hand=hand)
    commits = [s for s in conversation.steps if s.report is not None]
    assert len(commits) > after + 2
    for step in commits[after:]:
        assert step.report is not None
        assert step.report.kind == "lookahead"
        assert step.report.warmed_tokens == step.report.known_tokens
        assert step.warm == tokens_of(step.sent)[: len(step.warm)]
        assert step.seconds == 0
    assert conversation.runtime.ledger.snapshot().mispredictions <= after


# ---- 3. No wait ------------------------------------------------------------------------------------------------------


def check_no_wait(step: Step, ceiling: int | None, bound: float) -> None:
    if step.seconds > 0:
        assert step.did(Do.WAIT, Do.SYNCHRONOUS)
        assert step.seconds <= bound
    for state, event, commands in step.moves:
        if any(c.do is Do.WAIT for c in commands):
            assert ceiling is not None
            assert step.tokens >= ceiling
        if any(c.do is Do.SYNCHRONOUS for c in commands) and state.job is not None and not step.edited:
            why = [c.why for c in commands if c.do is Do.CANCEL]
            assert why in (["waited"], ["long"])
            assert ceiling is not None
            assert step.tokens >= ceiling
        assert event is not None


def ceiling_of(kit: Kit) -> int | None:
    return kit.hard + kit.hard // 4 if kit.hard else None


@every(ALL)
@given(data=st.data())
@settings(max_examples=25)
def test_the_agent_waits_only_at_the_ceiling_or_where_nothing_was_started(kit: Kit, data: st.DataObject) -> None:
    ceiling = ceiling_of(kit)
    for step in data.draw(conversations(kit)).steps:
        check_no_wait(step, ceiling, bound=30.0 + 2 * 20.0)
        assert not any(c.why == "stale" for _, _, commands in step.moves for c in commands)
        if kit.model_free:
            assert step.seconds == 0


@every(ALL)
@given(data=st.data())
@settings(max_examples=25)
def test_no_request_reaches_the_ceiling_that_could_have_been_transformed(kit: Kit, data: st.DataObject) -> None:
    ceiling = ceiling_of(kit)
    for step in data.draw(conversations(kit)).steps:
        if ceiling is not None and step.tokens >= ceiling and step.report is None and kit.due(step.view):
            boundary = oracle.summary_cut(step.view, summary_limit(step.view, kit.hard or 0, kit.keep))
            saved = step.tokens - oracle.total(kit.right(step.view, boundary))
            # A transformation that saves less than 2% is not made, and not tried again on the same messages.
            assert saved < step.tokens * 0.02 or any(s.failures or s.barred >= 0 for s, _, _ in step.moves)


@pytest.mark.parametrize("hand", HANDS)
def test_a_late_lookahead_is_promoted_once_and_waited_for_at_the_ceiling(hand: Hand) -> None:
    server = backend(pause=lambda kind, n: 60.0 if kind == "generate" and n == 1 else None, delay=0.1)
    conversation = converse(steady(30, tool=1.0), summary(900, 250), backend=server, hand=hand)
    waits = [s for s in conversation.steps if s.did(Do.WAIT)]
    assert len(waits) == 1
    assert waits[0].tokens >= 1125
    assert 0 < waits[0].seconds <= 30.2
    assert server.promotions == 1
    uncommitted = [s for s in conversation.steps if 900 <= s.tokens < 1125 and s.report is None]
    assert uncommitted
    for step in conversation.steps:
        check_equal(step, SUMMARIZE)
        check_no_wait(step, 1125, 40.0)
    assert waits[0].report is not None
    assert oracle.total(waits[0].sent) < 900


def test_a_lookahead_that_comes_while_waiting_is_committed() -> None:
    server = backend(pause=lambda kind, n: 12.0 if kind == "generate" and n == 1 else None, delay=0.1)
    conversation = converse(steady(30, tool=1.0), summary(900, 250), backend=server)
    waited = [s for s in conversation.steps if s.did(Do.WAIT)]
    for step in waited:
        assert step.report is not None
        assert step.report.kind == "late"
        assert step.report.waited == step.seconds
    assert server.generations == len([s for s in conversation.steps if s.report is not None])
