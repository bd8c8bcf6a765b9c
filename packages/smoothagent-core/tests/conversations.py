"""Generated agents: their turns, and what a runtime made of each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

import oracle
from oracle import Wires
from scripted import CharCounter, ScriptedBackend
from smoothagent import (
    READ_OFFLOADED_TOOL,
    CommitReport,
    LookaheadRuntime,
    LookaheadStrategy,
    Message,
    Prompt,
    ToolCall,
)
from smoothagent.lane import LoopLane
from smoothagent.machine import Command, CommitPoint, Event, State, step
from virtual_clock import run_virtual

Hand = Literal["view", "raw", "fresh"]
"""What the harness hands in: the returned list, the whole raw history, or that parsed anew each time."""

Form = Literal["dict", "Message", "openai"]


@dataclass(frozen=True)
class Call:
    id: str
    arguments: str
    result: str
    seconds: float


@dataclass(frozen=True)
class Turn:
    """One turn; ``hooks`` says how often the boundary hook is called: calls known, in between, results there."""

    user: str | None
    role: str
    text: str | None
    calls: tuple[Call, ...]
    think: float
    hooks: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    system: tuple[tuple[str, str], ...]
    turns: tuple[Turn, ...]


def _texts(letter: str, sizes: Sequence[int]) -> st.SearchStrategy[str]:
    return st.sampled_from([letter * n for n in sizes])


SECONDS = st.sampled_from([0.0, 0.1, 1.0, 5.0])


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    count = draw(st.sampled_from([0, 1, 1, 1, 2, 3]))
    # Some frameworks use a call's place as its id, so every turn has the same ones.
    first = draw(st.integers(0, 3))
    calls = tuple(
        Call(f"c{first + k}", draw(_texts("g", [2, 20])), draw(_texts("r", [0, 30, 150, 260, 400])), draw(SECONDS))
        for k in range(count)
    )
    user = draw(st.one_of(st.none(), _texts("u", [1, 40, 90]))) if count else draw(_texts("u", [5, 60]))
    role = draw(st.sampled_from(["user", "user", "user", "user", "system"]))
    text = draw(st.one_of(st.none(), _texts("a", [0, 30, 100])))
    hooks = (draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(0, 3)))
    return Turn(user, role, text if calls or text else "done", calls, draw(SECONDS), hooks)


@st.composite
def plans(draw: st.DrawFn, *, max_turns: int = 14) -> Plan:
    system = draw(
        st.lists(st.tuples(st.sampled_from(["system", "developer"]), _texts("s", [10, 80])), max_size=2).map(tuple)
    )
    rest = draw(st.lists(turns(), min_size=1, max_size=max_turns))
    first = rest[0] if rest[0].user else Turn("task", "user", *_after_role(rest[0]))
    return Plan(system, (Turn(first.user, "user", *_after_role(first)), *rest[1:]))


def _after_role(turn: Turn) -> tuple[str | None, tuple[Call, ...], float, tuple[int, int, int]]:
    return turn.text, turn.calls, turn.think, turn.hooks


def steady(count: int, *, output: int = 150, tool: float = 2.0, think: float = 0.5, parallel: int = 1) -> Plan:
    """A task and then turns of one size: what comes next is easy to predict. No two turns are alike."""

    def turn(number: int, user: str | None = None) -> Turn:
        results = [f"{number:3}.{k} " + "r" * (output // parallel - 6) for k in range(parallel)]
        calls = tuple(Call(f"c{k}", "g" * 20, results[k], tool) for k in range(parallel))
        return Turn(user, "user", "a" * 30, calls, think, (1, 0, 1))

    return Plan((("system", "s" * 50),), (turn(0, "u" * 50), *map(turn, range(1, count))))


# -- messages in a framework's clothes ---------------------------------------------------------------------------------


def dressed(wire: dict[str, Any], form: Form) -> Any:
    """The same message as a dict, a `Message`, or (answers only) the openai client's own object."""
    if form == "Message":
        calls = tuple(
            ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in oracle.calls_of(wire)
        )
        return Message(wire["role"], wire["content"], calls, wire.get("tool_call_id"))
    if form == "openai" and wire["role"] == "assistant":
        return ChatCompletionMessage.model_validate(wire)
    return wire


