"""What one agent's process is told, and what a harness gets to run it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from smoothagent_bench.record import Row
from smoothagent_bench.strategies import Variant
from smoothagent_bench.tokens import ServerTokens
from smoothagent_bench.workload import Isolation, Profile, Script


@dataclass(frozen=True, slots=True)
class Job:
    """One agent in one mode of one run, as it travels to a process of its own.

    Attributes:
        harness: name of the harness that drives the agent.
        variant: the strategy.
        mode: ``none``, ``sync`` or ``lookahead``.
        run: number of the run.
        agent: number of the agent.
        profile: the workload's sizes.
        tool_seconds: how long each tool takes.
        start_delay_s: wait before the first turn, so that agents do not start all at once.
        base_url: the server, ending in ``/v1``.
        model: its model.
        api_key: what the server asks for.
        lookahead_url: a second server for the lookahead work, if there is one.
        slots: llama.cpp slots leased to this agent; None where the server has none.
        workspace: folder with the code base.
        files: what lies in it.
        full_length: replies can be made to run to their limit, so that they have the same lengths in all modes.
    """

    harness: str
    variant: Variant
    mode: str
    run: int
    agent: int
    profile: Profile
    tool_seconds: float
    start_delay_s: float
    base_url: str
    model: str
    api_key: str
    lookahead_url: str | None
    slots: tuple[int, ...] | None
    workspace: str
    files: tuple[str, ...]
    full_length: bool = True

    @property
    def extra_body(self) -> dict[str, Any]:
        """What each request carries besides OpenAI's own fields."""
        return {"ignore_eos": True} if self.full_length else {}

    def encode(self) -> str:
        """One JSON line."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(line: str) -> Job:
        """Read what `encode` wrote."""
        data: dict[str, Any] = json.loads(line)
        profile = data["profile"]
        profile["isolation"] = Isolation(**profile["isolation"])
        data["variant"] = Variant(**data["variant"])
        data["profile"] = Profile(**profile)
        data["slots"] = None if data["slots"] is None else tuple(data["slots"])
        data["files"] = tuple(data["files"])
        return Job(**data)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A job with what was made of it in the agent's process.

    Attributes:
        job: the job.
        script: the agent's script, sized with the served tokenizer.
        tokens: the counter, for the runtime too.
        store: an empty folder for offloaded outputs.
    """

    job: Job
    script: Script
    tokens: ServerTokens
    store: Path


class Harness(Protocol):
    """What drives an agent: the paper's loop, or a framework's own.

    Registered by a name in the entry-point group ``smoothagent.harnesses``. A framework's harness takes the
    framework's built-in transformation as the ``sync`` mode: same strategy, same boundary, same reply lengths. One that
    may run a stand-in says whose agents ran, as ``played_by``.

    Attributes:
        kinds: the strategies it can run.
    """

    kinds: Collection[str]

    def run(self, assignment: Assignment) -> AsyncGenerator[Row]:
        """Run the whole script; yields a row a turn, the last one after everything was closed."""
        ...
