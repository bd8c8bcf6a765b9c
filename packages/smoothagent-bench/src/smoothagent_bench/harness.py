"""The plain harness: the paper's loop (Listing 2) with the openai client and the core's runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import entry_points
from pathlib import Path

from openai import AsyncOpenAI

from smoothagent import Delegation, LookaheadRuntime, MainRequest, OpenAIBackend, Prompt
from smoothagent.errors import ConfigurationError
from smoothagent_bench import tool
from smoothagent_bench.completion import Reply, stream_reply
from smoothagent_bench.job import Assignment, Harness
from smoothagent_bench.record import Row
from smoothagent_bench.sides import Side, SubAgent, Untouched, WithRuntime
from smoothagent_bench.sources import Read
from smoothagent_bench.strategies import KINDS, build, reached_hard
from smoothagent_bench.tokens import Wire
from smoothagent_bench.workload import Step

GROUP = "smoothagent.harnesses"


def find_harness(name: str) -> Harness:
    """The harness registered by a name.

    Raises:
        ConfigurationError: there is none, naming those there are; or it lacks a package.
    """
    found = {e.name: e for e in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigurationError(f"unknown harness {name!r}: installed are {', '.join(sorted(found)) or 'none'}")
    try:
        return found[name].load()()
    except ModuleNotFoundError as error:
        distribution = getattr(found[name].dist, "name", "its package")
        raise ConfigurationError(
            f"the harness {name!r} needs {error.name}, which is not installed: pip install '{distribution}[bench]'"
        ) from error


class PlainHarness:
    """The paper's loop: commit hook, model call, segment hook, tool, segment hook."""

    kinds = KINDS

    async def run(self, assignment: Assignment) -> AsyncGenerator[Row]:
        """A row a turn; the last one after the runtime was closed."""
        job = assignment.job
        client = AsyncOpenAI(
            base_url=job.base_url,
            api_key=job.api_key,
            timeout=600,
            # llama.cpp drops about one in 60 kept-alive connections, and a retry would spoil a measurement.
            default_headers={"Connection": "close"},
            max_retries=0,
        )
        async with client, aclosing(PlainAgent(assignment, client).turns()) as turns:
            async for row in turns:
                yield row


