"""The lookahead state machine of one conversation: a pure reducer.

``step(state, event) -> (state, commands)``: no clock, no I/O. The runtime gathers facts into events,
carries the commands out, and may write the events to a log from which everything replays.

::

              Boundary(wants)                  Transformed             Warmed
      idle ───────────────────> transforming ─────────────> warming ──────────> ready
       ^                             │                         ^  Boundary(extends) │
       │  Failed, Stale, Committed,  │                         └────────────────────┘
       └────────── Cancel <──────────┴─────────────────────────────────┘

At a commit point that is due (the law, 3): ready and fresh: ``Commit``. Nothing started:
``Synchronous``. In flight: ``Promote`` and ``Proceed`` uncommitted, until it is ready or the ceiling
is reached; only there ``Wait``, for a bounded time; after that ``Synchronous``. A result that is
computed anew at the commit is in flight only while waiting pays: while its warmth is for a later
turn, or grows without being overtaken by the cut.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """Where a lookahead job is."""

    TRANSFORMING = "transforming"
    WARMING = "warming"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Job:
    """One lookahead, bound to the history it covers.

    Attributes:
        id: number of the job in its conversation.
        end: length of the history it covers, 0 while not known yet.
        digest: digest of that history; a result is bound to it (the law, 6).
        prompt: digest of the prompt it was prepared for.
        seen: length of the history at the last boundary it was told of.
        stage: where it is.
        promoted: it was raised to latency-critical.
    """

    id: int
    end: int
    digest: str
    prompt: str
    seen: int
    stage: Stage = Stage.TRANSFORMING
    promoted: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """State of one conversation.

    Attributes:
        job: the lookahead in flight or ready.
        next_id: number of the next job.
        failed: history length at which the last attempt failed or saved too little; nothing is
            tried again without new messages. -1: none did.
        barred: history length above which it is tried again before the ceiling forces it.
        failures: attempts that failed in a row; each doubles the messages to wait.
        stale: jobs in a row that were for another history by the time they were looked at; after `MOST_STALE` of
            them nothing is prepared until a commit has been made.
    """

    job: Job | None = None
    next_id: int = 1
    failed: int = -1
    barred: int = -1
    failures: int = 0
    stale: int = 0


MOST_STALE = 4
"""Jobs in a row that may be in vain, as where something at the beginning of the history changes on every turn."""


class Event:
    """Base of all events; ``encode`` and ``decode`` write and read a log."""

    def encode(self) -> dict[str, Any]:
        """The event as JSON-ready data."""
        return {"event": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def decode(data: dict[str, Any]) -> Event:
        """The event that ``encode`` wrote. Raises KeyError for an unknown one."""
        fields = dict(data)
        kind = _EVENTS[fields.pop("event")]
        if kind is Restored:
            state: dict[str, Any] = dict(fields["state"])
            job: dict[str, Any] | None = state.pop("job")
            if job is not None:
                job = dict(job)
                job["stage"] = Stage(str(job["stage"]))
                state["job"] = Job(**job)
            return Restored(State(**state))
        return kind(**fields)


@dataclass(frozen=True, slots=True)
class Boundary(Event):
    """A segment boundary.

    Attributes:
        length: messages in the view.
        digest: digest of the whole view.
        at_job: digest of the view's first ``job.end`` messages ("" where it is shorter).
        prompt: digest of the prompt.
        wants: the strategy's ``should_lookahead``.
        promote: the strategy's ``should_promote``.
    """

    length: int
    digest: str
    at_job: str
    prompt: str
    wants: bool
    promote: bool = False


@dataclass(frozen=True, slots=True)
class CommitPoint(Event):
    """The agent is about to call its model.

    Attributes:
        length: messages in the view.
        at_job: digest of the view's first ``job.end`` messages ("" where it is shorter).
        prompt: digest of the prompt.
        due: the strategy's ``should_commit``.
        tail: whether the prepared result leaves ``short``, ``ok`` or ``long`` verbatim.
        defer: the strategy lets a commit wait for a lookahead in flight.
        at_ceiling: the uncommitted request would reach the ceiling.
        waited: a bounded wait has just ended.
        exact: the result is computed anew at the commit: only its warmth may be stale or late.
        warm: what is still cold of the prepared prefix is not worth waiting for.
        pays: waiting a turn would leave much less of an exact result cold.
        follows: work beside the coming answer costs the agent nothing.
    """

    length: int
    at_job: str
    prompt: str
    due: bool
    tail: str = "ok"
    defer: bool = True
    at_ceiling: bool = False
    waited: bool = False
    exact: bool = False
    warm: bool = False
    pays: bool = False
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A job that has just begun will cover ``end`` messages with ``digest``: what it makes of another is stale."""

    id: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class Transformed(Event):
    """A job's transformation is done; it covers ``end`` messages with ``digest``."""

    id: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class Warmed(Event):
    """A job has nothing left to prefill."""

    id: int


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A job's transformation failed; the history had ``length`` messages."""

    id: int
    length: int


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """A view was spliced in; ``length`` messages remain. ``worthwhile``: it saved enough."""

    length: int
    worthwhile: bool = True


