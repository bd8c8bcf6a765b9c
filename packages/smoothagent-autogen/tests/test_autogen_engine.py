"""The embedded engine: what is warmed is, token by token, what the agent then sends; and the benchmark's harness."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core import model_context as built_in
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import CreateResult, LLMMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

import smoothagent_autogen as ours
from ag import INFO, looking
from quiet import Quiet
from smoothagent import ConfigurationError, KeepRecent
from smoothagent_autogen.harness import AutoGenHarness, Player, cached_in
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_bench.engine import EngineInfo
from smoothagent_bench.job import Assignment, Job
from smoothagent_bench.record import ResultsFile
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import Variant, variants
from smoothagent_bench.workload import demo_profile

pytestmark = pytest.mark.engine

TURNS = 7
OUTPUT = "def run(self, number): return [number * i for i in range(12) if i % 2] or None\n"
SHORT = replace(demo_profile(), steps=5, step=60, reply=12, keep_turns=1, at_turns=3)


@pytest.fixture(scope="module")
def engine() -> Generator[EngineInfo]:
    with EmbeddedEngine(find_model(), window=2_048) as engine:
        yield engine


class Scripted(OpenAIChatCompletionClient):
    """The small model writes its text; which tool it calls is scripted."""

    asked: list[tuple[list[LLMMessage], Any]]
    usage: Any

    async def _create_stream_chunks(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for chunk in super()._create_stream_chunks(*args, **kwargs):
            self.usage = chunk.usage or self.usage
            yield chunk

    async def create_stream(self, messages: Sequence[LLMMessage], **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for piece in super().create_stream(messages, **kwargs):
            if isinstance(piece, CreateResult):
                self.asked.append((list(messages), self.usage))
                number = len(self.asked)
                if number < TURNS:
                    call = FunctionCall(id=f"c{number}", name="look", arguments=f'{{"number": {number}}}')
                    said = {"content": [call], "thought": piece.content}
                    yield piece.model_copy(update=said)
                    continue
            yield piece


@pytest.mark.parametrize("kind", ["window", "strategy"])
def test_the_window_that_is_sent_is_the_one_that_was_warmed(engine: EngineInfo, kind: str) -> None:
    made: ChatCompletionContext = (
        ours.BufferedChatCompletionContext(4)
        if kind == "window"
        else ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4))
    )

    async def main() -> list[tuple[list[LLMMessage], Any]]:
        client = Scripted(
            model=engine.model,
            base_url=engine.base_url,
            api_key="x",
            model_info=INFO,
            temperature=0,
            max_tokens=12,
            include_name_in_message=False,
            stream_options={"include_usage": True},
            default_headers={"Connection": "close"},
        )
        client.asked, client.usage = [], None
        agent = AssistantAgent(
            "agent",
            client,
            tools=[looking(made, OUTPUT)],
            model_context=made,
            system_message="You read code.",
            model_client_stream=True,
            max_tool_iterations=100,
        )
        await agent.run(task="Read all of it.")
        await made.clear()  # the next test's conversation needs its slots
        return client.asked

    asked = asyncio.run(main())
    assert len(asked) == TURNS
    cuts = 0
    for (before, _), (messages, usage) in itertools.pairwise(asked):
        cached, prompt = cached_in(usage), usage.prompt_tokens
        assert cached is not None
        # Cold are the newest result, the header of the reply, and what ends an answer otherwise than it was written.
        newest = len(messages[-1].content[0].content) // 2  # type: ignore[union-attr]
        assert prompt - cached <= newest + 40
        cuts += len(messages) <= len(before)
    assert cuts >= 1


@pytest.mark.harness
@pytest.mark.parametrize("kind", ["keep-recent", "sliding-window"])
def test_a_short_run_in_the_benchmark(kind: str, engine: EngineInfo, tmp_path: Path) -> None:
    server = Server(engine.base_url, engine.model, engine.window, slots=3)
    results = ResultsFile(tmp_path)
    windows = [2] if kind == "sliding-window" else []
    modes = ("lookahead",)
    plan = Plan(variants([kind], window_turns=windows), SHORT, 1, 0.1, 1, harness="autogen", modes=modes)
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    for mode in modes:
        rows = [r for r in results.rows() if r.mode == mode]
        assert [r.turn for r in rows] == list(range(SHORT.steps))
        assert {r.completion_tokens for r in rows} == {SHORT.reply}
        assert rows[1].cached_tokens
        # How much is ready after 0.1 s is the machine's affair.
        assert {r.lookahead for r in rows if r.commit} <= {"hit", "late"}
        assert any(r.commit for r in rows)
        assert not any(r.failures for r in rows)


def test_each_side_has_its_context(tmp_path: Path) -> None:
    def context(kind: str, mode: str) -> Any:
        job: Any = Job(
            *("autogen", Variant(kind, kind), mode, 0, 0, SHORT, 0.0, 0.0, "http://127.0.0.1:9/v1", "m", "x"),
            lookahead_url=None,
            slots=(3, 4, 5),
            workspace=str(tmp_path),
            files=(),
        )
        script: Any = SimpleNamespace(steps=(), system="s", sub_agent=None)
        tokens: Any = SimpleNamespace(text=len)
        return Player(Assignment(job, script, tokens, tmp_path))._context  # pyright: ignore[reportPrivateUsage]

    assert type(context("sliding-window", "none")) is built_in.UnboundedChatCompletionContext
    assert type(context("sliding-window", "sync")) is built_in.BufferedChatCompletionContext
    assert type(context("sliding-window", "lookahead")) is ours.BufferedChatCompletionContext
    assert type(context("summarize", "sync")) is ours.LookaheadChatCompletionContext


def test_a_strategy_that_is_none_of_its_own_is_refused() -> None:
    job: Any = SimpleNamespace(variant=Variant("isolate", "isolate"))
    assignment: Any = SimpleNamespace(job=job)

    async def main() -> None:
        async for _ in AutoGenHarness().run(assignment):
            raise AssertionError("it ran")

    with pytest.raises(ConfigurationError, match="cannot run 'isolate': choose from summarize, offload"):
        asyncio.run(main())
