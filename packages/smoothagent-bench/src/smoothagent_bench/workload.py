"""The paper's workload (section 6.1), scaled to the served model's window, and one agent's script of it.

An agent analyses a code base in 28 steps. Each step adds 600–650 tokens: a short user message, the output of
a real ``head``, ``sed`` or ``tail`` command, and the model's analysis. What the agent decides is scripted, so
that all modes see the same conversation; what it runs and what the model writes is real.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, ToolCall
from smoothagent_bench import tool
from smoothagent_bench.sources import Read, Reader
from smoothagent_bench.tokens import ServerTokens, wire_message

PAPER_WINDOW = 32_768
"""Window of the paper's models, in tokens; all its sizes are given for it."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a task is handed to a sub-agent. Sizes in tokens, times in turns counted from 0.

    Attributes:
        opens_at: the main agent decides to delegate, and the sub-agent begins to read.
        reads: how many commands the sub-agent reads its part of the code base with, one a turn.
        read_tokens: what they bring in total.
        delegates_at: the main agent writes the instruction.
        system_tokens: the sub-agent's own system prompt.
        instruction_tokens: length of the instruction.
    """

    opens_at: int
    reads: int
    read_tokens: int
    delegates_at: int
    system_tokens: int
    instruction_tokens: int


@dataclass(frozen=True, slots=True)
class Profile:
    """All sizes of a workload. Tokens, unless said otherwise.

    Attributes:
        name: ``paper`` or ``demo``.
        scale: served window over the paper's.
        steps: turns of a run.
        step: what a step adds.
        user: its user message at most.
        reply: the model's reply, exactly.
        hard: trigger of summarize, and
        offload_hard: of offload: high enough that what one offload saves lasts for some turns.
        soft: where summarize begins to prepare.
        keep: what summarize leaves verbatim.
        summary: length of a summary at most.
        offload_step: what a step adds under offload, and
        offload_reply: the reply in it. A reference costs about 35 tokens at any scale, so at a small scale the
            paper's split would leave nothing to offload. There a step is mostly output, so that the first
            offload about halves the context, as it does in the paper (section 6.2, Figure 12).
        keep_outputs: newest tool outputs that offload leaves alone.
        keep_turns: turns that keep-recent keeps.
        at_turns: turns that trigger keep-recent.
        window_turns: turns of the sliding window.
        isolation: how isolate hands over.
    """

    name: str
    scale: float
    steps: int
    step: int
    user: int
    reply: int
    hard: int
    offload_hard: int
    soft: int
    keep: int
    summary: int
    offload_step: int
    offload_reply: int
    keep_outputs: int
    keep_turns: int
    at_turns: int
    window_turns: int
    isolation: Isolation

    def sizes_for(self, kind: str) -> tuple[int, int]:
        """Tokens of a step and of its reply under a strategy."""
        return (self.offload_step, self.offload_reply) if kind == "offload" else (self.step, self.reply)


def paper_profile(window: int) -> Profile:
    """The paper's sizes times ``window / 32768``, at most once its sizes.

    Raises:
        ConfigurationError: a window in which no step would have room.
    """
    if window < PAPER_WINDOW // 8:
        raise ConfigurationError(
            f"the server's window is {window} tokens: the workload needs at least {PAPER_WINDOW // 8}"
        )
    scale = min(1.0, window / PAPER_WINDOW)

    def scaled(tokens: int) -> int:
        return round(tokens * scale)

    return Profile(
        name="paper",
        scale=scale,
        steps=28,
        step=scaled(640),
        user=scaled(20),
        reply=scaled(370),
        hard=scaled(15_000),
        offload_hard=scaled(15_000),
        soft=scaled(11_000),
        keep=scaled(4_000),
        summary=max(64, scaled(128)),
        offload_step=scaled(640),
        offload_reply=scaled(370 if scale == 1 else 185),
        keep_outputs=3,
        keep_turns=10,
        at_turns=22,
        window_turns=10,
        isolation=Isolation(
            opens_at=3,
            reads=12,
            read_tokens=scaled(6_000),
            delegates_at=16,
            system_tokens=scaled(800),
            instruction_tokens=scaled(800),
        ),
    )


def demo_profile() -> Profile:
    """As few turns, and thresholds as small, as one commit needs; three runs of it take under 2 minutes.

    Between soft and hard there are four to five turns (six in the paper: 4K of 600–650 tokens a step), and after
    hard as many as it takes to reach the ceiling, so that a machine that is busy otherwise still sees its commit.
    """
    return Profile(
        name="demo",
        scale=0.25,
        steps=11,
        step=90,
        user=5,
        reply=28,
        hard=750,
        offload_hard=1_200,
        soft=400,
        keep=350,
        summary=64,
        offload_step=150,
        offload_reply=20,
        keep_outputs=2,
        keep_turns=4,
        at_turns=8,
        window_turns=3,
        isolation=Isolation(
            opens_at=1, reads=6, read_tokens=700, delegates_at=7, system_tokens=100, instruction_tokens=80
        ),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what the user says, what the agent reads after its reply, and how long that reply is."""

    user: str
    read: Read
    reply: int


