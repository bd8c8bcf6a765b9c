"""The benchmark's harness ``autogen``: an `AssistantAgent` in one long run with tools.

``smoothagent bench --harness autogen --strategy sliding-window``: with AutoGen's `BufferedChatCompletionContext` in the
mode ``sync`` and the drop-in in the mode ``lookahead``. For ``summarize``, ``offload`` and ``keep-recent`` AutoGen has
nothing of its own, so the mode ``sync`` is ours on the critical path. What the agent decides is scripted inside of the
model client; what the model writes is real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core import model_context as built_in
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import AssistantMessage, CreateResult, LLMMessage, ModelInfo, RequestUsage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from smoothagent import CommitReport, ConfigurationError, OpenAIBackend
from smoothagent_autogen.codec import AutoGenCodec
from smoothagent_autogen.contexts import BufferedChatCompletionContext, LookaheadChatCompletionContext
from smoothagent_autogen.contexts.windows import Window
from smoothagent_autogen.flat import Flattening
from smoothagent_bench import tool
from smoothagent_bench.job import Assignment
from smoothagent_bench.measured import Measured
from smoothagent_bench.record import Row
from smoothagent_bench.rows import rows_of
from smoothagent_bench.sides import LOOKAHEAD, WARM, Meter
from smoothagent_bench.strategies import build, reached_hard

KINDS = ("summarize", "offload", "keep-recent", "sliding-window")
"""Strategies that can be run."""

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")
"""What AutoGen is told of the served model."""


class AutoGenHarness:
    """Runs the benchmark's script through one of AutoGen's agents.

    Attributes:
        kinds: the strategies it can run.
    """

    kinds = KINDS

    async def run(self, assignment: Assignment) -> AsyncGenerator[Row]:
        """A row a turn; the last one after everything was closed.

        Raises:
            ConfigurationError: a strategy that it cannot run.
        """
        kind = assignment.job.variant.kind
        if kind not in KINDS:
            raise ConfigurationError(f"the harness autogen cannot run {kind!r}: choose from {', '.join(KINDS)}")
        player = Player(assignment)
        work = player.work()
        async for row in rows_of(work, player.queue):
            yield row


class Scripted(OpenAIChatCompletionClient):
    """The served model, whose player hears what it writes and says which tool that calls."""

    player: Player

    async def _create_stream_chunks(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """As the client's own, which tells nobody what was cached."""
        async for chunk in super()._create_stream_chunks(*args, **kwargs):
            told = cached_in(chunk.usage)
            self.player.cached = self.player.cached if told is None else told
            yield chunk

    async def create_stream(self, messages: Sequence[LLMMessage], **kwargs: Any) -> AsyncGenerator[Any, None]:
        """As the client's own, and at its end the call that the script says."""
        began = time.perf_counter()
        async for piece in self.player.follow(list(messages), began, super().create_stream(messages, **kwargs)):
            yield piece


def cached_in(usage: Any) -> int | None:
    """Tokens found in the KV cache, where a server says so."""
    return getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None)


