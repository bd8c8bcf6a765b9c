"""The benchmark's harness on the embedded engine: three modes, LangChain's own middleware against ours."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from smoothagent import ConfigurationError
from smoothagent_bench import EmbeddedEngine, EngineInfo, find_model
from smoothagent_bench.record import MODES, Group, ResultsFile, Row
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import variants
from smoothagent_bench.workload import demo_profile

pytestmark = pytest.mark.engine

SHORT = replace(
    demo_profile(), steps=7, step=110, reply=24, hard=480, keep=130, summary=24, offload_hard=450, keep_outputs=1
)


class Quiet:
    """A listener that only fails."""

    def started(self, group: Group, number: int, total: int) -> None: ...

    def turned(self, row: Row) -> None: ...

    def finished(self, group: Group) -> None: ...

    def failed(self, group: Group, error: str) -> None:
        pytest.fail(f"{group}: {error}")


@pytest.fixture(scope="module")
def engine() -> Generator[EngineInfo]:
    with EmbeddedEngine(find_model(), window=2_048) as info:
        yield info


@pytest.mark.parametrize("kind", ["summarize", "offload"])
def test_a_short_conversation_in_three_modes(engine: EngineInfo, kind: str, tmp_path: Path) -> None:
    results = ResultsFile(tmp_path)
    server = Server(engine.base_url, engine.model, engine.window, slots=3)
    plan = Plan(variants([kind]), SHORT, 1, 0.5, 1, harness="langchain")
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    by_mode = {mode: [r for r in results.rows() if r.mode == mode] for mode in MODES}
    assert [len(rows) for rows in by_mode.values()] == [SHORT.steps] * 3
    reply = SHORT.sizes_for(kind)[1]
    assert {r.completion_tokens for rows in by_mode.values() for r in rows} == {reply}
    assert not any(r.commit for r in by_mode["none"])
    assert any(r.commit for r in by_mode["sync"])
    first = next(r.turn for r in by_mode["sync"] if r.commit)
    # All modes have the same conversation up to the commit, but for what the model writes.
    sizes = [[r.prompt_tokens for r in by_mode[mode]][:first] for mode in MODES]
    assert max(abs(a - b) for row in zip(*sizes, strict=True) for a in row for b in row) <= reply
    assert any(r.commit and r.lookahead in ("hit", "late") for r in by_mode["lookahead"])
    for row in by_mode["none"][1:]:
        assert row.cached_tokens
        assert row.cached_tokens > row.prompt_tokens // 2


def test_a_strategy_without_a_built_in_is_refused(engine: EngineInfo, tmp_path: Path) -> None:
    class Told(Quiet):
        def failed(self, group: Group, error: str) -> None:
            assert "choose from summarize, offload" in error

    server = Server(engine.base_url, engine.model, engine.window, slots=3)
    plan = Plan(variants(["isolate"]), SHORT, 1, 0.0, 1, harness="langchain", modes=("none",))
    with pytest.raises(Exception, match="no built-in for 'isolate'") as raised:
        asyncio.run(Bench(plan, server, ResultsFile(tmp_path), Told()).run())
    assert not isinstance(raised.value, ConfigurationError)
