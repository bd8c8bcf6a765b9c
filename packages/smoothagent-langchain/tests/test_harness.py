"""The benchmark's harness on the embedded engine: three modes, LangChain's own middleware against ours."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smoothagent import ConfigurationError
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_bench.record import Group, ResultsFile, Row
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import Variant, variants
from smoothagent_bench.workload import demo_profile
from smoothagent_langchain.harness import LangChainHarness

pytestmark = pytest.mark.engine

SHORT = replace(demo_profile(), steps=9, hard=420, keep=170, summary=24)


class Quiet:
    """A listener that only fails."""

    def started(self, group: Group, number: int, total: int) -> None: ...

    def turned(self, row: Row) -> None: ...

    def finished(self, group: Group) -> None: ...

    def failed(self, group: Group, error: str) -> None:
        pytest.fail(f"{group}: {error}")


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with (
        EmbeddedEngine(find_model(), window=2_048) as engine,
        EmbeddedEngine(find_model(), window=2_048, beside=engine) as side,
    ):
        yield Server(engine.base_url, engine.model, engine.window, slots=3, lookahead_url=side.base_url)


def test_a_short_conversation_with_the_built_in_and_with_ours(server: Server, tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    modes = ("sync", "lookahead")
    plan = Plan(variants(["summarize"]), SHORT, 1, 0.4, 1, harness="langchain", modes=modes)
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    theirs, mine = ([r for r in results.rows() if r.mode == mode] for mode in modes)
    assert len(theirs) == len(mine) == SHORT.steps
    assert {r.completion_tokens for r in [*theirs, *mine]} == {SHORT.reply}
    first = next(r.turn for r in theirs if r.commit)
    # Both have the same conversation up to the commit, but for what the model writes.
    assert all(
        abs(a.prompt_tokens - b.prompt_tokens) <= SHORT.reply for a, b in zip(theirs[:first], mine, strict=False)
    )
    assert any(r.commit and r.lookahead in ("hit", "late") for r in mine)
    for row in theirs[1:first]:
        assert row.cached_tokens
        assert row.cached_tokens > row.prompt_tokens // 2


def test_a_strategy_without_a_built_in_is_refused() -> None:
    job: Any = SimpleNamespace(variant=Variant("isolate", "isolate"))
    assignment: Any = SimpleNamespace(job=job)

    async def main() -> None:
        async for _ in LangChainHarness().run(assignment):
            raise AssertionError("it ran")

    with pytest.raises(ConfigurationError, match="no built-in for 'isolate': choose from summarize, offload"):
        asyncio.run(main())
