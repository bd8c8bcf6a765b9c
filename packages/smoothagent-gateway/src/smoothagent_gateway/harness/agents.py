"""Agents of three frameworks, as their users write them: a model with a base URL, a system text and one tool."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai import AsyncOpenAI
from pydantic import SecretStr
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from smoothagent_bench import tool

if TYPE_CHECKING:
    from smoothagent_gateway.harness import Player

_DESCRIPTION = str(tool.DEFINITION["function"]["description"])


async def play_openai(player: Player, base_url: str) -> None:
    """A loop around the openai client."""
    messages: list[Any] = [{"role": "system", "content": player.system}, {"role": "user", "content": player.task}]
    async with AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0, timeout=600) as client:
        while True:
            create: Any = client.chat.completions.create
            answer = await create(model=player.job.model, messages=messages, tools=[tool.DEFINITION])
            said = answer.choices[0].message
            calls: list[Any] = [call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls or ()]
            messages.append({"role": "assistant", "content": said.content, **({"tool_calls": calls} if calls else {})})
            if not calls:
                return
            for call in calls:
                json.loads(call["function"]["arguments"])  # as an agent would
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": await player.bash()})


async def play_langgraph(player: Player, base_url: str) -> None:
    """A graph of two nodes."""
    model: Any = ChatOpenAI(
        model=player.job.model,
        base_url=base_url,
        api_key=SecretStr("x"),
        streaming=True,
        max_retries=0,
        timeout=600,
    )

    async def bash(command: str) -> str:
        del command
        return await player.bash()

    called = StructuredTool.from_function(coroutine=bash, name="bash", description=_DESCRIPTION)
    bound = model.bind_tools([called])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke([SystemMessage(player.system), *state["messages"]])]}

    async def act(state: MessagesState) -> dict[str, Any]:
        last: Any = state["messages"][-1]
        return {"messages": [await called.ainvoke(call) for call in last.tool_calls]}

    def goes_on(state: MessagesState) -> str:
        last: Any = state["messages"][-1]
        return "act" if last.tool_calls else END

    graph: Any = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("act", act)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", goes_on)
    graph.add_edge("act", "think")
    run = graph.compile()
    await run.ainvoke({"messages": [HumanMessage(player.task)]}, {"recursion_limit": 4 * player.turns})


async def play_pydantic_ai(player: Player, base_url: str) -> None:
    """An agent with a function as its tool."""
    provider = OpenAIProvider(base_url=base_url, api_key="x")
    agent: Agent[None, str] = Agent(OpenAIChatModel(player.job.model, provider=provider), system_prompt=player.system)

    async def bash(command: str) -> str:
        """Run one command in the workspace and return its output."""
        del command
        return await player.bash()

    agent.tool_plain(bash)
    await agent.run(player.task, usage_limits=UsageLimits(request_limit=2 * player.turns))
