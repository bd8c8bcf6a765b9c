"""The embedded engine: what is warmed is, token by token, what the agent then sends; and the benchmark's harness."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.memory import ChatMemoryBuffer as BuiltInBuffer
from llama_index.core.memory import ChatSummaryMemoryBuffer as BuiltInSummary
from llama_index.llms.openai_like import OpenAILike
from pydantic import PrivateAttr

from agent_server import AgentServer
from li import watch
from quiet import Quiet
from smoothagent import ConfigurationError, KeepRecent
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_bench.engine import EngineInfo
from smoothagent_bench.job import Assignment, Job
from smoothagent_bench.record import ResultsFile
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import Variant, variants
from smoothagent_bench.workload import demo_profile
from smoothagent_llamaindex import FunctionAgent
from smoothagent_llamaindex.harness import REACHED, LlamaIndexHarness, Player

pytestmark = pytest.mark.engine

TURNS = 10
OUTPUT = "def run(self, number): return [number * i for i in range(12) if i % 2] or None\n" * 2
SHORT = replace(demo_profile(), steps=5, step=60, reply=12, keep_turns=1, at_turns=3)


@pytest.fixture(scope="module")
def engine() -> Generator[EngineInfo]:
    with EmbeddedEngine(find_model(), window=2_048) as engine:
        yield engine


class Scripted(OpenAILike):
    """The small model writes its text; which tool it calls is scripted."""

    _asked: Any = PrivateAttr(default_factory=list)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        stream = await super().astream_chat(messages, **kwargs)
        asked = self._asked

        async def ended() -> AsyncGenerator[ChatResponse, None]:
            usage, last = None, None
            async for last in stream:
                usage = getattr(last.raw, "usage", None) or usage
                yield last
            assert last is not None
            asked.append((list(messages), usage))
            number = len(asked)
            blocks: list[Any] = list(last.message.blocks)
            if number < TURNS:
                call = f'{{"number": {number}}}'
                blocks.append(ToolCallBlock(tool_call_id=f"c{number}", tool_name="look", tool_kwargs=call))
            yield ChatResponse(message=ChatMessage(role="assistant", blocks=blocks), delta="", raw=last.raw)

        return ended()


def test_the_window_that_is_sent_is_the_one_that_was_warmed(engine: EngineInfo) -> None:
    waits = AgentServer()

    async def look(number: int) -> str:
        """Look at something."""
        await asyncio.to_thread(waits.idle)
        return f"{number} {OUTPUT}"

    async def main() -> list[Any]:
        llm = Scripted(
            model=engine.model,
            api_base=engine.base_url,
            api_key="x",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_tokens=12,
            default_headers={"Connection": "close"},
            additional_kwargs={"stream_options": {"include_usage": True}},
        )
        agent: Any = FunctionAgent(
            tools=[look], llm=llm, system_prompt="You read code.", strategy=lambda: KeepRecent(3, at_turns=6)
        )
        watch(waits, agent.llm)
        await agent.run(user_msg="Read all of it.", max_iterations=100)
        return agent.llm._asked

    asked = asyncio.run(main())
    assert len(asked) == TURNS
    cuts = 0
    for (before, _), (messages, usage) in itertools.pairwise(asked):
        cached, prompt = usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens
        # Cold are the newest result, the header of the reply, and what ends an answer otherwise than it was written.
        newest = len(str(messages[-1].content)) // 2
        assert prompt - cached <= newest + 40
        cuts += len(messages) < len(before)
    assert cuts >= 2


@pytest.mark.harness
@pytest.mark.parametrize("kind", ["keep-recent", "sliding-window"])
def test_a_short_conversation_in_the_benchmark(kind: str, engine: EngineInfo, tmp_path: Path) -> None:
    server = Server(engine.base_url, engine.model, engine.window, slots=3)
    results = ResultsFile(tmp_path)
    plan = Plan(variants([kind]), SHORT, 1, 0.1, 1, harness="llamaindex", modes=("lookahead",))
    asyncio.run(Bench(plan, server, results, Quiet()).run())
    rows = results.rows()
    assert [r.turn for r in rows] == list(range(SHORT.steps))
    assert {r.completion_tokens for r in rows} == {SHORT.reply}
    assert rows[1].cached_tokens
    if kind == "keep-recent":
        assert any(r.commit and r.lookahead in ("hit", "late") for r in rows)


def test_the_synchronous_side_is_llamaindexs_own(tmp_path: Path) -> None:
    def memory(kind: str, mode: str) -> Any:
        job: Any = Job(
            *("llamaindex", Variant(kind, kind), mode, 0, 0, SHORT, 0.0, 0.0, "http://127.0.0.1:9/v1", "m", "x"),
            lookahead_url=None,
            slots=(3, 4, 5),
            workspace=str(tmp_path),
            files=(),
        )
        script: Any = SimpleNamespace(steps=(), system="s", sub_agent=None)
        tokens: Any = SimpleNamespace(text=len)
        return Player(Assignment(job, script, tokens, tmp_path))._memory()  # pyright: ignore[reportPrivateUsage]

    assert type(memory("summarize", "sync")) is BuiltInSummary
    assert type(memory("sliding-window", "sync")) is BuiltInBuffer
    writer = memory("summarize", "sync").llm
    assert writer.max_tokens == SHORT.summary
    assert writer.additional_kwargs["extra_body"]["id_slot"] == 4
    assert memory("summarize", "lookahead").keep == pytest.approx(SHORT.keep / (REACHED * SHORT.hard))


def test_a_strategy_that_is_none_of_its_own_is_refused() -> None:
    job: Any = SimpleNamespace(variant=Variant("isolate", "isolate"))
    assignment: Any = SimpleNamespace(job=job)

    async def main() -> None:
        async for _ in LlamaIndexHarness().run(assignment):
            raise AssertionError("it ran")

    with pytest.raises(ConfigurationError, match="cannot run 'isolate': choose from summarize, sliding-window"):
        asyncio.run(main())
