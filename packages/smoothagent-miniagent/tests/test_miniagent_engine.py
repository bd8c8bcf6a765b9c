"""The embedded engine: what is warmed is, token by token, what the agent then sends; and the benchmark's harness."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mini import WORLDS, Look, World, home, run, settled
from quiet import Quiet
from smoothagent import KeepRecent
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_bench.engine import EngineInfo
from smoothagent_bench.record import ResultsFile
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import variants
from smoothagent_bench.workload import demo_profile
from smoothagent_miniagent import attach

pytestmark = pytest.mark.engine

TURNS = 7
OUTPUT = "def run(self, number): return [number * i for i in range(12) if i % 2] or None\n"
SHORT = replace(demo_profile(), steps=5, step=60, reply=12, keep_turns=1, at_turns=3)


@pytest.fixture(scope="module")
def engine() -> Generator[EngineInfo]:
    with EmbeddedEngine(find_model(), window=2_048) as engine:
        yield engine


@pytest.mark.parametrize("made", WORLDS[-1:])
def test_what_is_sent_is_what_was_warmed(
    engine: EngineInfo, made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The small model writes its text; which tool it calls is scripted."""
    home(monkeypatch, tmp_path)
    world: World = made()
    usages: list[Any] = []

    async def main() -> None:
        llm = world.openai(engine.base_url)
        look = Look(world, output=OUTPUT)
        agent = world.make(llm, [look], system_prompt="You read code.")
        client = llm._client
        parse = client._parse_response

        def parsed(response: Any) -> Any:
            usages.append(response.usage)
            said = parse(response)
            if len(usages) < TURNS:
                number = len(usages)
                function = {"name": "look", "arguments": {"number": number}}
                calls = [{"id": f"c{number}", "type": "function", "function": function}]
                told = world.message(role="assistant", content=said.content, tool_calls=calls)
                return said.model_copy(update={"tool_calls": told.tool_calls})
            return said

        create = client.client.chat.completions.create

        async def limited(**params: Any) -> Any:
            return await create(**{**params, "max_tokens": 12, "temperature": 0})

        client.client.chat.completions.create = limited
        client._parse_response = parsed
        with attach(agent, lambda: KeepRecent(2, at_turns=4)) as attachment:
            look.wait = lambda: settled(attachment)
            await run(agent, "Read all of it.")

    asyncio.run(main())
    assert len(usages) == TURNS
    cuts = 0
    for before, after in itertools.pairwise(usages):
        cached, prompt = after.prompt_tokens_details.cached_tokens, after.prompt_tokens
        # Cold are the newest result, the header of the reply, and what ends an answer otherwise than it was written.
        assert prompt - cached <= len(OUTPUT) // 2 + 40
        cuts += prompt <= before.prompt_tokens
    assert cuts >= 1


@pytest.mark.harness
def test_a_short_run_in_the_benchmark(engine: EngineInfo, tmp_path: Path) -> None:
    server = Server(engine.base_url, engine.model, engine.window, slots=3)
    results = ResultsFile(tmp_path)
    plan = Plan(variants(["keep-recent"]), SHORT, 1, 0.1, 1, harness="miniagent", modes=("lookahead", "sync"))
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    for mode in plan.modes:
        rows = [r for r in results.rows() if r.mode == mode]
        assert [r.turn for r in rows] == list(range(SHORT.steps))
        assert any(r.commit for r in rows)