@dataclass(frozen=True, slots=True)
class SynchronousFailed(Event):
    """A synchronous transformation failed and the history of ``length`` messages was kept."""

    length: int


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """The state is ``state``, whatever it was: after a rest or a fork, and where a log that was cut begins."""

    state: State


_EVENTS = {
    e.__name__: e
    for e in (
        *(Boundary, CommitPoint, Planned, Transformed, Warmed, Failed, Committed, SynchronousFailed),
        Restored,
    )
}


class Do(StrEnum):
    """What a command asks of the runtime."""

    START = "start"
    EXTEND = "extend"
    PROMOTE = "promote"
    CANCEL = "cancel"
    COMMIT = "commit"
    SYNCHRONOUS = "synchronous"
    WAIT = "wait"
    PROCEED = "proceed"


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do. ``why`` says why, for logs: stale, long, late, waited and so on."""

    do: Do
    job: int = 0
    why: str = ""


Commands = tuple[Command, ...]


def step(state: State, event: Event) -> tuple[State, Commands]:
    """The next state and what to do."""
    match event:
        case Boundary():
            return _boundary(state, event)
        case CommitPoint():
            return _commit_point(state, event)
        case Planned(id=job_id, end=end, digest=digest):
            return _progress(state, job_id, end=end, digest=digest)
        case Transformed(id=job_id, end=end, digest=digest):
            return _progress(state, job_id, stage=Stage.WARMING, end=end, digest=digest)
        case Warmed(id=job_id):
            return _progress(state, job_id, stage=Stage.READY)
        case Failed(id=job_id, length=length):
            if state.job is None or state.job.id != job_id:
                return state, ()
            return _bar(replace(state, job=None), length), ()
        case Committed(worthwhile=True):
            # After one that was made on the critical path one more is tried.
            stale = 0 if state.job is not None else max(0, state.stale - 1)
            return replace(state, job=None, failures=0, failed=-1, barred=-1, stale=stale), ()
        case Restored(state=restored):
            return restored, ()
        case SynchronousFailed(length=length) | Committed(length=length):
            return _bar(replace(state, job=None), length), ()
        case _:
            raise TypeError(f"unknown event {event!r}")


def _fresh(state: State, event: Boundary | CommitPoint) -> tuple[State, list[Command]]:
    """The state for this history: a bar of another is lifted, a job for another is cancelled."""
    state = _unbarred(state, event.length)
    job = state.job
    if job is None or not _stale(job, event.at_job, event.prompt, event.length):
        # One that lasted until a commit point was not in vain.
        return (replace(state, stale=0) if job is not None and isinstance(event, CommitPoint) else state), []
    return replace(state, job=None, stale=state.stale + 1), [Command(Do.CANCEL, job.id, "stale")]


def _boundary(state: State, event: Boundary) -> tuple[State, Commands]:
    state, commands = _fresh(state, event)
    job = state.job
    if job is None:
        if event.wants and event.length > state.barred and state.stale < MOST_STALE:
            job = Job(state.next_id, 0, "", event.prompt, event.length)
            state = replace(state, job=job, next_id=job.id + 1)
            commands.append(Command(Do.START, job.id))
    else:
        state, more = _extended(state, event.length)
        commands += more
        job = state.job
    if job is not None and event.promote and not job.promoted:
        state = replace(state, job=replace(job, promoted=True))
        commands.append(Command(Do.PROMOTE, job.id))
    return state, tuple(commands)


def _extended(state: State, length: int) -> tuple[State, Commands]:
    """The job is told where the history has grown."""
    job = state.job
    if job is None or length <= job.seen:
        return state, ()
    stage = Stage.WARMING if job.stage is Stage.READY else job.stage
    job = replace(job, seen=length, stage=stage)
    return replace(state, job=job), (Command(Do.EXTEND, job.id),)


def _commit_point(state: State, event: CommitPoint) -> tuple[State, Commands]:
    state, commands = _fresh(state, event)
    job = state.job
    ready = job is not None and (job.stage is Stage.READY or (job.stage is Stage.WARMING and event.warm))
    if not event.due:
        # What has come since the boundary (the user's message) is known now, and can be warmed beside the answer.
        state, more = _extended(state, event.length) if event.follows else (state, ())
        return state, (*commands, *more, Command(Do.PROCEED))
    if event.length <= (state.failed if event.at_ceiling else state.barred):
        return state, (*commands, Command(Do.PROCEED))
    if job is None:
        return state, (*commands, Command(Do.SYNCHRONOUS, why="nothing started"))
    if event.exact:
        if event.pays and event.defer and not event.at_ceiling:
            return _in_flight(state, job, event, commands)
        return state, (*commands, Command(Do.COMMIT, job.id, "" if ready else "late"))
    if event.tail == "long" or (event.tail == "short" and event.at_ceiling):
        # Bounded staleness: the result would leave too much or too little verbatim, so it is made anew.
        commands.append(Command(Do.CANCEL, job.id, event.tail))
        state = replace(state, job=None)
        return state, (*commands, Command(Do.SYNCHRONOUS if event.at_ceiling else Do.PROCEED, why=event.tail))
    if ready and event.tail == "short":
        return state, (*commands, Command(Do.PROCEED, why="short tail"))
    if ready:
        return state, (*commands, Command(Do.COMMIT, job.id))
    return _in_flight(state, job, event, commands)


def _in_flight(state: State, job: Job, event: CommitPoint, commands: list[Command]) -> tuple[State, Commands]:
    if not job.promoted:
        job = replace(job, promoted=True)
        state = replace(state, job=job)
        commands.append(Command(Do.PROMOTE, job.id))
    if not event.at_ceiling:
        return state, (*commands, Command(Do.PROCEED, job.id, "in flight"))
    if job.stage is Stage.WARMING:
        # The result is there and only partly warm: still better than one token more of the old view.
        return state, (*commands, Command(Do.COMMIT, job.id, "late"))
    if not event.waited:
        return state, (*commands, Command(Do.WAIT, job.id))
    commands.append(Command(Do.CANCEL, job.id, "waited"))
    return replace(state, job=None), (*commands, Command(Do.SYNCHRONOUS, why="waited"))


def _progress(state: State, job_id: int, **changes: Any) -> tuple[State, Commands]:
    job = state.job
    if job is None or job.id != job_id:
        return state, ()  # a late answer of a cancelled job
    return replace(state, job=replace(job, **changes)), ()


def _stale(job: Job, at_job: str, prompt: str, length: int) -> bool:
    if job.prompt != prompt:
        return True
    return job.end > 0 and (length < job.end or at_job != job.digest)


def _bar(state: State, length: int) -> State:
    failures = state.failures + 1
    return replace(state, failures=failures, failed=length, barred=length + min(2**failures, 64) - 2)


def _unbarred(state: State, length: int) -> State:
    """A bar is of one history: a shorter one is another."""
    return replace(state, failures=0, failed=-1, barred=-1) if length < state.failed else state
