"""The benchmark's harness ``llamaindex``: agents and memories of LlamaIndex's, its own against ours.

``smoothagent bench --harness llamaindex --strategy summarize --strategy sliding-window``: a conversation in many short
runs, with LlamaIndex's `ChatSummaryMemoryBuffer` (for the window its `ChatMemoryBuffer`) in the mode ``sync`` and the
drop-in in the mode ``lookahead``. ``--strategy offload --strategy keep-recent``: one long run of a `FunctionAgent` with
tools; LlamaIndex has nothing of its own there, so the mode ``sync`` is ours on the critical path. What the agent
decides is scripted inside of the LLM object; what the model writes is real.
"""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent as BuiltInAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.memory import BaseMemory
from llama_index.core.memory import ChatMemoryBuffer as BuiltInBuffer
from llama_index.core.memory import ChatSummaryMemoryBuffer as BuiltInSummary
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import PrivateAttr

from smoothagent import CommitReport, ConfigurationError, OpenAIBackend
from smoothagent_bench import tool
from smoothagent_bench.job import Assignment
from smoothagent_bench.measured import Measured
from smoothagent_bench.record import Row
from smoothagent_bench.rows import rows_of
from smoothagent_bench.sides import LOOKAHEAD, WARM, Meter
from smoothagent_bench.strategies import build, reached_hard
from smoothagent_llamaindex.agents import FunctionAgent
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike
from smoothagent_llamaindex.conversations import Conversation
from smoothagent_llamaindex.llm import LookaheadMixin, with_lookahead
from smoothagent_llamaindex.memory import ChatMemoryBuffer, ChatSummaryMemoryBuffer

MEMORIES = ("summarize", "sliding-window")
"""Strategies that are a memory's in LlamaIndex, between runs."""
REACHED = 0.75
"""The summary memory's limit as a fraction of the workload's: it counts texts only and begins late, and the run is as
long as the others'."""
KINDS = (*MEMORIES, "offload", "keep-recent")
"""Strategies that can be run."""


class LlamaIndexHarness:
    """Runs the benchmark's script through LlamaIndex's agents.

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
            raise ConfigurationError(f"the harness llamaindex cannot run {kind!r}: choose from {', '.join(KINDS)}")
        player = Player(assignment)
        work = player.converse() if kind in MEMORIES else player.work()
        async for row in rows_of(work, player.queue):
            yield row


class Scripted(OpenAILike):
    """The served model, whose player hears what it writes and says which tool that calls."""

    _player: Any = PrivateAttr(default=None)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """As the LLM's own, and then the call that the script says."""
        began = time.perf_counter()
        stream = await super().astream_chat(messages, **kwargs)
        return self._player.follow(list(messages), began, stream)


