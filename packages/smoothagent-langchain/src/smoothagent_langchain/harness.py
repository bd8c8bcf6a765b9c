"""The benchmark's harness ``langchain``: a ``create_agent`` agent, LangChain's own middleware against ours.

``smoothagent bench --harness langchain --strategy summarize --strategy offload``: the mode ``sync`` has LangChain's
`SummarizationMiddleware` (for offload its `ContextEditingMiddleware`), the mode ``lookahead`` the drop-in, with the
same arguments. What the agent decides is scripted by a middleware inside of them all; what the model writes is real.
"""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ClearToolUsesEdit, ModelRequest, ModelResponse
from langchain.agents.middleware import ContextEditingMiddleware as BuiltInEditing
from langchain.agents.middleware import SummarizationMiddleware as BuiltInSummaries
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from smoothagent import CommitReport, ConfigurationError, OpenAIBackend
from smoothagent_bench import tool
from smoothagent_bench.job import Assignment
from smoothagent_bench.measured import Measured
from smoothagent_bench.record import Row
from smoothagent_bench.sides import LOOKAHEAD, Meter
from smoothagent_bench.strategies import reached_hard
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.editing import ContextEditingMiddleware
from smoothagent_langchain.summarization import SummarizationMiddleware
from smoothagent_langchain.threads import Thread

CONFIG: Any = {"configurable": {"thread_id": "bench"}, "recursion_limit": 10_000}
KINDS = ("summarize", "offload")
"""Strategies of the benchmark that LangChain has a middleware for."""
CLEARED = "[cleared]"


class LangChainHarness:
    """Runs the benchmark's script through ``create_agent``.

    Attributes:
        kinds: the strategies that LangChain has a middleware for.
    """

    kinds = KINDS

    async def run(self, assignment: Assignment) -> AsyncGenerator[Row]:
        """A row a turn; the last one after everything was closed.

        Raises:
            ConfigurationError: a strategy that LangChain has no middleware for.
        """
        if assignment.job.variant.kind not in KINDS:
            kind = assignment.job.variant.kind
            raise ConfigurationError(f"LangChain has no built-in for {kind!r}: choose from {', '.join(KINDS)}")
        agent = BenchAgent(assignment)
        running = asyncio.create_task(agent.run())
        running.add_done_callback(lambda _: agent.ended())
        try:
            async for row in agent.rows():
                yield row
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


