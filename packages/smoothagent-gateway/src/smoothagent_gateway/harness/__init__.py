"""The benchmark's harnesses ``gateway``, ``gateway-langgraph``, ``gateway-pydantic-ai``: another base URL, and no more.

``smoothagent bench --harness gateway --strategy summarize``: an agent of the openai client's, LangGraph's or
pydantic-ai's, straight at the server in the mode ``none``, through ``smoothagent gateway`` with ``lookahead = false``
in the mode ``sync`` and with it in the mode ``lookahead``. What the agent decides is scripted on the way (`Stage`);
what the model writes is real.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from smoothagent import ConfigurationError
from smoothagent_bench import tool
from smoothagent_bench.job import Assignment
from smoothagent_bench.measured import Measured
from smoothagent_bench.record import Row
from smoothagent_bench.rows import rows_of
from smoothagent_bench.strategies import build, reached_hard
from smoothagent_gateway.harness.agents import play_langgraph, play_openai, play_pydantic_ai
from smoothagent_gateway.harness.stage import Heard, Stage

KINDS = ("summarize", "offload", "keep-recent")
"""Strategies that can be run."""
Play = Callable[["Player", str], Awaitable[None]]
"""Runs an agent at a base URL."""
_COUNTS = {
    "prefilled_tokens": "background_prefilled",
    "generated_tokens": "background_generated",
    "wasted_tokens": "wasted",
    "late_commits": "late_commits",
    "mispredictions": "mispredictions",
    "failures": "failures",
}
"""The gateway's counts by what a row calls them."""
_LOOKAHEAD = {"hit": "hit", "late": "late", "sync": "miss"}


class GatewayHarness:
    """An agent of the openai client's.

    Attributes:
        kinds: the strategies it can run.
    """

    kinds = KINDS
    play: Play = staticmethod(play_openai)

    async def run(self, assignment: Assignment) -> AsyncGenerator[Row]:
        """A row a turn; the last one after everything was closed.

        Raises:
            ConfigurationError: a strategy that it cannot run.
        """
        kind = assignment.job.variant.kind
        if kind not in KINDS:
            raise ConfigurationError(f"the gateway's harnesses cannot run {kind!r}: choose from {', '.join(KINDS)}")
        player = Player(assignment)
        async for row in rows_of(player.work(self.play), player.queue):
            yield row


class LangGraphHarness(GatewayHarness):
    """A graph of LangGraph's, with LangChain's ``ChatOpenAI``."""

    play: Play = staticmethod(play_langgraph)


class PydanticAIHarness(GatewayHarness):
    """An agent of pydantic-ai's."""

    play: Play = staticmethod(play_pydantic_ai)