def wire_of(native: Any) -> dict[str, Any]:
    """A deep copy of the wire mapping of any of them."""
    if isinstance(native, Message):
        return native.wire()
    if isinstance(native, dict):
        out = dict(cast("dict[str, Any]", native))
        if out.get("tool_calls"):
            # Much faster than copy.deepcopy, which most of the tests' time would go to.
            out["tool_calls"] = [{**c, "function": dict(c["function"])} for c in oracle.calls_of(out)]
        return out
    return {"content": None, **native.model_dump(exclude_none=True)}


def wires_of(natives: Sequence[Any]) -> Wires:
    return [wire_of(n) for n in natives]


def same(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> bool:
    """Equal but for ids, which frameworks mint and rewrite."""
    return list(map(_without_ids, left)) == list(map(_without_ids, right))


def _without_ids(wire: dict[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in wire.items() if k != "tool_call_id"}
    if out.get("tool_calls"):
        out["tool_calls"] = [c["function"] for c in out["tool_calls"]]
    return out


Move = tuple[State, Event, tuple[Command, ...]]
"""State before, event, commands."""


# -- what happened -----------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class Step:
    """One commit hook.

    Attributes:
        view: the view it should work on, followed independently of the runtime.
        out: the list it returned.
        sent: that list on the wire, as it was then.
        report: the commit it made, or None.
        seconds: virtual time spent in it.
        moves: the reducer's events in it, with the state before each and the commands.
        warm: tokens the server held warm for the conversation's lookahead stream.
        edited: the history was changed behind the runtime's back just before.
    """

    turn: int
    given: list[Any]
    view: Wires
    out: list[Any]
    sent: Wires
    report: CommitReport | None
    seconds: float
    moves: list[Move]
    warm: list[str]
    edited: bool = False

    @property
    def tokens(self) -> int:
        return oracle.total(self.view)

    @property
    def point(self) -> CommitPoint:
        event = next(e for _, e, _ in self.moves if isinstance(e, CommitPoint))
        assert isinstance(event, CommitPoint)
        return event

    def did(self, *what: str) -> bool:
        return any(c.do in what for _, _, commands in self.moves for c in commands)


def moves_of(events: Sequence[dict[str, Any]], state: State | None = None) -> list[Move]:
    """Replay a log."""
    state, out = state or State(), list[Move]()
    for data in events:
        event = Event.decode(dict(data))
        after, commands = step(state, event)
        out.append((state, event, commands))
        state = after
    return out


@dataclass(repr=False)
class Conversation:
    """Drives one agent through a plan, under a virtual clock.

    ``before_commit`` runs just before each commit hook and may edit ``raw`` and ``view``.
    """

    runtime: LookaheadRuntime[Any]
    backend: ScriptedBackend | None = None
    hand: Hand = "view"
    form: Form = "dict"
    steps: list[Step] = field(default_factory=list[Step])
    raw: list[Any] = field(default_factory=list[Any])
    view: list[Any] = field(default_factory=list[Any])
    before_commit: Callable[[Conversation, int], bool] = lambda conversation, turn: False
    patience: Callable[[int], float | None] = lambda turn: None
    gave_up: list[int] = field(default_factory=list[int])
    prompt: Prompt | None = None
    covered: int = 0
    head: int = 0
    replayed: int = 0
    state: State = field(default_factory=State)

    def add(self, wire: dict[str, Any]) -> None:
        native = dressed(wire, self.form)
        self.raw.append(native)
        self.view.append(native)

    def given(self) -> list[Any]:
        if self.hand == "view":
            return self.view
        return self.raw if self.hand == "raw" else [dressed(wire_of(n), self.form) for n in self.raw]

    def boundary(self) -> None:
        given = self.given()
        before = list(given), wires_of(given)
        self.runtime.on_segment_boundary(given, prompt=self.prompt)
        assert (list(given), wires_of(given)) == before

    async def commit(self, turn: int) -> Step:
        edited = self.before_commit(self, turn)
        given, clock = self.given(), asyncio.get_running_loop().time
        before, wires, expected = list(given), wires_of(given), wires_of(self.view)
        last, began = self.runtime.last_commit, clock()
        out = await self.ask(given, turn)
        warm = list(self.backend.warm.get(self.runtime.session, [])) if self.backend is not None else []
        # The law, 7: neither the list nor what is in it was touched, and the answer is a list of its own.
        assert all(a is b for a, b in zip(given, before, strict=True))
        assert wires_of(given) == wires
        assert out is not given
        report = self.runtime.last_commit if self.runtime.last_commit is not last else None
        moves = self.replay()
        made = Step(
            turn, before, expected, list(out), wires_of(out), report, clock() - began, moves, warm, edited=edited
        )
        self.steps.append(made)
        self.follow(made)
        return made

    def replay(self) -> list[Move]:
        """The reducer's moves from this hook's commit point on."""
        events = self.runtime.events
        moves = moves_of(events[self.replayed :], self.state)
        if moves:
            self.state = step(moves[-1][0], moves[-1][1])[0]
        self.replayed = len(events)
        return list(itertools.dropwhile(lambda move: not isinstance(move[1], CommitPoint), moves))

    async def ask(self, given: list[Any], turn: int) -> list[Any]:
        """Call the hook, and once more where patience ended."""
        patience = self.patience(turn)
        if patience is not None:
            asking = asyncio.ensure_future(self.runtime.aon_commit(given, prompt=self.prompt))
            await asyncio.wait({asking}, timeout=patience)
            if not asking.done():
                self.gave_up.append(turn)
                asking.cancel()
                await asyncio.wait({asking})
                assert asking.cancelled()
            else:
                return asking.result()
        return await self.runtime.aon_commit(given, prompt=self.prompt)

    def edited_at(self, index: int) -> None:
        """What the view is after the history handed in was changed at ``index``."""
        if self.hand == "view":
            return
        if index < self.covered:
            self.covered = self.head = 0
            self.view = list(self.raw)
        else:
            self.view = [*self.view[: self.head], *self.raw[self.covered :]]

    def follow(self, made: Step) -> None:
        """Note what the raw history's covered part and its head are now."""
        if made.report is not None:
            # What a call and its results are parted by is recorded with them.
            boundary = next(
                (c for c in range(made.report.boundary, len(made.view) + 1) if oracle.safe(made.view, c)),
                made.report.boundary,
            )
            self.covered = self.covered + boundary - self.head if boundary >= self.head else self.covered
            self.head = len(made.out) - (len(self.raw) - self.covered)
        self.view = list(made.out)

    async def run(self, plan: Plan) -> list[Step]:
        for role, text in plan.system:
            self.add({"role": role, "content": text})
        for number, turn in enumerate(plan.turns):
            await self.take(number, turn)
        return self.steps

    async def take(self, number: int, turn: Turn) -> None:
        if turn.user is not None:
            self.add({"role": turn.role, "content": turn.user + str(number)})
        await self.commit(number)
        async with self.runtime.main_request():
            await asyncio.sleep(turn.think)
        assistant: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.calls:
            assistant["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": "sed", "arguments": c.arguments}}
                for c in turn.calls
            ]
        self.add(assistant)
        self.hook(turn.hooks[0])
        for k, call in enumerate(turn.calls):
            await asyncio.sleep(call.seconds)
            self.add({"role": "tool", "tool_call_id": call.id, "content": call.result})
            if k + 1 < len(turn.calls):
                self.hook(turn.hooks[1])
        self.hook(turn.hooks[2])

    def hook(self, times: int) -> None:
        for _ in range(times):
            self.boundary()