class BenchAgent:
    """One agent's run.

    Args:
        assignment: what to run.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._job = assignment, assignment.job
        self._queue: asyncio.Queue[Row | None] = asyncio.Queue()
        self._backend: OpenAIBackend | None = None
        self._middleware: Any = None

    async def run(self) -> None:
        """Play the whole script."""
        script = self._assignment.script
        try:
            model = self._model()
            self._middleware = self._transformation(model)
            player = Player(self._assignment, self._middleware, self._queue.put_nowait)
            agent: Any = create_agent(
                model,
                [StructuredTool.from_function(coroutine=player.bash, name="bash", description=_DESCRIPTION)],
                system_prompt=script.system,
                middleware=[*([self._middleware] if self._middleware is not None else []), player],
            )
            task: Any = {"messages": [HumanMessage(script.steps[0].user)]}
            await agent.ainvoke(task, {**CONFIG, "callbacks": [player.clock]})
            await self._close()
            if player.held is not None:
                self._queue.put_nowait(player.settled(player.held))
        finally:
            await self._close()

    def ended(self) -> None:
        """Nothing more comes, however it ended."""
        self._queue.put_nowait(None)

    async def rows(self) -> AsyncGenerator[Row]:
        """What it has measured, as it comes."""
        while (row := await self._queue.get()) is not None:
            yield row

    async def _close(self) -> None:
        middleware, self._middleware = self._middleware, None
        if getattr(middleware, "threads", None) is not None:
            middleware.threads.pool.close()
            await asyncio.sleep(0.1)  # what is cancelled ends on the lane
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.aclose()

    def _model(self) -> ChatOpenAI:
        job = self._job
        extra = dict[str, Any](job.extra_body)
        if job.mode != "lookahead" and job.slots:
            extra |= {"id_slot": job.slots[0], "cache_prompt": True}
        return ChatOpenAI(
            model=job.model,
            base_url=job.base_url,
            api_key=SecretStr(job.api_key),
            temperature=0,
            streaming=True,
            stream_usage=True,
            max_retries=0,
            timeout=600,
            extra_body=extra,
            default_headers={"Connection": "close"},
        )

    def _transformation(self, model: ChatOpenAI) -> Any:
        job, profile = self._job, self._job.profile
        if job.mode == "none":
            return None
        ours: dict[str, Any] = {}
        if job.mode == "lookahead":
            self._backend = OpenAIBackend(
                job.base_url, job.model, api_key=job.api_key, slots=job.slots, lookahead_url=job.lookahead_url
            )
            ours = {"backend": self._backend}
        counter = Counter(self._assignment)
        if job.variant.kind == "offload":
            edits = [ClearToolUsesEdit(trigger=profile.offload_hard, keep=profile.keep_outputs, placeholder=CLEARED)]
            editing = ContextEditingMiddleware if ours else BuiltInEditing
            return editing(edits=edits, token_counter=counter, **ours)
        shared: dict[str, Any] = {
            "trigger": ("tokens", profile.hard),
            "keep": ("tokens", profile.keep),
            "token_counter": counter,
            # Else the built-in summarizes 4,000 tokens at most, and nothing where those begin with no user message.
            "trim_tokens_to_summarize": None,
        }
        # Summaries end where the model ends them, or at the limit, in both. The built-in's own request must not take
        # the agent's slot, as it would not on a server with a shared cache.
        extra: dict[str, Any] = {}
        if job.mode == "sync" and job.slots:
            extra = {"id_slot": job.slots[1], "cache_prompt": True}
        writer = model.model_copy(update={"max_tokens": profile.summary, "extra_body": extra, "streaming": False})
        if ours:
            limit = {"max_summary_tokens": profile.summary, "accept_cut_off": True}
            return SummarizationMiddleware(writer, **limit, **shared, **ours)
        return BuiltInSummaries(writer, **shared)


_DESCRIPTION = str(tool.DEFINITION["function"]["description"])


class Counter:
    """Tokens of LangChain messages by the served tokenizer, each message counted once."""

    def __init__(self, assignment: Assignment) -> None:
        self._tokens, self._codec = assignment.tokens, LangChainCodec()
        self._known: dict[tuple[int, str], tuple[BaseMessage, int]] = {}

    def __call__(self, messages: Any, **_: Any) -> int:
        """Their sum."""
        return sum(map(self._one, cast("Sequence[BaseMessage]", messages)))

    def _one(self, message: BaseMessage) -> int:
        key = (id(message), str(message.content))
        if key not in self._known:
            self._known[key] = (message, self._tokens.count(self._codec.decode(message)))
        return self._known[key][1]


class Clock(BaseCallbackHandler):
    """When the tokens of the agent's own answer came."""

    run_inline = True

    def __init__(self) -> None:
        self.arrivals: list[float] | None = None

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        """A token, of text, of a call or of reasoning, or the empty one that begins or ends a stream."""
        if self.arrivals is None:
            return
        message = getattr(kwargs.get("chunk"), "message", None)
        more: dict[str, Any] = getattr(message, "additional_kwargs", None) or {}
        if token or getattr(message, "tool_call_chunks", None) or more.get("reasoning_content"):
            self.arrivals.append(time.perf_counter())