class Player:
    """One agent's run: says what it decides, runs its tools, and measures.

    Args:
        assignment: what to run.

    Attributes:
        queue: a row a turn, and None at the end.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._job, self._steps = assignment, assignment.job, assignment.script.steps
        self.queue: asyncio.Queue[Row | None] = asyncio.Queue()
        self._codec = LlamaIndexCodec()
        self._backend: OpenAIBackend | None = None
        self._started = self._ready = time.perf_counter()
        self._number = 0
        self._before: list[ChatMessage] = []
        self._report: CommitReport | None = None
        self._meter: Meter | None = None
        self._agent: Any = None
        self._held: Row | None = None

    # ---- one long run ---------------------------------------------------------------------------

    async def work(self) -> None:
        """A run with tools: the strategy works on what the LLM is sent."""
        job, script = self._job, self._assignment.script
        llm: Any = self._llm()
        if job.mode != "none":
            self._backend = self._backend_of(beside=True)
            llm = with_lookahead(
                llm,
                lambda: build(job.variant, job.profile, self._assignment.store),
                backend=self._backend,
                lookahead=job.mode == "lookahead",
            )
        bash = FunctionTool.from_defaults(async_fn=self._bash, name="bash", description=_DESCRIPTION)
        self._agent = FunctionAgent(tools=[bash], llm=llm, system_prompt=script.system)
        try:
            await self._agent.run(user_msg=script.steps[0].user, max_iterations=10_000)
        finally:
            if isinstance(llm, LookaheadMixin):
                llm._lookahead.conversations.pool.close()  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
            await self._close()
        self._last()

    async def _bash(self, command: str) -> str:
        """The agent's tool, and what the user says next."""
        del command
        step = self._steps[self._number - 1]
        call = tool.call(self._number - 1, step.read.argv)
        output = await tool.run(call, Path(self._job.workspace), self._job.tool_seconds)
        self._ready = time.perf_counter()
        return f"{output}\n{self._steps[self._number].user}"

    # ---- many short runs ------------------------------------------------------------------------

    async def converse(self) -> None:
        """Runs without tools: the memory works on what is between them."""
        job, script = self._job, self._assignment.script
        if job.mode == "lookahead":
            self._backend = self._backend_of(beside=False)
        memory = self._memory()
        upcoming: Any = getattr(memory, "_upcoming", None)
        self._meter = Meter(upcoming.ledger) if upcoming is not None else None
        agent: Any = BuiltInAgent(tools=[], llm=self._llm(), system_prompt=script.system)
        try:
            said = script.steps[0].user
            for number, step in enumerate(script.steps):
                await agent.run(user_msg=said, memory=memory)
                if number + 1 < len(script.steps):
                    call = tool.call(number, step.read.argv)
                    output = await tool.run(call, Path(job.workspace), job.tool_seconds)
                    said = f"{output}\n{script.steps[number + 1].user}"
                self._ready = time.perf_counter()
        finally:
            if upcoming is not None:
                upcoming.forget()
            await self._close()
        self._last()

    def _memory(self) -> BaseMemory:
        job, profile, tokens = self._job, self._job.profile, self._assignment.tokens
        counts: dict[str, Any] = {"tokenizer_fn": lambda text: range(tokens.text(text))}
        if job.mode == "none":
            return BuiltInBuffer.from_defaults(token_limit=10**9, **counts)
        ours: dict[str, Any] = {"backend": self._backend} if job.mode == "lookahead" else {}
        if job.variant.kind == "sliding-window":
            buffer = ChatMemoryBuffer if ours else BuiltInBuffer
            return buffer.from_defaults(token_limit=self._token_limit, **counts, **ours)
        # The built-in's own request must not take the agent's slot, as it would not on a server with a shared cache.
        writer = self._llm(slot=1, max_tokens=profile.summary)
        counts |= {"llm": writer, "token_limit": self._token_limit}
        if not ours:
            return BuiltInSummary.from_defaults(**counts)
        kept = profile.keep / (REACHED * profile.hard)
        return ChatSummaryMemoryBuffer.from_defaults(keep=kept, accept_cut_off=True, **counts, **ours)

    # ---- both -----------------------------------------------------------------------------------

    async def follow(
        self, messages: list[ChatMessage], began: float, stream: AsyncGenerator[ChatResponse, None]
    ) -> AsyncGenerator[ChatResponse, None]:
        """Hear an answer, and end it with the call that the script says."""
        arrivals, usage, last = list[float](), None, None
        async for last in stream:
            usage = getattr(last.raw, "usage", None) or usage
            if last.delta:
                arrivals.append(time.perf_counter())
            yield last
        if self._held is not None:
            self.queue.put_nowait(self._held)
        self._held = self._settled(self._row(messages, began, arrivals, usage))
        answer = ChatMessage(role=MessageRole.ASSISTANT, blocks=list(last.message.blocks) if last is not None else [])
        self._number += 1
        if self._job.variant.kind not in MEMORIES and self._number < len(self._steps):
            wire = tool.call(self._number - 1, self._steps[self._number - 1].read.argv)
            function = wire["function"]
            answer.blocks.append(
                ToolCallBlock(tool_call_id=wire["id"], tool_name="bash", tool_kwargs=function["arguments"])
            )
        self._before = [*messages, answer]
        yield ChatResponse(message=answer, delta="", raw=None if last is None else last.raw)

    def _last(self) -> None:
        if self._held is not None:
            self.queue.put_nowait(self._settled(self._held))

    def _llm(self, slot: int = 0, max_tokens: int | None = None) -> Scripted:
        job = self._job
        extra = dict[str, Any](job.extra_body)
        routed = job.mode == "none" or (job.mode == "sync" and job.variant.kind in MEMORIES)
        if routed and job.slots:
            extra |= {"id_slot": job.slots[slot], "cache_prompt": True}
        llm = Scripted(
            model=job.model,
            api_base=job.base_url,
            api_key=job.api_key,
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_tokens=max_tokens or job.profile.sizes_for(job.variant.kind)[1],
            max_retries=0,
            timeout=600,
            default_headers={"Connection": "close"},
            additional_kwargs={"extra_body": extra, "stream_options": {"include_usage": True}},
        )
        llm._player = self  # pyright: ignore[reportPrivateUsage]
        return llm

    def _backend_of(self, *, beside: bool) -> OpenAIBackend:
        job = self._job
        return OpenAIBackend(
            *(job.base_url, job.model),
            api_key=job.api_key,
            slots=job.slots,
            # A memory cannot have anything brought from there: it only sees the agent's calls go by.
            lookahead_url=job.lookahead_url if beside else None,
        )

    async def _close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            await asyncio.sleep(0.1)  # what is cancelled ends on the lane
            await backend.aclose()

    def _row(self, messages: Sequence[ChatMessage], began: float, arrivals: list[float], usage: Any) -> Row:
        job = self._job
        details = getattr(usage, "prompt_tokens_details", None)
        prompt = int(getattr(usage, "prompt_tokens", 0) or 0)
        cached: int | None = getattr(details, "cached_tokens", None)
        measured = Measured(
            started=self._started,
            ready=self._ready,
            began=began,
            arrivals=arrivals,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=int(getattr(usage, "completion_tokens", 0) or 0),
        )
        commit, lookahead, known = self._outcome(messages, cached)
        whole = [*self._before, *messages[-1:]] if self._before else messages
        reached = self._limit_reached(whole)
        return measured.row(job, self._number, commit=commit, lookahead=lookahead, known=known, reached=reached)

    def _limit_reached(self, whole: Sequence[ChatMessage]) -> bool:
        job, text = self._job, self._assignment.tokens.text
        if job.variant.kind in MEMORIES:  # which count the texts, and not what a template puts around them
            return sum(text(m.content or "") for m in whole if m.role != MessageRole.SYSTEM) > self._token_limit
        turns = sum(m.role == MessageRole.ASSISTANT for m in whole)
        return reached_hard(job.variant, job.profile, turns=turns, tokens=self._count(whole))

    @property
    def _token_limit(self) -> int:
        job, profile = self._job, self._job.profile
        if job.variant.kind == "sliding-window":
            return (job.variant.window_turns or profile.window_turns) * profile.step
        return int(REACHED * profile.hard) - self._assignment.tokens.text(self._assignment.script.system)

    def _outcome(self, messages: Sequence[ChatMessage], cached: int | None) -> tuple[bool, str, int | None]:
        """Whether the request is the first with a transformed context, how it was made, and what was known of it."""
        runtime = self._runtime()
        if runtime is not None:
            self._meter = self._meter or Meter(runtime.ledger)
            report = runtime.last_commit
            if report is None or report is self._report:
                return False, "none", None
            self._report = report
            return True, LOOKAHEAD[report.kind] if runtime.lookahead else "none", report.known_tokens or None
        pairs = zip(self._before, messages, strict=False)
        changed = len(messages) < len(self._before) or not all(alike(a, b) for a, b in pairs)
        if self._job.mode != "lookahead" or not changed:
            return changed and self._job.mode != "none", "none", None
        known = self._count(messages[:-1])
        return True, "hit" if (cached or 0) >= WARM * known else "late", known

    def _runtime(self) -> Conversation | None:
        lookahead = getattr(getattr(self._agent, "llm", None), "_lookahead", None)
        if lookahead is None:
            return None
        found = list(lookahead.conversations.pool._runtimes.values())
        return found[0][0] if found else None

    def _settled(self, row: Row) -> Row:
        return row if self._meter is None else self._meter.settle(row)

    def _count(self, messages: Sequence[ChatMessage]) -> int:
        return sum(self._assignment.tokens.count(self._codec.decode(m)) for m in messages)


_DESCRIPTION = str(tool.DEFINITION["function"]["description"])