PROMPT = Prompt(model="m", tools=[READ_OFFLOADED_TOOL])


def runtime_of(
    strategy: LookaheadStrategy, backend: ScriptedBackend | None, prompt: Prompt = PROMPT, **more: Any
) -> LookaheadRuntime[Any]:
    """A runtime that lives on the running (virtual) loop and counts characters."""
    lane = LoopLane(asyncio.get_running_loop())
    return LookaheadRuntime(strategy, backend=backend, tokens=CharCounter(), lane=lane, prompt=prompt, **more)


def converse(
    plan: Plan,
    strategy: LookaheadStrategy,
    *,
    backend: ScriptedBackend | None = None,
    hand: Hand = "view",
    form: Form = "dict",
    before_commit: Callable[[Conversation, int], bool] = lambda conversation, turn: False,
    patience: Callable[[int], float | None] = lambda turn: None,
    prompt: Prompt = PROMPT,
    **more: Any,
) -> Conversation:
    """Run a whole conversation on a virtual clock and close it; ``more`` goes to the runtime."""

    async def main() -> Conversation:
        runtime = runtime_of(strategy, backend, prompt, **more)
        conversation = Conversation(runtime, backend, hand, form, before_commit=before_commit, patience=patience)
        await conversation.run(plan)
        await runtime.aclose()
        for _ in range(5):
            await asyncio.sleep(0)
        assert backend is None or backend.running == 0
        return conversation

    return run_virtual(main())