class Player(AgentMiddleware[Any, Any, Any]):
    """Innermost: says what the agent decides, runs its tool, and measures.

    Args:
        assignment: the script.
        middleware: the one under measurement; None in mode ``none``.
        done: told of each turn but the last, which is ``held``.
    """

    def __init__(self, assignment: Assignment, middleware: Any, done: Callable[[Row], None]) -> None:
        super().__init__()
        self._job, self._steps = assignment.job, assignment.script.steps
        self._count = Counter(assignment)
        self._middleware, self._done = middleware, done
        self._started = self._ready = time.perf_counter()
        self._number = 0
        self._reported = 0
        self._answer: AIMessage | None = None
        self._before: list[AnyMessage] = []
        self._report: CommitReport | None = None
        self._thread: Thread | None = None
        self._meter: Meter | None = None
        self.clock = Clock()
        self.held: Row | None = None

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """One turn: the model writes as many tokens as the script says, and calls the tool that it says."""
        number, step = self._number, self._steps[self._number]
        began, arrivals = time.perf_counter(), list[float]()
        self.clock.arrivals = arrivals
        try:
            settings = {**request.model_settings, "max_tokens": step.reply}
            response = await handler(request.override(model_settings=settings))
        finally:
            self.clock.arrivals = None
        answer = cast("AIMessage", response.result[0])
        row = self._row(request, began, arrivals, answer)
        if self.held is not None:
            self._done(self.held)
        self.held = self.settled(row)
        self._number += 1
        calls: list[Any] = []
        if self._number < len(self._steps):
            wire = tool.call(number, step.read.argv)
            arguments = json.loads(wire["function"]["arguments"])
            calls = [{"name": "bash", "args": arguments, "id": wire["id"], "type": "tool_call"}]
        made = answer.model_copy(update={"tool_calls": calls, "invalid_tool_calls": []})
        self._before, self._answer = list(request.messages), made
        return ModelResponse(result=[made], structured_response=None)

    async def bash(self, command: str) -> str:
        """The agent's tool, and what the user says next."""
        del command
        step = self._steps[self._number - 1]
        call = tool.call(self._number - 1, step.read.argv)
        output = await tool.run(call, Path(self._job.workspace), self._job.tool_seconds)
        self._ready = time.perf_counter()
        return f"{output}\n{self._steps[self._number].user}"

    def settled(self, row: Row) -> Row:
        """The row with the background work since the last one."""
        if self._meter is None and self._thread is not None:
            self._meter = Meter(self._thread.ledger)
        return row if self._meter is None else self._meter.settle(row)

    def _row(self, request: ModelRequest[Any], began: float, arrivals: Sequence[float], answer: AIMessage) -> Row:
        job, usage = self._job, cast("dict[str, Any]", answer.usage_metadata or {})
        commit, lookahead, known = self._outcome(request)
        prompt, completion = int(usage.get("input_tokens", 0)), int(usage.get("output_tokens", 0))
        reached = reached_hard(job.variant, job.profile, turns=self._number, tokens=self._tokens(request))
        self._reported = prompt + completion
        measured = Measured(
            started=self._started,
            ready=self._ready,
            began=began,
            arrivals=arrivals,
            prompt_tokens=prompt,
            cached_tokens=cast("dict[str, int]", usage.get("input_token_details") or {}).get("cache_read"),
            completion_tokens=completion,
        )
        return measured.row(job, self._number, commit=commit, lookahead=lookahead, known=known, reached=reached)

    def _outcome(self, request: ModelRequest[Any]) -> tuple[bool, str, int | None]:
        """Whether the request is the first with a transformed context, how it was made, and what was known of it."""
        if self._job.mode == "lookahead":
            thread = self._middleware.threads.find(request.messages, request.runtime)
            self._thread = thread or self._thread
            report = thread.last_commit if thread is not None else None
            if report is not None and report is not self._report:
                self._report = report
                return True, LOOKAHEAD[report.kind], report.known_tokens or None
            changed = self._changed(request.messages)  # by the built-in's own way
            return changed, "miss" if changed else "none", None
        return self._changed(request.messages), "none", None

    def _tokens(self, request: ModelRequest[Any]) -> int:
        """What LangChain's middleware judges its trigger by, of the messages as they were before it."""
        state: list[AnyMessage] = request.state.get("messages") or []
        if self._job.variant.kind == "offload":
            return self._count(state) - 1  # it has to be more than the trigger
        newest = [m for m in state[-1:] if self._answer is not None]
        before = [*self._before, *([self._answer] if self._answer is not None else []), *newest]
        return max(self._count(before or state), self._reported)

    def _changed(self, messages: Sequence[AnyMessage]) -> bool:
        """Whether it does not begin with all that the request before it did."""
        if self._job.mode == "none":
            return False
        pairs = zip(self._before, messages, strict=False)
        return len(messages) < len(self._before) or any(a.content != b.content for a, b in pairs)
