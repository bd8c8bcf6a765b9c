"""Runs a benchmark: groups of agents, each in its own process, modes interleaved run by run."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from smoothagent.errors import BackendError
from smoothagent_bench.job import Job
from smoothagent_bench.record import MODES, Group, ResultsFile, Row
from smoothagent_bench.sources import lay_out
from smoothagent_bench.strategies import Variant
from smoothagent_bench.workload import Profile

ATTEMPTS = 2
"""How often a group is tried: a run that broke is discarded and redone once."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where the agents' requests go.

    Attributes:
        base_url: ends in ``/v1``.
        model: the model's name there.
        window: tokens of context a conversation has.
        slots: llama.cpp slots to share out among the agents; 0 where the server has none.
        api_key: what it asks for.
        lookahead_url: a second server for the lookahead work, if there is one.
        full_length: it takes llama.cpp's, vLLM's and SGLang's ``ignore_eos``.
        check: raises BackendUnreachableError where a server that was started here has died.
    """

    base_url: str
    model: str
    window: int
    slots: int = 0
    api_key: str = "none"
    lookahead_url: str | None = None
    full_length: bool = True
    check: Callable[[], object] = field(default=lambda: None, compare=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        variants: the strategies.
        profile: the workload's sizes.
        agents: concurrent agents.
        tool_seconds: how long each tool takes.
        runs: runs of each strategy and mode.
        harness: what drives the agents.
        modes: the modes to compare.
    """

    variants: Sequence[Variant]
    profile: Profile
    agents: int
    tool_seconds: float
    runs: int
    harness: str = "plain"
    where: str = "embedded"
    modes: Sequence[str] = MODES

    def groups(self) -> Iterator[tuple[Variant, Group]]:
        """All groups in the order they are run.

        The modes of a run follow one another, so that a change of the machine's speed meets all of them, and
        the first of them changes from run to run, so that none is always the one after a pause. A run of all
        strategies is complete before the next begins: a benchmark that is broken off has something of each.
        """
        for run in range(self.runs):
            for variant in self.variants:
                shift = run % len(self.modes)
                for mode in [*self.modes[shift:], *self.modes[:shift]]:
                    yield variant, Group(variant.label, run, mode)

    def settings(self, server: Server) -> dict[str, Any]:
        """What results of one folder must have in common."""
        return {
            "profile": self.profile.name,
            "scale": self.profile.scale,
            "agents": self.agents,
            "tool_seconds": self.tool_seconds,
            "harness": self.harness,
            "server": self.where,
            "model": server.model,
            "window": server.window,
            "lookahead_server": server.lookahead_url is not None,
            "full_length": server.full_length,
        }


class Listener(Protocol):
    """Told how a benchmark proceeds."""

    def started(self, group: Group, number: int, total: int) -> None:
        """A group begins."""
        ...

    def turned(self, row: Row) -> None:
        """An agent has finished a turn."""
        ...

    def finished(self, group: Group) -> None:
        """A group is complete and kept."""
        ...

    def failed(self, group: Group, error: str) -> None:
        """A group broke; it is redone."""
        ...


@dataclass(slots=True)
class Bench:
    """One benchmark over a results file.

    Attributes:
        plan: what to measure.
        server: where.
        results: what is there already, and where the rest goes.
        listener: told of progress.
    """

    plan: Plan
    server: Server
    results: ResultsFile
    listener: Listener

    async def run(self) -> None:
        """Run every group that is not complete yet. Cancelling it keeps those that are.

        Raises:
            BackendError: a group broke `ATTEMPTS` times.
        """
        done = self.results.complete(self.plan.agents, self.plan.profile.steps)
        groups = list(self.plan.groups())
        with tempfile.TemporaryDirectory(prefix="smoothagent-bench-") as folder:
            files = lay_out(Path(folder))
            for number, (variant, group) in enumerate(groups, 1):
                if group not in done:
                    self.listener.started(group, number, len(groups))
                    rows = await self._group(variant, group, Path(folder), files)
                    self.server.check()  # a lookahead server that has died is not missed by the agents
                    self.results.append(rows)
                    self.listener.finished(group)

    async def _group(self, variant: Variant, group: Group, workspace: Path, files: Sequence[str]) -> list[Row]:
        for attempt in range(1, ATTEMPTS + 1):
            jobs = [self._job(variant, group, agent, workspace, files) for agent in range(self.plan.agents)]
            try:
                async with asyncio.TaskGroup() as tasks:
                    runs = [tasks.create_task(self._agent(job)) for job in jobs]
            except* AgentError as errors:
                error = str(errors.exceptions[0])
                self.listener.failed(group, error)
                self.results.note_broken(group, error)
                if attempt == ATTEMPTS:
                    raise AgentError(f"{group.strategy}, mode {group.mode}, run {group.run + 1}: {error}") from None
            else:
                return [row for run in runs for row in run.result()]
        raise AssertionError("unreachable")

    def _job(self, variant: Variant, group: Group, agent: int, workspace: Path, files: Sequence[str]) -> Job:
        plan, server = self.plan, self.server
        share = server.slots // plan.agents
        return Job(
            harness=plan.harness,
            variant=variant,
            mode=group.mode,
            run=group.run,
            agent=agent,
            profile=plan.profile,
            tool_seconds=plan.tool_seconds,
            # A turn takes about a second besides its tool: spread the agents over one.
            start_delay_s=agent * (plan.tool_seconds + 1.0) / plan.agents,
            base_url=server.base_url,
            model=server.model,
            api_key=server.api_key,
            lookahead_url=server.lookahead_url,
            slots=tuple(range(agent * share, (agent + 1) * share)) if share else None,
            workspace=str(workspace),
            files=tuple(files),
            full_length=server.full_length,
        )

    async def _agent(self, job: Job) -> list[Row]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "smoothagent_bench.agent_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # In a session of its own: Ctrl-C reaches the benchmark, which ends its agents in order.
            start_new_session=True,
        )
        try:
            return await self._converse(process, job)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _converse(self, process: asyncio.subprocess.Process, job: Job) -> list[Row]:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(job.encode().encode() + b"\n")
        said = asyncio.create_task(process.stderr.read())
        rows: list[Row] = []
        error: str | None = None
        async for raw in process.stdout:
            line = raw.decode(errors="replace")
            if line.startswith('{"error"'):
                error = str(json.loads(line)["error"])
            elif line.startswith("{"):
                rows.append(Row.decode(line))
                self.listener.turned(rows[-1])
        await process.wait()
        noise = (await said).decode(errors="replace").strip()
        self._keep_log(job, noise)
        if error is None and (process.returncode != 0 or len(rows) != job.profile.steps):
            last = noise.splitlines()[-1] if noise else "it said nothing"
            error = f"agent {job.agent} ended with status {process.returncode} after {len(rows)} turns: {last}"
        if error is not None:
            raise AgentError(error)
        return rows

    def _keep_log(self, job: Job, noise: str) -> None:
        """What agents warned of, for whoever wonders about a figure."""
        if noise:
            with (self.results.path.parent / "agents.log").open("a", encoding="utf-8") as log:
                log.write(f"--- {job.variant.label}, {job.mode}, run {job.run + 1}, agent {job.agent}\n{noise}\n")


class AgentError(BackendError):
    """An agent's process could not finish its run."""