class PlainAgent:
    """One agent's run.

    Args:
        assignment: what to run.
        client: the client for its own calls.
    """

    def __init__(self, assignment: Assignment, client: AsyncOpenAI) -> None:
        self._assignment, self._job, self._script = assignment, assignment.job, assignment.script
        self._client = client
        self._workspace = Path(self._job.workspace)
        self._prompt = Prompt(model=self._job.model, params={"temperature": 0, "extra_body": self._job.extra_body})
        self._backend: OpenAIBackend | None = None
        self._side: Side = self._open()
        self._delegation: Delegation[Wire] | None = None
        self._messages: list[Wire] = [{"role": "system", "content": self._script.system}]
        self._started = time.perf_counter()

    async def turns(self) -> AsyncGenerator[Row]:
        """All turns. A row is given out when the next is there: the last also counts what closing gives up."""
        held: Row | None = None
        try:
            for number, step in enumerate(self._script.steps):
                row = await self._turn(number, step)
                if held is not None:
                    yield held
                held = row
        finally:
            await self._close()
        if held is not None:
            yield self._side.settle(held)

    def _open(self) -> Side:
        job = self._job
        if job.mode == "none":
            return Untouched(job.slots[0] if job.slots else None)
        self._backend = OpenAIBackend(
            job.base_url, job.model, api_key=job.api_key, slots=job.slots, lookahead_url=job.lookahead_url
        )
        return WithRuntime(
            LookaheadRuntime(
                build(job.variant, job.profile, self._assignment.store),
                backend=self._backend,
                prompt=self._prompt,
                session=f"agent-{job.agent}",
                tokens=self._assignment.tokens,
                lookahead=job.mode == "lookahead",
            )
        )

    async def _close(self) -> None:
        if self._delegation is not None:
            await self._delegation.aclose()
        await self._side.aclose()
        if self._backend is not None:
            await self._backend.aclose()

    # ---- one turn --------------------------------------------------------------------------------

    async def _turn(self, number: int, step: Step) -> Row:
        isolation = self._job.profile.isolation
        instructs = self._script.sub_agent is not None and number == isolation.delegates_at
        starts = isinstance(self._side, SubAgent) and number == isolation.delegates_at + 1
        if not starts:  # a sub-agent's first request ends with its instruction
            self._messages.append({"role": "user", "content": step.user})
        reached = starts or self._reached_hard()
        clock = time.perf_counter()
        self._messages = await self._side.commit(self._messages)
        commit_s = time.perf_counter() - clock
        delegation = self._delegation if instructs else None
        reply = await self._call(isolation.instruction_tokens if instructs else step.reply, delegation)
        row = self._row(number, reached, commit_s, reply)
        if delegation is not None:
            await self._hand_over(delegation, reply.text)
        else:
            await self._use_tool(number, step, reply)
        return self._side.settle(row)

    async def _call(self, max_tokens: int, delegation: Delegation[Wire] | None) -> Reply:
        # Before the request is opened: what a commit has to hand over first is part of the turn.
        started = time.perf_counter()
        async with self._side.request() as request:
            extras = dict(request.extras)
            call = {
                "model": self._job.model,
                "messages": self._messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                **extras,
                "extra_body": {**self._job.extra_body, **extras.get("extra_body", {})},
            }
            reply = await stream_reply(
                self._client,
                call,
                started=started,
                on_first_token=request.first_token,
                on_text=lambda text: _told(text, request, delegation),
            )
            request.usage(reply.usage)
        return reply

    async def _use_tool(self, number: int, step: Step, reply: Reply) -> None:
        call = tool.call(number, step.read.argv)
        self._messages.append({"role": "assistant", "content": reply.text, "tool_calls": [call]})
        self._side.boundary(self._messages)
        output, _ = await asyncio.gather(
            tool.run(call, self._workspace, self._job.tool_seconds), self._prepare_sub_agent(number)
        )
        self._messages.append(tool.result(call, output))
        self._side.boundary(self._messages)

    def _row(self, number: int, reached: bool, commit_s: float, reply: Reply) -> Row:
        job, outcome = self._job, self._side.outcome(reply.cached_tokens)
        return Row(
            strategy=job.variant.label,
            mode=job.mode,
            run=job.run,
            agent=job.agent,
            turn=number,
            commit=outcome.commit,
            commit_s=commit_s,
            ttft_s=reply.ttft_s,
            turn_s=commit_s + reply.ttft_s,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            completion_tokens=reply.completion_tokens,
            tbt_mean_s=reply.tbt_mean_s,
            tbt_p99_s=reply.tbt_p99_s,
            lookahead=outcome.lookahead,
            reached_hard=reached,
            delegated=isinstance(self._side, SubAgent),
            known_tokens=outcome.known_tokens,
            waited_s=outcome.waited_s,
            elapsed_s=time.perf_counter() - self._started,
        )

    def _reached_hard(self) -> bool:
        if self._job.mode == "none":
            return False
        tokens = self._assignment.tokens
        return reached_hard(
            self._job.variant,
            self._job.profile,
            turns=sum(m["role"] == "assistant" for m in self._messages),
            tokens=tokens.fixed(self._prompt) + tokens.count_wire(self._messages),
        )

    # ---- the sub-agent ---------------------------------------------------------------------------

    async def _prepare_sub_agent(self, number: int) -> None:
        """Open the delegation at its turn; on the turns from then on the sub-agent reads one part each."""
        plan, isolation = self._script.sub_agent, self._job.profile.isolation
        index = number - isolation.opens_at
        if plan is None or not isinstance(self._side, WithRuntime) or not 0 <= index < isolation.reads:
            return
        if self._delegation is None:
            head: list[Wire] = [{"role": "system", "content": plan.system}, {"role": "user", "content": plan.task}]
            self._delegation = self._side.runtime.delegate(prompt=self._prompt, head=head, instruction=_instruction)
        await self._sub_agent_reads(self._delegation, index, plan.reads[index])

    async def _sub_agent_reads(self, delegation: Delegation[Wire], index: int, read: Read) -> None:
        call = tool.call(1000 + index, read.argv)
        output = await tool.run(call, self._workspace, 0)
        reading: Wire = {"role": "assistant", "content": f"Reading {read.path}.", "tool_calls": [call]}
        delegation.extend([reading, tool.result(call, output)])

    async def _hand_over(self, delegation: Delegation[Wire], instruction: str) -> None:
        assert isinstance(self._side, WithRuntime)
        self._messages = await delegation.aon_commit(instruction)
        known = self._assignment.tokens.count_wire(self._messages)
        self._side = SubAgent(delegation, self._side, known)


def _instruction(text: str) -> Wire:
    return {"role": "user", "content": text}


def _told(text: str, request: MainRequest, delegation: Delegation[Wire] | None) -> None:
    request.text(text)
    if delegation is not None:
        delegation.feed(text)