@dataclass(frozen=True, slots=True)
class SubAgent:
    """What a sub-agent starts with: its system prompt, and its reads, which arrive one a turn from ``opens_at``."""

    system: str
    task: str
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """One agent's whole run, apart from what the model writes."""

    system: str
    steps: tuple[Step, ...]
    sub_agent: SubAgent | None


class ScriptWriter:
    """Writes scripts whose steps have the profile's size with the served tokenizer.

    Args:
        profile: the sizes.
        tokens: counts with the served tokenizer.
        reader: a fresh reader, whose seed decides what is read.
        nonce: makes the prompts unique, so that no run finds another's prefix in a cache; its digits are
            always as many, so that all prompts are equally long.
    """

    def __init__(self, profile: Profile, tokens: ServerTokens, reader: Reader, nonce: str | None = None) -> None:
        self._profile, self._tokens, self._reader = profile, tokens, reader
        self._nonce = nonce or f"{secrets.randbelow(10**8):08d}"

    def write(self, kind: str) -> Script:
        """The script for a strategy kind."""
        profile = self._profile
        sub_agent = self._sub_agent(profile.isolation) if kind == "isolate" else None
        size, reply = profile.sizes_for(kind)
        steps = tuple(self._step(i, size, reply) for i in range(profile.steps))
        return Script(_SYSTEM.format(nonce=self._nonce), steps, sub_agent)

    def _step(self, number: int, size: int, reply: int) -> Step:
        user = self._user(number)
        used = self._tokens.count(Message("user", user)) + self._overhead() + reply
        return Step(user, self._reader.next(max(16, size - used)), reply)

    def _overhead(self) -> int:
        """What the template adds around a reply with its call, and around a result.

        Where the template prints calls, the command itself is counted too, by one of typical length.
        """
        call = tool.call(0, ("sed", "-n", "100,110p", "asyncio/base_events.py"))
        function = call["function"]
        calls = (ToolCall(call["id"], function["name"], function["arguments"]),)
        empty = self._tokens.text(".")
        assistant = self._tokens.count(Message("assistant", ".", calls)) - empty
        return assistant + self._tokens.count(wire_message(tool.result(call, "."))) - empty

    def _user(self, number: int) -> str:
        """``Step 07.`` and as much of a full sentence as the profile has room for."""
        if number == 0:
            return _TASK
        text = f"Step {number + 1:02d}."
        for word in _GO_ON.split():
            if self._tokens.text(f"{text} {word}") > self._profile.user:
                break
            text = f"{text} {word}"
        return text

    def _sub_agent(self, isolation: Isolation) -> SubAgent:
        system = _fill(_SUB_SYSTEM.format(nonce=self._nonce), isolation.system_tokens, self._tokens.text)
        each = isolation.read_tokens // isolation.reads - self._overhead()
        reads = tuple(self._reader.next(max(16, each)) for _ in range(isolation.reads))
        return SubAgent(system, _SUB_TASK, reads)


def _fill(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """A prompt of about ``tokens`` tokens: rules are added while they fit."""
    number = 0
    while True:
        longer = f"{text}\n{number + 1}. {_RULES[number % len(_RULES)]}"
        if count(longer) > tokens:
            return text
        text, number = longer, number + 1


_SYSTEM = (
    "Session {nonce}. You are a code analysis agent. You read a Python code base part by part with the bash tool, "
    "using head, sed and tail. After each part you write down what it does, which names it defines, what it "
    "depends on and what looks wrong, and then you ask for the next part."
)
_TASK = "Analyse this code base part by part, and note for every part what it does and what looks wrong."
_GO_ON = "Here is the next part of the code; go on with your analysis of it now, please."
_SUB_SYSTEM = (
    "Session {nonce}, sub-agent. You are given one task by another agent. Read the files it concerns, then do "
    "what the instruction says and nothing else. Your rules:"
)
_SUB_TASK = "Read the part of the code base that your task is about."
_RULES = (
    "Name every function with its module, so that it can be found again.",
    "Say what a function returns before you say how it does it.",
    "Quote at most one line of code at a time, exactly as it stands.",
    "Tell apart what the code says from what you conclude from it.",
    "Note every exception that can leave a function, and who catches it.",
    "Look for values that are read before they are written.",
    "Look for loops that may not end and for waits without a limit.",
    "Do not propose changes unless the instruction asks for them.",
    "When two places do the same thing differently, say which one is right.",
    "Keep to the order in which the files were read.",
    "If something cannot be decided from the code, say so.",
    "End with a list of the open questions, the most important one first.",
)
