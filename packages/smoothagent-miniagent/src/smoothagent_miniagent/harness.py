"""The benchmark's harness ``miniagent``: a Mini-Agent agent in one long run with tools.

``smoothagent bench --harness miniagent --strategy summarize``: with Mini-Agent's own summarizer in the mode ``sync``
and `attach` in the mode ``lookahead``. For ``offload`` and ``keep-recent`` Mini-Agent has nothing of its own, so the
mode ``sync`` is ours on the critical path. Mini-Agent itself runs where ``mini_agent`` can be imported, and the
stand-in elsewhere; the report says which. What the agent decides is scripted behind the LLM client; what the model
writes is real.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncGenerator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI, AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from smoothagent import CommitReport, ConfigurationError, OpenAIBackend
from smoothagent_bench import tool
from smoothagent_bench.job import Assignment
from smoothagent_bench.measured import Measured
from smoothagent_bench.record import Row
from smoothagent_bench.rows import rows_of
from smoothagent_bench.sides import LOOKAHEAD, Meter
from smoothagent_bench.strategies import build, reached_hard
from smoothagent_miniagent import standin
from smoothagent_miniagent.attached import Attachment, attach, message_of
from smoothagent_miniagent.codec import MiniAgentCodec
from smoothagent_miniagent.tools import Result, Tool

KINDS = ("summarize", "offload", "keep-recent")
"""Strategies that can be run."""


class MiniAgentHarness:
    """Runs the benchmark's script through a Mini-Agent agent.

    Attributes:
        kinds: the strategies it can run.
        played_by: whose agent it is.
    """

    kinds = KINDS
    played_by = "Mini-Agent's own Agent" if find_spec("mini_agent") else "the stand-in for Mini-Agent's Agent"

    async def run(self, assignment: Assignment) -> AsyncGenerator[Row]:
        """A row a turn; the last one after everything was closed.

        Raises:
            ConfigurationError: a strategy that it cannot run.
        """
        kind = assignment.job.variant.kind
        if kind not in KINDS:
            raise ConfigurationError(f"the harness miniagent cannot run {kind!r}: choose from {', '.join(KINDS)}")
        player = Player(assignment)
        async for row in rows_of(player.work(), player.queue):
            yield row


class Player:
    """One agent's run: says what it decides, runs its tool, and measures.

    Args:
        assignment: what to run.

    Attributes:
        queue: a row a turn, and None at the end.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._job, self._steps = assignment, assignment.job, assignment.script.steps
        self.queue: asyncio.Queue[Row | None] = asyncio.Queue()
        job = assignment.job
        self._client = AsyncOpenAI(
            base_url=job.base_url,
            api_key=job.api_key,
            timeout=600,
            max_retries=0,
            default_headers={"Connection": "close"},
        )
        self._backend: OpenAIBackend | None = None
        self._attached: Attachment | None = None
        self._meter: Meter | None = None
        self._report: CommitReport | None = None
        self._started = self._ready = time.perf_counter()
        self._number, self._sent = 0, 0
        self._held: Row | None = None
        self._agent = self._made()

    async def work(self) -> None:
        """The agent's run."""
        self._started = self._ready = time.perf_counter()
        try:
            self._agent.add_user_message(self._steps[0].user)
            said = await self._agent.run()
        finally:
            await self._close()
        if self._held is not None:
            self.queue.put_nowait(self._settled(self._held))
        if self._number < len(self._steps):
            raise ConfigurationError(f"the agent ended after {self._number} turns: {said}")

    # ---- what is run ----------------------------------------------------------------------------

    def _made(self) -> Any:
        job, script = self._job, self._assignment.script
        agent = _agent(
            _llm(self._transport(), job.model),
            system_prompt=f"{script.system}\n\nCurrent Workspace: {job.workspace}",
            tools=[_Bash(self)],
            max_steps=len(self._steps) + 1,
            workspace_dir=str(self._assignment.store),
            token_limit=job.profile.hard,
        )
        # What the server has counted decides alone: its estimate from characters would begin elsewhere than ours.
        agent._estimate_tokens = _zero
        if job.mode == "none":
            agent._summarize_messages = _nothing
        elif job.mode == "lookahead" or job.variant.kind != "summarize":
            self._backend = OpenAIBackend(
                job.base_url, job.model, api_key=job.api_key, slots=job.slots, lookahead_url=job.lookahead_url
            )
            strategy = build(job.variant, job.profile, self._assignment.store)
            self._attached = attach(agent, strategy, backend=self._backend, lookahead=job.mode == "lookahead")
            self._meter = Meter(self._attached.ledger)
        return agent

    def _transport(self) -> Any:
        """In the place of the vendor's client: it streams, measures, and adds the call that the script says."""
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))

    async def _create(self, **params: Any) -> Any:
        wanted = bool(params.get("stream"))
        chunks = self._chunks(params) if "tools" in params else self._summary(params)
        if wanted:
            return chunks
        state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
        async for chunk in chunks:
            state.handle_chunk(chunk)
        return state.current_completion_snapshot

    async def _summary(self, params: Mapping[str, Any]) -> AsyncGenerator[ChatCompletionChunk]:
        """Mini-Agent's own summarizer asks."""
        async for chunk in await self._streaming(params, self._job.profile.summary):
            yield chunk

    async def _chunks(self, params: Mapping[str, Any]) -> AsyncGenerator[ChatCompletionChunk]:
        """A turn's answer."""
        began, arrivals, last = time.perf_counter(), list[float](), None
        length = self._job.profile.sizes_for(self._job.variant.kind)[1]
        async for chunk in await self._streaming(params, length):
            if any(choice.delta.content for choice in chunk.choices):
                arrivals.append(time.perf_counter())
            if chunk.usage is not None:
                last = chunk
                continue
            yield chunk
        if last is None:
            raise ConfigurationError("the server told no usage: it must honour stream_options.include_usage")
        self._turned(len(params["messages"]), began, arrivals, last.usage)
        if self._number < len(self._steps):
            yield _calling(last, self._number - 1, self._steps[self._number - 1].read.argv)
        yield last

    async def _streaming(self, params: Mapping[str, Any], max_tokens: int) -> AsyncStream[ChatCompletionChunk]:
        create: Any = self._client.chat.completions.create
        return await create(**self._given(params, max_tokens))

    def _given(self, params: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        job = self._job
        extra = {**dict(params.get("extra_body") or {}), **job.extra_body}
        if self._backend is None and job.slots:
            extra |= {"id_slot": job.slots[0], "cache_prompt": True}
        more = {"temperature": 0, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        return {**params, **more, "extra_body": extra}

    async def bash(self) -> str:
        """The agent's tool, and what the user says next."""
        call = tool.call(self._number - 1, self._steps[self._number - 1].read.argv)
        output = await tool.run(call, Path(self._job.workspace), self._job.tool_seconds)
        self._ready = time.perf_counter()
        return f"{output}\n{self._steps[self._number].user}"

    async def _close(self) -> None:
        if self._attached is not None:
            self._attached.detach()
            await self._attached.runtime.aclose()
        if self._backend is not None:
            await asyncio.sleep(0.1)  # what is cancelled ends on the lane
            await self._backend.aclose()
        await self._client.close()

    # ---- what is measured -----------------------------------------------------------------------

    def _turned(self, sent: int, began: float, arrivals: list[float], usage: Any) -> None:
        job = self._job
        measured = Measured(
            started=self._started,
            ready=self._ready,
            began=began,
            arrivals=arrivals,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=getattr(usage.prompt_tokens_details, "cached_tokens", None),
            completion_tokens=usage.completion_tokens,
        )
        commit, lookahead, known = self._outcome(sent)
        row = measured.row(job, self._number, commit=commit, lookahead=lookahead, known=known, reached=self._reached())
        if self._held is not None:
            self.queue.put_nowait(self._held)
        self._held = self._settled(row)
        self._number, self._sent = self._number + 1, sent

    def _outcome(self, sent: int) -> tuple[bool, str, int | None]:
        """Whether the request is the first with a transformed context, how it was made, and what was known of it."""
        if self._attached is None:
            return sent <= self._sent, "none", None
        report = self._attached.last_commit
        if report is None or report is self._report:
            return False, "none", None
        self._report = report
        lookahead = LOOKAHEAD[report.kind] if self._job.mode == "lookahead" else "none"
        return True, lookahead, report.known_tokens or None

    def _reached(self) -> bool:
        """Whether the strategy's trigger was reached, in what an uncommitted request would have held."""
        job, messages = self._job, self._agent.messages
        if job.mode == "none":
            return False
        codec = MiniAgentCodec(message_of(self._agent))
        view = messages if self._attached is None else self._attached.runtime.view(messages)
        turns = sum(message.role == "assistant" for message in view)
        tokens = sum(self._assignment.tokens.count(codec.decode(message)) for message in view)
        return reached_hard(job.variant, job.profile, turns=turns, tokens=tokens)

    def _settled(self, row: Row) -> Row:
        return row if self._meter is None else self._meter.settle(row)


class _Bash(Tool):
    """The agent's tool."""

    def __init__(self, player: Player) -> None:
        function = tool.DEFINITION["function"]
        super().__init__(function["name"], function["description"], function["parameters"])
        self._player = player

    async def execute(self, command: str) -> Result:
        """Run what the script says."""
        del command
        return Result(True, await self._player.bash())


def _calling(like: ChatCompletionChunk, number: int, argv: Any) -> ChatCompletionChunk:
    """A chunk with the call that the script says."""
    call = {"index": 0, **tool.call(number, argv)}
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
    return ChatCompletionChunk.model_validate({**like.model_dump(), "usage": None, "choices": [choice]})


def _agent(llm: Any, **given: Any) -> Any:
    if not find_spec("mini_agent"):
        return standin.Agent(llm, **given)
    module: Any = importlib.import_module("mini_agent.agent")
    module.print = _quiet  # rows go to standard output
    agent = module.Agent(llm, **given)
    agent.logger = _Silent()
    return agent


def _llm(transport: Any, model: str) -> Any:
    """Mini-Agent's client for OpenAI's API, over a transport of ours."""
    if not find_spec("mini_agent"):
        inner = standin.OpenAIClient("x", "http://127.0.0.1:1/v1", model, standin.RetryConfig(enabled=False))
        llm: Any = standin.LLMClient(inner)
    else:
        provider = importlib.import_module("mini_agent.schema").LLMProvider.OPENAI
        retry = importlib.import_module("mini_agent.retry").RetryConfig(enabled=False)
        made: Any = importlib.import_module("mini_agent.llm").LLMClient
        llm = made("x", provider, "http://127.0.0.1:1/v1", model, retry)
    llm._client.client = transport
    return llm


class _Silent:
    """In the place of Mini-Agent's log of each run."""

    def __getattr__(self, name: str) -> Any:
        return _quiet


def _quiet(*args: Any, **kwargs: Any) -> None:
    """Says nothing."""


def _zero() -> int:
    return 0


async def _nothing() -> None:
    """In the place of Mini-Agent's summarizer."""
