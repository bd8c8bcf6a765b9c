from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench_rows import row
from smoothagent_bench.job import Job
from smoothagent_bench.record import Group, ResultsFile, Row
from smoothagent_bench.run import AgentError, Bench, Plan, Server
from smoothagent_bench.strategies import variants
from smoothagent_bench.workload import demo_profile

NOBODY = Server("http://127.0.0.1:9/v1", "m", 8_192, slots=6)
SHORT = replace(demo_profile(), steps=2)


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.began: list[Group] = []
        self.errors: list[str] = []
        self.rows: list[Row] = []

    def started(self, group: Group, number: int, total: int) -> None:
        self.began.append(group)

    def turned(self, row: Row) -> None:
        self.rows.append(row)

    def finished(self, group: Group) -> None: ...

    def failed(self, group: Group, error: str) -> None:
        self.errors.append(error)


class Faked(Bench):
    """Agents that answer at once, and break where ``breaks`` says so."""

    breaks: int = 0

    async def _agent(self, job: Job) -> list[Row]:
        await asyncio.sleep(0)
        if self.breaks:
            self.breaks -= 1
            raise AgentError("broke")
        return [
            row(job.mode, t, 0.5, strategy=job.variant.label, run=job.run, agent=job.agent)
            for t in range(job.profile.steps)
        ]


def plan(runs: int = 2, agents: int = 1) -> Plan:
    return Plan(variants(["offload", "summarize"]), SHORT, agents, 0.0, runs)


def test_modes_are_interleaved_run_by_run_and_each_is_first_in_turn() -> None:
    groups = [group for _, group in plan(runs=3).groups()]
    assert [g.strategy for g in groups] == (["offload"] * 3 + ["summarize"] * 3) * 3
    assert [g.mode for g in groups if g.strategy == "offload"] == [
        *("none", "sync", "lookahead"),
        *("sync", "lookahead", "none"),
        *("lookahead", "none", "sync"),
    ]


def test_it_resumes_where_it_was_stopped(tmp_path: Path) -> None:
    results, heard = ResultsFile(tmp_path), Heard()
    asyncio.run(Faked(plan(runs=1), NOBODY, results, heard).run())
    assert len(heard.began) == 6
    again = Heard()
    asyncio.run(Faked(plan(runs=2), NOBODY, results, again).run())
    assert len(again.began) == 6
    assert {g.run for g in again.began} == {1}
    assert len(results.rows()) == 2 * 2 * 3 * 2


def test_a_group_that_breaks_is_discarded_and_redone_once(tmp_path: Path) -> None:
    results, heard = ResultsFile(tmp_path), Heard()
    bench = Faked(plan(runs=1), NOBODY, results, heard)
    bench.breaks = 1
    asyncio.run(bench.run())
    assert heard.errors == ["broke"]
    assert len(results.rows()) == 12
    bench = Faked(plan(runs=2), NOBODY, results, heard)
    bench.breaks = 2
    with pytest.raises(AgentError, match="offload, mode sync, run 2: broke"):
        asyncio.run(bench.run())
    assert len(results.rows()) == 12


def test_agents_share_out_the_slots_and_start_one_after_the_other(tmp_path: Path) -> None:
    jobs: list[Job] = []

    class Spy(Faked):
        async def _agent(self, job: Job) -> list[Row]:
            jobs.append(job)
            return await super()._agent(job)

    asyncio.run(Spy(plan(runs=1, agents=2), NOBODY, ResultsFile(tmp_path), Heard()).run())
    first, second = jobs[:2]
    assert (first.slots, second.slots) == ((0, 1, 2), (3, 4, 5))
    assert first.start_delay_s == 0 < second.start_delay_s
    assert Job.decode(first.encode()) == first


def test_an_agent_without_a_server_says_so_in_one_line(tmp_path: Path) -> None:
    heard = Heard()
    with pytest.raises(AgentError, match=r"BackendUnreachableError: nothing answers at http://127\.0\.0\.1:9"):
        asyncio.run(Bench(plan(runs=1), NOBODY, ResultsFile(tmp_path), heard).run())
    assert len(heard.errors) == 2


def test_cancelling_ends_the_agents(tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(Bench(plan(runs=1), NOBODY, ResultsFile(tmp_path), Heard()).run())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert ResultsFile(tmp_path).rows() == []
