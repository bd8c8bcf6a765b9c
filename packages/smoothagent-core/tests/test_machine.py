"""The reducer under every sequence of events: the third and sixth laws, and replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothagent.machine import (
    Boundary,
    Command,
    CommitPoint,
    Committed,
    Do,
    Event,
    Failed,
    Job,
    Stage,
    State,
    SynchronousFailed,
    Transformed,
    Warmed,
    step,
)

DIGESTS = st.sampled_from(["", "a", "b"])
PROMPTS = st.sampled_from(["p", "q"])
LENGTHS = st.integers(0, 12)
IDS = st.integers(1, 4)

BOUNDARIES = st.builds(
    Boundary,
    length=LENGTHS,
    digest=DIGESTS,
    at_job=DIGESTS,
    prompt=PROMPTS,
    wants=st.booleans(),
    promote=st.booleans(),
)
COMMIT_POINTS = st.builds(
    CommitPoint,
    length=LENGTHS,
    at_job=DIGESTS,
    prompt=PROMPTS,
    due=st.booleans(),
    tail=st.sampled_from(["short", "ok", "long"]),
    defer=st.booleans(),
    at_ceiling=st.booleans(),
    waited=st.booleans(),
    exact=st.booleans(),
    warm=st.booleans(),
    pays=st.booleans(),
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    BOUNDARIES,
    COMMIT_POINTS,
    st.builds(Transformed, id=IDS, end=LENGTHS, digest=DIGESTS),
    st.builds(Warmed, id=IDS),
    st.builds(Failed, id=IDS, length=LENGTHS),
    st.builds(Committed, length=LENGTHS, worthwhile=st.booleans()),
    st.builds(SynchronousFailed, length=LENGTHS),
)

DECISIONS = {Do.COMMIT, Do.SYNCHRONOUS, Do.WAIT, Do.PROCEED}


@dataclass(frozen=True)
class Move:
    """One step of a run."""

    before: State
    event: Event
    after: State
    commands: tuple[Command, ...]

    def did(self, what: Do) -> bool:
        return any(c.do is what for c in self.commands)


def run(events: list[Event], state: State | None = None) -> list[Move]:
    moves: list[Move] = []
    state = state or State()
    for event in events:
        after, commands = step(state, event)
        moves.append(Move(state, event, after, commands))
        state = after
    return moves


@dataclass
class World:
    """A runtime that tells the reducer only what could happen, so that runs get deep."""

    draw: Callable[[st.SearchStrategy[int]], int]
    moves: list[Move] = field(default_factory=list[Move])
    state: State = field(default_factory=State)
    length: int = 3

    def tell(self, event: Event) -> tuple[Command, ...]:
        after, commands = step(self.state, event)
        self.moves.append(Move(self.state, event, after, commands))
        self.state = after
        return commands

    def flip(self) -> bool:
        return bool(self.draw(st.integers(0, 1)))

    def at_job(self) -> str:
        return self.state.job.digest if self.state.job is not None else ""

    def lane(self) -> None:
        job = self.state.job
        choice = self.draw(st.integers(0, 5))
        if job is None or choice == 0:
            return
        if job.stage is Stage.TRANSFORMING:
            self.tell(
                Failed(job.id, self.length) if choice == 1 else Transformed(job.id, max(1, self.length - choice), "d")
            )
        elif choice > 2:
            self.tell(Warmed(job.id))

    def turn(self) -> None:
        self.length += 1
        self.lane()
        due, ceiling, exact = self.flip(), self.flip(), self.flip()
        defer, warm, pays = not exact or self.flip(), self.flip(), self.flip()
        point = CommitPoint(self.length, self.at_job(), "p", due, "ok", defer, ceiling, False, exact, warm, pays)
        commands = self.tell(point)
        if commands[-1].do is Do.WAIT:
            self.lane()
            commands = self.tell(replace(point, at_job=self.at_job(), waited=True))
        match commands[-1].do:
            case Do.COMMIT:
                self.length = max(2, self.length - 3)
                self.tell(Committed(self.length, worthwhile=self.flip()))
            case Do.SYNCHRONOUS if self.flip():
                self.tell(SynchronousFailed(self.length))
            case Do.SYNCHRONOUS:
                self.length = max(2, self.length - 3)
                self.tell(Committed(self.length, worthwhile=self.flip()))
            case _:
                pass
        for _ in range(self.draw(st.integers(0, 2))):
            self.length += self.draw(st.integers(0, 1))
            self.tell(Boundary(self.length, "v", self.at_job(), "p", wants=self.flip(), promote=self.flip()))
            self.lane()


@st.composite
def worlds(draw: st.DrawFn) -> list[Move]:
    world = World(draw)
    for _ in range(draw(st.integers(1, 12))):
        world.turn()
    return world.moves


RUNS = st.one_of(st.lists(EVENTS, max_size=40).map(run), worlds())


@given(RUNS)
def test_a_commit_point_decides_exactly_one_thing_and_last(moves: list[Move]) -> None:
    for move in moves:
        decisions = [c.do for c in move.commands if c.do in DECISIONS]
        if isinstance(move.event, CommitPoint):
            assert len(decisions) == 1
            assert move.commands[-1].do in DECISIONS
        else:
            assert decisions == []


@given(RUNS)
def test_nothing_stale_is_ever_committed(moves: list[Move]) -> None:
    for move in moves:
        if not move.did(Do.COMMIT):
            continue
        event, job = move.event, move.before.job
        assert isinstance(event, CommitPoint)
        assert job is not None
        assert job.prompt == event.prompt
        # A job that has not said yet what it covers has nothing to splice; an exact one is computed anew.
        assert (job.end <= event.length and job.digest == event.at_job) if job.end else event.exact
        assert event.exact or job.stage is not Stage.TRANSFORMING


@given(RUNS)
def test_a_stale_job_is_cancelled_at_once(moves: list[Move]) -> None:
    for move in moves:
        event, job = move.event, move.before.job
        if job is None or not isinstance(event, (Boundary, CommitPoint)):
            continue
        stale = event.prompt != job.prompt or (job.end > 0 and (event.length < job.end or event.at_job != job.digest))
        if stale:
            assert Command(Do.CANCEL, job.id, "stale") in move.commands
            assert move.after.job is None or move.after.job.id != job.id


@given(RUNS)
def test_due_with_nothing_started_is_synchronous_as_the_built_in(moves: list[Move]) -> None:
    for move in moves:
        event = move.event
        if not isinstance(event, CommitPoint) or not event.due or event.length <= move.before.barred:
            continue
        if move.before.job is None:
            assert [c.do for c in move.commands] == [Do.SYNCHRONOUS]


@given(RUNS)
def test_not_due_never_does_anything_to_the_history(moves: list[Move]) -> None:
    for move in moves:
        if isinstance(move.event, CommitPoint) and not move.event.due:
            assert move.commands[-1].do is Do.PROCEED


@given(RUNS)
def test_ready_and_fresh_is_committed(moves: list[Move]) -> None:
    for move in moves:
        event, job = move.event, move.before.job
        if not isinstance(event, CommitPoint) or not event.due or event.length <= move.before.barred:
            continue
        if event.exact and event.pays and event.defer and not event.at_ceiling:
            continue  # ready, but for a later turn
        if job is not None and job.stage is Stage.READY and event.tail == "ok" and not move.did(Do.CANCEL):
            assert move.commands == (Command(Do.COMMIT, job.id),)


@given(RUNS)
def test_in_flight_goes_on_uncommitted_below_the_ceiling(moves: list[Move]) -> None:
    for move in moves:
        event, job = move.event, move.before.job
        if not isinstance(event, CommitPoint) or not event.due or event.length <= move.before.barred:
            continue
        if job is None or job.stage is not Stage.TRANSFORMING or move.did(Do.CANCEL) or event.at_ceiling:
            continue
        if not event.exact or (event.defer and event.pays):
            assert move.commands[-1] == Command(Do.PROCEED, job.id, "in flight")
            assert move.after.job is not None
            assert move.after.job.promoted


@given(RUNS)
def test_each_job_is_started_and_promoted_at_most_once(moves: list[Move]) -> None:
    started = [c.job for m in moves for c in m.commands if c.do is Do.START]
    promoted = [c.job for m in moves for c in m.commands if c.do is Do.PROMOTE]
    assert started == sorted(set(started))
    assert len(promoted) == len(set(promoted))
    assert set(promoted) <= set(started)


@given(RUNS)
def test_waiting_is_for_the_ceiling_only_and_only_once(moves: list[Move]) -> None:
    for move in moves:
        event = move.event
        if isinstance(event, CommitPoint):
            if move.did(Do.WAIT):
                assert event.at_ceiling
                assert not event.waited
                assert event.due
            if event.waited and event.at_ceiling and event.due and event.length > move.before.barred:
                # After the bounded wait the agent gets its transformation, one way or the other.
                assert move.commands[-1].do in (Do.COMMIT, Do.SYNCHRONOUS)


@given(RUNS)
def test_a_dropped_job_is_cancelled_unless_it_ended_by_itself(moves: list[Move]) -> None:
    for move in moves:
        before, after = move.before.job, move.after.job
        if before is None or (after is not None and after.id == before.id):
            continue
        assert move.did(Do.CANCEL) or isinstance(move.event, (Failed, Committed, SynchronousFailed))


@given(RUNS)
def test_a_barred_history_is_not_tried_again_without_new_tokens(moves: list[Move]) -> None:
    failed_at = -1
    for move in moves:
        event = move.event
        if isinstance(event, (Boundary, CommitPoint)) and event.length < failed_at:
            failed_at = -1  # a shorter history is another one
        if isinstance(event, (Boundary, CommitPoint)) and event.length == failed_at:
            assert not move.did(Do.START)
            assert not move.did(Do.SYNCHRONOUS)
            assert not move.did(Do.COMMIT)
        match event:
            case Failed(id=job, length=length) if move.before.job is not None and move.before.job.id == job:
                failed_at = length
            case SynchronousFailed(length=length) | Committed(length=length, worthwhile=False):
                failed_at = length
            case Committed():
                failed_at = -1
            case _:
                pass


@given(RUNS)
def test_what_a_job_tells_after_it_was_dropped_changes_nothing(moves: list[Move]) -> None:
    for move in moves:
        if isinstance(move.event, (Transformed, Warmed, Failed)):
            job = move.before.job
            if job is None or job.id != move.event.id:
                assert move.after == move.before
                assert move.commands == ()


@given(RUNS)
def test_an_extension_needs_something_new(moves: list[Move]) -> None:
    for move in moves:
        if move.did(Do.EXTEND):
            assert isinstance(move.event, Boundary) or (isinstance(move.event, CommitPoint) and not move.event.due)
            assert move.before.job is not None
            assert move.event.length > move.before.job.seen
        if isinstance(move.event, Boundary) and move.did(Do.START):
            assert move.event.wants


@given(RUNS)
def test_a_saved_log_replays_to_the_same_states(moves: list[Move]) -> None:
    log = json.dumps([move.event.encode() for move in moves])
    replayed = run([Event.decode(data) for data in json.loads(log)])
    assert replayed == moves


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown event"):
        step(State(), Event())
    with pytest.raises(KeyError):
        Event.decode({"event": "Nonsense"})


def ready(end: int = 4) -> State:
    return State(Job(1, end, "d", "p", 6, Stage.READY), next_id=2)


def test_the_whole_life_of_a_lookahead() -> None:
    moves = run(
        [
            Boundary(6, "h6", "", "p", wants=True),
            Transformed(1, 4, "h4"),
            Boundary(8, "h8", "h4", "p", wants=False),
            Warmed(1),
            CommitPoint(9, "h4", "p", due=False, follows=True),
            CommitPoint(9, "h4", "p", due=True, warm=True),
            Committed(6),
        ]
    )
    assert [[c.do for c in m.commands] for m in moves] == [
        [Do.START],
        [],
        [Do.EXTEND],
        [],
        [Do.EXTEND, Do.PROCEED],
        [Do.COMMIT],
        [],
    ]
    assert moves[-1].after == State(None, 2)


def test_more_to_warm_makes_a_ready_job_warm_again() -> None:
    state, commands = step(ready(), Boundary(8, "v", "d", "p", wants=False))
    assert [c.do for c in commands] == [Do.EXTEND]
    assert state.job is not None
    assert state.job.stage is Stage.WARMING


def test_late_at_the_ceiling_means_wait_once_then_synchronous() -> None:
    state, _ = step(State(), Boundary(6, "v", "", "p", wants=True))
    point = CommitPoint(9, "", "p", due=True, at_ceiling=True)
    state, commands = step(state, point)
    assert [c.do for c in commands] == [Do.PROMOTE, Do.WAIT]
    state, commands = step(state, replace(point, waited=True))
    assert [(c.do, c.why) for c in commands] == [(Do.CANCEL, "waited"), (Do.SYNCHRONOUS, "waited")]
    assert state.job is None


def test_a_result_that_is_there_but_partly_cold_is_taken_at_the_ceiling() -> None:
    warming = State(Job(1, 4, "d", "p", 6, Stage.WARMING), next_id=2)
    _, commands = step(warming, CommitPoint(9, "d", "p", due=True, at_ceiling=True))
    assert commands[-1] == Command(Do.COMMIT, 1, "late")


def test_bounded_staleness_redoes_a_result_that_leaves_too_much() -> None:
    state, commands = step(ready(), CommitPoint(9, "d", "p", due=True, tail="long"))
    assert [c.do for c in commands] == [Do.CANCEL, Do.PROCEED]
    assert state.job is None
    _, commands = step(ready(), CommitPoint(9, "d", "p", due=True, tail="long", at_ceiling=True))
    assert [c.do for c in commands] == [Do.CANCEL, Do.SYNCHRONOUS]


def test_a_short_tail_waits_for_more() -> None:
    state, commands = step(ready(), CommitPoint(9, "d", "p", due=True, tail="short"))
    assert [c.do for c in commands] == [Do.PROCEED]
    assert state == ready()


def test_a_short_tail_is_never_committed() -> None:
    """At the ceiling it is redone, as one that is too long is: the synchronous cut leaves enough."""
    _, commands = step(ready(), CommitPoint(9, "d", "p", due=True, tail="short", at_ceiling=True))
    assert [c.do for c in commands] == [Do.CANCEL, Do.SYNCHRONOUS]
    started, _ = step(State(), Boundary(6, "v", "", "p", wants=True))
    _, commands = step(started, CommitPoint(9, "", "p", due=True, tail="short", at_ceiling=True))
    assert [c.do for c in commands] == [Do.CANCEL, Do.SYNCHRONOUS]


def test_failures_in_a_row_wait_for_more_and_more_messages() -> None:
    state, gaps = State(), list[int]()
    length = 10
    for _ in range(7):
        state, _ = step(state, SynchronousFailed(length))
        gaps.append(state.barred - length)
    assert gaps == sorted(gaps)
    assert gaps[0] == 0  # one new message is enough after the first
    assert gaps[-1] <= 64
    state, _ = step(state, Committed(5))
    assert (state.failures, state.barred) == (0, -1)


def test_at_the_ceiling_new_messages_are_tried_whatever_failed_before() -> None:
    """Going on above the ceiling would lose a request that the plain framework would have made fit."""
    state = State()
    for length in (10, 12, 14, 16):
        state, _ = step(state, SynchronousFailed(length))
    _, commands = step(state, CommitPoint(18, "", "p", due=True, at_ceiling=True))
    assert [c.do for c in commands] == [Do.SYNCHRONOUS]


def test_a_commit_that_saved_too_little_is_not_repeated_on_the_same_history() -> None:
    state, _ = step(State(), Committed(8, worthwhile=False))
    assert step(state, CommitPoint(8, "", "p", due=True))[1] == (Command(Do.PROCEED),)
    assert step(state, Boundary(8, "v", "", "p", wants=True))[1] == ()
    assert step(state, CommitPoint(9, "", "p", due=True))[1][-1].do is Do.SYNCHRONOUS


def test_the_bar_is_of_one_history_not_of_a_shorter_one() -> None:
    """A conversation that is forked or cut short is another one: it was never tried."""
    state, _ = step(State(), SynchronousFailed(40))
    _, commands = step(state, CommitPoint(12, "", "p", due=True))
    assert [c.do for c in commands] == [Do.SYNCHRONOUS]
    _, commands = step(state, Boundary(12, "v", "", "p", wants=True))
    assert [c.do for c in commands] == [Do.START]
