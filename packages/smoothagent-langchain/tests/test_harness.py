"""The benchmark's harness on the embedded engine: three modes, LangChain's own middleware against ours."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents.middleware import ContextEditingMiddleware, SummarizationMiddleware

from quiet import Quiet
from smoothagent import ConfigurationError
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_bench.job import Assignment, Job
from smoothagent_bench.record import ResultsFile
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import Variant, variants
from smoothagent_bench.workload import demo_profile
from smoothagent_langchain.harness import BenchAgent, LangChainHarness

pytestmark = pytest.mark.engine

SHORT = replace(demo_profile(), steps=7, hard=340, keep=130, summary=24)


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with (
        EmbeddedEngine(find_model(), window=2_048) as engine,
        EmbeddedEngine(find_model(), window=2_048, beside=engine) as side,
    ):
        yield Server(engine.base_url, engine.model, engine.window, slots=3, lookahead_url=side.base_url)


@pytest.mark.harness
def test_a_short_conversation_with_ours(server: Server, tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    plan = Plan(variants(["summarize"]), SHORT, 1, 0.2, 1, harness="langchain", modes=("lookahead",))
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    rows = results.rows()
    assert [r.turn for r in rows] == list(range(SHORT.steps))
    assert {r.completion_tokens for r in rows} == {SHORT.reply}
    made = [r for r in rows if r.commit]
    assert made
    assert all(r.lookahead in ("hit", "late") for r in made)
    for row in rows[1 : made[0].turn]:
        assert row.cached_tokens
        assert row.cached_tokens > row.prompt_tokens // 2


@pytest.mark.parametrize(
    ("kind", "built_in"), [("summarize", SummarizationMiddleware), ("offload", ContextEditingMiddleware)]
)
def test_the_synchronous_side_is_langchains_own(kind: str, built_in: type, tmp_path: Path) -> None:
    job = Job(
        harness="langchain",
        variant=Variant(kind, kind),
        mode="sync",
        run=0,
        agent=0,
        profile=SHORT,
        tool_seconds=0.0,
        start_delay_s=0.0,
        base_url="http://127.0.0.1:9/v1",
        model="m",
        api_key="x",
        lookahead_url=None,
        slots=(3, 4, 5),
        workspace=str(tmp_path),
        files=(),
    )
    script: Any = SimpleNamespace(steps=(), system="s")
    tokens: Any = SimpleNamespace()
    agent = BenchAgent(Assignment(job, script, tokens, tmp_path))
    model = agent._model()  # pyright: ignore[reportPrivateUsage]
    middleware = agent._transformation(model)  # pyright: ignore[reportPrivateUsage]
    assert type(middleware) is built_in
    assert model.extra_body == {"ignore_eos": True, "id_slot": 3, "cache_prompt": True}
    if kind == "summarize":
        writer = middleware.model
        assert (writer.max_tokens, writer.extra_body) == (SHORT.summary, {"id_slot": 4, "cache_prompt": True})
        assert middleware.trim_tokens_to_summarize is None


def test_a_strategy_without_a_built_in_is_refused() -> None:
    job: Any = SimpleNamespace(variant=Variant("isolate", "isolate"))
    assignment: Any = SimpleNamespace(job=job)

    async def main() -> None:
        async for _ in LangChainHarness().run(assignment):
            raise AssertionError("it ran")

    with pytest.raises(ConfigurationError, match="no built-in for 'isolate': choose from summarize, offload"):
        asyncio.run(main())
