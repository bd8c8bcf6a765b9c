"""The embedded engine behind the gateway: what is warmed is, token by token, what is sent; and the harnesses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from gw import running
from quiet import Quiet
from smoothagent import KeepRecent
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_bench.engine import EngineInfo
from smoothagent_bench.record import ResultsFile
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import variants
from smoothagent_bench.workload import demo_profile

pytestmark = pytest.mark.engine

OUTPUT = "def run(self, number): return [number * i for i in range(12) if i % 2] or None\n"
SHORT = replace(demo_profile(), steps=5, step=60, reply=12, keep_turns=1, at_turns=3)


@pytest.fixture(scope="module")
def engine() -> Generator[EngineInfo]:
    with EmbeddedEngine(find_model(), window=2_048) as engine:
        yield engine


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_sent_is_what_was_warmed(engine: EngineInfo, streams: bool) -> None:
    """The model writes the text; which tool it calls is scripted. Its token counts tell what was cached."""
    messages: list[Any] = [{"role": "system", "content": "You read code."}, {"role": "user", "content": "Read it."}]
    with (
        running(engine.base_url, lambda: KeepRecent(2, at_turns=4)) as gateway,
        OpenAI(base_url=gateway.url, api_key="x", max_retries=0) as client,
    ):
        for number in range(8):
            given: dict[str, Any] = {"model": engine.model, "messages": messages, "temperature": 0, "max_tokens": 12}
            create: Any = client.chat.completions.create
            if streams:
                text = "".join(c.delta.content or "" for chunk in create(**given, stream=True) for c in chunk.choices)
            else:
                text = str(create(**given).choices[0].message.content or "")
            call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            gateway.idle()
            messages += [
                {"role": "assistant", "content": text, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} {OUTPUT}"},
            ]
        turns = list(gateway.gateway.sessions.all()[0].turns)
        assert gateway.gateway.ledger.snapshot().late_commits == 0
        notes = asyncio.run(gateway.gateway._backend.caps()).notes  # pyright: ignore[reportPrivateUsage]
        assert not any("cannot be saved" in note for note in notes), (
            "what the engine can do is seen through the gateway"
        )
    cuts = 0
    for before, after in itertools.pairwise(turns):
        assert after.prompt_tokens is not None
        assert after.cached_tokens is not None
        # Cold are the newest result, the call that the model did not write, and the headers of both.
        assert after.prompt_tokens - after.cached_tokens <= len(OUTPUT) // 2 + 70
        cuts += after.prompt_tokens <= (before.prompt_tokens or 0)
    assert cuts >= 2
    assert sum(turn.commit == "hit" for turn in turns) == cuts


@pytest.mark.harness
@pytest.mark.parametrize("harness", ["gateway", "gateway-langgraph", "gateway-pydantic-ai"])
def test_a_short_run_in_the_benchmark(engine: EngineInfo, tmp_path: Path, harness: str) -> None:
    server = Server(engine.base_url, engine.model, engine.window, slots=3)
    results = ResultsFile(tmp_path)
    plan = Plan(variants(["keep-recent"]), SHORT, 1, 0.1, 1, harness=harness, modes=("lookahead",))
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    rows = results.rows()
    assert [r.turn for r in rows] == list(range(SHORT.steps))
    assert any(r.commit and r.lookahead in ("hit", "late") for r in rows)