class Player:
    """One agent's run: says what it decides, runs its tool, and measures.

    Args:
        assignment: what to run.

    Attributes:
        queue: a row a turn, and None at the end.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self.job, self._steps = assignment, assignment.job, assignment.script.steps
        self.queue: asyncio.Queue[Row | None] = asyncio.Queue()
        self._number = 0
        self._held: Row | None = None
        self._started = self._ready = time.perf_counter()
        self._state: httpx.AsyncClient | None = None
        self._counts: Mapping[str, int] = {}
        self._view = 2  # messages that the server got last: at first system text and task
        self._tokens = self._grown = 0  # of those and their answer, and of what has come since

    @property
    def system(self) -> str:
        """The agent's system text."""
        return self._assignment.script.system

    @property
    def task(self) -> str:
        """What the user says first."""
        return self._steps[0].user

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return len(self._steps)

    async def work(self, play: Play) -> None:
        """The agent's run."""
        async with AsyncExitStack() as stack:
            target = self.job.base_url
            if self.job.mode != "none":
                target = await stack.enter_async_context(self._gateway())
                self._state = await stack.enter_async_context(
                    httpx.AsyncClient(base_url=target.removesuffix("/v1"), trust_env=False, timeout=30)
                )
            stage = await stack.enter_async_context(Stage(target, self._fields(), self._heard).serving())
            self._started = self._ready = time.perf_counter()
            await play(self, stage)
            if self._held is not None:
                self.queue.put_nowait(await self._settled(self._held))

    async def bash(self) -> str:
        """The agent's tool, and what the user says next."""
        call = tool.call(self._number - 1, self._steps[self._number - 1].read.argv)
        output = await tool.run(call, Path(self.job.workspace), self.job.tool_seconds)
        self._ready = time.perf_counter()
        said = f"{output}\n{self._steps[self._number].user}"
        self._grown += self._assignment.tokens.count_wire([{"role": "tool", "content": said}])
        return said

    # ---- what is run ----------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        job = self.job
        fields = {**job.extra_body, "temperature": 0, "max_tokens": job.profile.sizes_for(job.variant.kind)[1]}
        if job.mode == "none" and job.slots:
            fields |= {"id_slot": job.slots[0], "cache_prompt": True}
        return fields

    @asynccontextmanager
    async def _gateway(self) -> AsyncGenerator[str]:
        """``smoothagent gateway`` as a process of its own; its API's URL."""
        job = self.job
        with tempfile.TemporaryDirectory(prefix="smoothagent-gateway-") as folder:
            config = Path(folder) / "gateway.toml"
            config.write_text(_toml(self._settings()), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "import sys; from smoothagent.cli import main; sys.exit(main())"),
                *("gateway", "--config", str(config), "--no-state"),
                env={**os.environ, "SMOOTHAGENT_UPSTREAM_API_KEY": job.api_key},
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            try:
                line = (await process.stdout.readline()).decode()
                found = re.search(r"http://\S+/v1", line)
                if found is None:
                    raise ConfigurationError(f"the gateway did not start: {line.strip() or 'it said nothing'}")
                yield found[0]
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.wait()

    def _settings(self) -> dict[str, Any]:
        job, profile = self.job, self.job.profile
        kind = job.variant.kind
        strategy: dict[str, Any] = {"kind": kind}
        if kind == "summarize":
            strategy |= {"hard": profile.hard, "keep": profile.keep, "soft": profile.soft}
            strategy |= {"max_tokens": profile.summary, "accept_cut_off": True}
        elif kind == "offload":
            strategy |= {"hard": profile.offload_hard, "keep": profile.keep_outputs, "allow_unreadable": True}
        else:
            strategy |= {"turns": profile.keep_turns, "at_turns": profile.at_turns}
        build(job.variant, profile, self._assignment.store)  # refuses what is impossible
        told: dict[str, Any] = {"upstream": job.base_url, "port": 0, "lookahead": job.mode == "lookahead"}
        told |= {"store": str(self._assignment.store), "lookahead_url": job.lookahead_url}
        return {**told, "slots": list(job.slots) if job.slots else None, "strategy": strategy}

    # ---- what is measured -----------------------------------------------------------------------

    async def _heard(self, heard: Heard) -> dict[str, Any] | None:
        """A turn's answer was written; the call that the script says comes after it."""
        job = self.job
        turn = await self._turn()
        reached = self._reached()
        self._view, self._tokens = turn["messages"], heard.prompt_tokens + heard.completion_tokens
        self._grown = 0
        measured = Measured(
            started=self._started,
            ready=self._ready,
            began=heard.began,
            arrivals=heard.arrivals,
            prompt_tokens=heard.prompt_tokens,
            cached_tokens=heard.cached_tokens,
            completion_tokens=heard.completion_tokens,
        )
        commit = turn["commit"] != "none"
        lookahead = _LOOKAHEAD[turn["commit"]] if commit and job.mode == "lookahead" else "none"
        known = turn["known_tokens"] if commit else None
        row = measured.row(job, self._number, commit=commit, lookahead=lookahead, known=known, reached=reached)
        if self._held is not None:
            self.queue.put_nowait(self._held)
        self._held = await self._settled(row)
        self._number += 1
        if self._number < len(self._steps):
            return tool.call(self._number - 1, self._steps[self._number - 1].read.argv)
        return None

    def _reached(self) -> bool:
        """Whether the trigger was reached, in what an uncommitted request would have held."""
        job = self.job
        if job.mode == "none":
            return False
        # Each turn adds an answer and a result.
        return reached_hard(job.variant, job.profile, turns=self._view // 2, tokens=self._tokens + self._grown)

    async def _turn(self) -> dict[str, Any]:
        """What the gateway says of the last one; the view that it has sent."""
        nothing: dict[str, Any] = {"commit": "none", "known_tokens": None, "messages": 2}
        if self._state is None:
            return nothing
        conversations: list[Any] = (await self._state.get("/smoothagent/state")).json()["conversations"]
        turns: list[Any] = conversations[0]["turns"] if conversations else []
        return dict(turns[-1]) if turns else nothing

    async def _settled(self, row: Row) -> Row:
        """The row with the background work since the last one."""
        if self._state is None:
            return row
        now: dict[str, int] = (await self._state.get("/smoothagent/state")).json()["ledger"]
        new = {ours: getattr(row, ours) + now[name] - self._counts.get(name, 0) for name, ours in _COUNTS.items()}
        self._counts = now
        return replace(row, **new)


def _toml(values: Mapping[str, Any]) -> str:
    """Settings as a file; None is left out."""
    plain = {k: v for k, v in values.items() if v is not None and not isinstance(v, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]  # pyright: ignore[reportUnknownVariableType]
    return "\n".join(lines) + "\n"