class Player:
    """One agent's run: says what it decides, runs its tools, and measures.

    Args:
        assignment: what to run.

    Attributes:
        queue: a row a turn, and None at the end.
        cached: tokens of the last prompt that were found in the KV cache.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._job, self._steps = assignment, assignment.job, assignment.script.steps
        self.queue: asyncio.Queue[Row | None] = asyncio.Queue()
        self.cached: int | None = None
        self._codec, self._flat = AutoGenCodec(), Flattening()
        self._backend: OpenAIBackend | None = None
        self._started = self._ready = time.perf_counter()
        self._number = 0
        self._before: list[LLMMessage] = []
        self._report: CommitReport | None = None
        self._held: Row | None = None
        self._context = self._made()
        self._meter = self._metered()

    async def work(self) -> None:
        """The agent's run."""
        script, context = self._assignment.script, self._context
        bash = FunctionTool(self._bash, name="bash", description=_DESCRIPTION)
        agent = AssistantAgent(
            "agent",
            self._client(),
            tools=[bash],
            model_context=context,
            system_message=script.system,
            model_client_stream=True,
            max_tool_iterations=len(self._steps),
        )
        try:
            await agent.run(task=script.steps[0].user)
        finally:
            await context.clear()
            await self._close()
        if self._held is not None:
            self.queue.put_nowait(self._settled(self._held))

    async def _bash(self, command: str) -> str:
        """The agent's tool, and what the user says next."""
        del command
        step = self._steps[self._number - 1]
        call = tool.call(self._number - 1, step.read.argv)
        output = await tool.run(call, Path(self._job.workspace), self._job.tool_seconds)
        self._ready = time.perf_counter()
        return f"{output}\n{self._steps[self._number].user}"

    async def follow(
        self, messages: list[LLMMessage], began: float, stream: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Hear an answer, and end it with the call that the script says."""
        self.cached, arrivals, result = None, list[float](), None
        async for piece in stream:
            if isinstance(piece, CreateResult):
                result = piece
                continue
            arrivals.append(time.perf_counter())
            yield piece
        if result is None:
            raise ConfigurationError("the model client ended without a result")
        if self._held is not None:
            self.queue.put_nowait(self._held)
        self._held = self._settled(self._row(messages, began, arrivals, result.usage))
        self._number += 1
        self._before = [*messages, AssistantMessage(content=str(result.content), source="agent")]
        if self._number < len(self._steps):
            wire = tool.call(self._number - 1, self._steps[self._number - 1].read.argv)
            function = wire["function"]
            call = FunctionCall(id=wire["id"], name="bash", arguments=function["arguments"])
            said = {"content": [call], "thought": result.content, "finish_reason": "function_calls"}
            result = result.model_copy(update=said)
        yield result

    # ---- what is run ----------------------------------------------------------------------------

    def _made(self) -> ChatCompletionContext:
        job = self._job
        if job.mode == "none":
            return built_in.UnboundedChatCompletionContext()
        if job.variant.kind == "sliding-window" and job.mode == "sync":
            return built_in.BufferedChatCompletionContext(self._buffer_size)
        self._backend = OpenAIBackend(
            job.base_url, job.model, api_key=job.api_key, slots=job.slots, lookahead_url=job.lookahead_url
        )
        if job.variant.kind == "sliding-window":
            return BufferedChatCompletionContext(self._buffer_size, backend=self._backend)
        return LookaheadChatCompletionContext(
            lambda: build(job.variant, job.profile, self._assignment.store),
            backend=self._backend,
            lookahead=job.mode == "lookahead",
        )

    @property
    def _buffer_size(self) -> int:
        return 2 * (self._job.variant.window_turns or self._job.profile.window_turns)

    def _client(self) -> Scripted:
        job = self._job
        extra = dict[str, Any](job.extra_body)
        if self._backend is None and job.slots:
            extra |= {"id_slot": job.slots[0], "cache_prompt": True}
        more: dict[str, Any] = {"extra_body": extra}
        client = Scripted(
            model=job.model,
            base_url=job.base_url,
            api_key=job.api_key,
            model_info=INFO,
            temperature=0,
            max_tokens=job.profile.sizes_for(job.variant.kind)[1],
            max_retries=0,
            timeout=600,
            default_headers={"Connection": "close"},
            include_name_in_message=False,
            **more,
            stream_options={"include_usage": True},
        )
        client.player = self
        return client

    async def _close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            await asyncio.sleep(0.1)  # what is cancelled ends on the lane
            await backend.aclose()

    # ---- what is measured -----------------------------------------------------------------------

    def _row(self, messages: Sequence[LLMMessage], began: float, arrivals: list[float], usage: RequestUsage) -> Row:
        job = self._job
        cached = self.cached
        measured = Measured(
            started=self._started,
            ready=self._ready,
            began=began,
            arrivals=arrivals,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=usage.completion_tokens,
        )
        commit, lookahead, known = self._outcome(messages, cached)
        whole = [*self._before, *messages[-1:]] if self._before else messages
        turns = sum(isinstance(message, AssistantMessage) for message in whole)
        reached = reached_hard(job.variant, job.profile, turns=turns, tokens=self._count(whole))
        return measured.row(job, self._number, commit=commit, lookahead=lookahead, known=known, reached=reached)

    def _outcome(self, messages: Sequence[LLMMessage], cached: int | None) -> tuple[bool, str, int | None]:
        """Whether the request is the first with a transformed context, how it was made, and what was known of it."""
        context = self._context
        if isinstance(context, LookaheadChatCompletionContext):
            report = context.last_commit
            if report is None or report is self._report:
                return False, "none", None
            self._report = report
            return (
                True,
                LOOKAHEAD[report.kind] if self._job.mode == "lookahead" else "none",
                report.known_tokens or None,
            )
        changed = len(messages) <= len(self._before)
        if not isinstance(context, Window) or not changed:
            return changed, "none", None
        known = self._count(messages[:-1])
        return True, "hit" if (cached or 0) >= WARM * known else "late", known

    def _metered(self) -> Meter | None:
        context = self._context
        if isinstance(context, LookaheadChatCompletionContext):
            return Meter(context.ledger)
        return Meter(context.ledger) if isinstance(context, Window) else None

    def _settled(self, row: Row) -> Row:
        return row if self._meter is None else self._meter.settle(row)

    def _count(self, messages: Sequence[LLMMessage]) -> int:
        return sum(self._assignment.tokens.count(self._codec.decode(m)) for m in self._flat.flat(messages))


_DESCRIPTION = str(tool.DEFINITION["function"]["description"])
