"""What the tests of this package share: LLMs and agents on a server on loopback."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.llms.openai_like import OpenAILike

from agent_server import AgentServer, serving
from smoothagent import LookaheadStrategy
from smoothagent_llamaindex import FunctionAgent

OUTPUT = "r" * 400
Strategy = Callable[[], LookaheadStrategy]


def llm_of(server: AgentServer, **more: Any) -> OpenAILike:
    given: dict[str, Any] = {"max_retries": 0, "context_window": 100_000, "is_function_calling_model": True, **more}
    # LlamaIndex never closes its clients, and a connection that is kept is reported as lost when its loop has ended.
    given.setdefault("default_headers", {"Connection": "close"})
    return OpenAILike(model="m", api_base=server.url, api_key="x", is_chat_model=True, **given)


def tool_of(server: AgentServer) -> Callable[[int], Any]:
    async def look(number: int) -> str:
        """Look at something."""
        await asyncio.to_thread(server.idle)
        return f"{number} {OUTPUT}"

    return look


def watch(server: AgentServer, llm: LLM) -> None:
    """What the tools wait for."""
    lookahead = getattr(llm, "_lookahead", None)
    if lookahead is not None and lookahead.conversations is not None:
        server.watched.append(lookahead.conversations)


def played(
    strategy: Strategy | None, *, turns: int = 14, make: type[FunctionAgent] = FunctionAgent, **more: Any
) -> tuple[AgentServer, list[Any]]:
    """One agent's run; the server with what it was asked, and the run's events."""

    async def main() -> tuple[AgentServer, list[Any]]:
        with serving(AgentServer(turns=turns)) as server:
            tools = [tool_of(server), *more.pop("tools", [])]
            agent: Any = make(tools=tools, llm=llm_of(server), system_prompt="S", strategy=strategy, **more)
            watch(server, agent.llm)
            handler = agent.run(user_msg="the task", max_iterations=1000)
            events = [event async for event in handler.stream_events()]
            await handler
            await asyncio.to_thread(server.idle)
            return server, events

    return asyncio.run(main())


def turns_of(body: dict[str, Any]) -> int:
    return sum(m["role"] == "assistant" for m in body["messages"])


def warmed_before(server: AgentServer, body: dict[str, Any]) -> int:
    """How many of a request's messages the last prefill before it had warmed, with the tools that it sends."""
    before = server.bodies[: next(i for i, b in enumerate(server.bodies) if b is body)]
    prefills = [b for b in before if any(b is p for p in server.prefills) and b.get("tools") == body.get("tools")]
    sent, warmed = body["messages"], prefills[-1]["messages"] if prefills else []
    return next((i for i, (a, b) in enumerate(zip(sent, warmed, strict=False)) if a != b), min(len(sent), len(warmed)))


def said(role: str, text: str, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=text, **more)
