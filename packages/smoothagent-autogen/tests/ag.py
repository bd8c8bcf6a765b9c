"""What the tests of this package share: model clients and agents on a server on loopback."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelInfo,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient

from agent_server import AgentServer, serving
from smoothagent.machine import Stage
from smoothagent_autogen import LookaheadChatCompletionContext
from smoothagent_autogen.contexts.windows import Window

OUTPUT = "r" * 400
INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def client_of(server: AgentServer, **more: Any) -> OpenAIChatCompletionClient:
    given: dict[str, Any] = {"max_retries": 0, "model_info": INFO, "include_name_in_message": False, **more}
    # A connection that is kept is reported as lost when its loop has ended.
    given.setdefault("default_headers", {"Connection": "close"})
    return OpenAIChatCompletionClient(model="m", base_url=server.url, api_key="x", **given)


async def settled(context: ChatCompletionContext) -> None:
    """Wait until lookahead has done what it can by now."""
    deadline = time.monotonic() + 30
    while not _is_settled(context):
        assert time.monotonic() < deadline, "lookahead is not ready"
        await asyncio.sleep(0.002)


def _is_settled(context: Any) -> bool:
    if isinstance(context, LookaheadChatCompletionContext):
        job = context._conversation.runtime._lookahead.state.job  # pyright: ignore[reportPrivateUsage]
        return job is None or job.stage is Stage.READY
    if isinstance(context, Window):
        ahead = context._ahead  # pyright: ignore[reportPrivateUsage]
        futures = (ahead._finding, ahead._future)  # pyright: ignore[reportPrivateUsage]
        return all(future is None or future.done() for future in futures)
    return True


def looking(context: ChatCompletionContext, output: str = OUTPUT) -> Callable[[int], Any]:
    """A tool that takes as long as lookahead does."""

    async def look(number: int) -> str:
        """Look at something."""
        await settled(context)
        return f"{number} {output}"

    return look


S = TypeVar("S", bound=AgentServer)


def streamable(server: S) -> S:
    """As AutoGen wants it: no tool call in a piece that has text, too, and none where the agent gave no tools."""
    made = server.answer

    def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        message, why = made(body)
        if "tool_calls" not in message:
            return message, why
        if not body.get("tools"):
            return {"role": "assistant", "content": f"reflection {len(server.main)}"}, "stop"
        return ({**message, "content": None} if body.get("stream") else message), why

    server.answer = answer
    return server


def played(
    context: ChatCompletionContext,
    *,
    turns: int = 12,
    tasks: int = 1,
    client: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[AgentServer, AssistantAgent]:
    """One agent's run; the server with what it was asked."""

    async def main() -> tuple[AgentServer, AssistantAgent]:
        with serving(streamable(AgentServer(turns=turns))) as server:
            given: dict[str, Any] = {"max_tool_iterations": 1000, "system_message": "S" * 40, **more}
            tools = [looking(context), *given.pop("tools", [])]
            agent = AssistantAgent(
                "agent", client_of(server, **(client or {})), tools=tools, model_context=context, **given
            )
            for number in range(tasks):
                await agent.run(task=f"the task {number}")
                await settled(context)
            return server, agent

    return asyncio.run(main())


def warmed_before(server: AgentServer, body: dict[str, Any]) -> int:
    """How many of a request's messages the last prefill before it had warmed, with the tools that it sends."""
    before = server.bodies[: next(i for i, b in enumerate(server.bodies) if b is body)]
    prefills = [b for b in before if any(b is p for p in server.prefills) and b.get("tools") == body.get("tools")]
    sent: list[Any] = body["messages"]
    warmed: list[Any] = prefills[-1]["messages"] if prefills else []
    return next((i for i, (a, b) in enumerate(zip(sent, warmed, strict=False)) if a != b), min(len(sent), len(warmed)))


def user(text: str, source: str = "user") -> UserMessage:
    return UserMessage(content=text, source=source)


def answer(text: str) -> AssistantMessage:
    return AssistantMessage(content=text, source="agent")


def calls(*ids: str, thought: str | None = None) -> AssistantMessage:
    made = [FunctionCall(id=i, name="look", arguments=json.dumps({"number": n})) for n, i in enumerate(ids)]
    return AssistantMessage(content=made, source="agent", thought=thought)


def results(*ids: str, text: str = OUTPUT) -> FunctionExecutionResultMessage:
    made = [FunctionExecutionResult(content=text, name="look", call_id=i, is_error=False) for i in ids]
    return FunctionExecutionResultMessage(content=made)


def conversation(turns: int) -> list[LLMMessage]:
    """A user's message, and calls with their results."""
    out: list[LLMMessage] = [user("the task")]
    for number in range(turns):
        out += [calls(f"c{number}"), results(f"c{number}")]
    return out
