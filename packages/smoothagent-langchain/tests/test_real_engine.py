"""The embedded engine: what is warmed is, token by token, what the agent then sends."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agent_server import AgentServer
from smoothagent_bench import EmbeddedEngine, find_model
from smoothagent_langchain import KeepRecentMiddleware

TURNS = 10
OUTPUT = "def run(self, number): return [number * i for i in range(12) if i % 2] or None\n" * 2


class Scripted(AgentMiddleware[Any, Any, Any]):
    """The small model writes its text; which tool it calls is scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.usages: list[dict[str, Any]] = []

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        response = handler(request.override(model_settings={"max_tokens": 12}))
        [message] = response.result
        self.usages.append({**message.usage_metadata, "messages": request.messages})
        number = len(self.usages)
        calls = [{"id": f"c{number}", "name": "look", "args": {"number": number}, "type": "tool_call"}]
        response.result = [
            AIMessage(message.content or "ok", id=message.id, tool_calls=calls if number < TURNS else [])
        ]
        return response


@pytest.mark.engine
def test_the_window_that_is_sent_is_the_one_that_was_warmed() -> None:
    middleware, scripted, waits = KeepRecentMiddleware(3, at_turns=6), Scripted(), AgentServer()
    waits.watched.append(middleware.threads)

    def look(number: int) -> str:
        """Look at something."""
        waits.idle()
        return f"{number} {OUTPUT}"

    with EmbeddedEngine(find_model(), window=2048) as engine:
        model = ChatOpenAI(model=engine.model, base_url=engine.base_url, api_key=SecretStr("x"), temperature=0)
        agent: Any = create_agent(model, [look], system_prompt="You read code.", middleware=[middleware, scripted])
        agent.invoke({"messages": [HumanMessage("Read all of it.")]}, {"recursion_limit": 100})
    cuts = 0
    for before, usage in zip(scripted.usages, scripted.usages[1:], strict=False):
        cached, prompt = usage["input_token_details"]["cache_read"], usage["input_tokens"]
        # Cold are the newest result, the header of the reply, and what ends an answer otherwise than it was written.
        newest = sum(len(str(m.content)) for m in usage["messages"][-1:] if isinstance(m, ToolMessage)) // 2
        assert prompt - cached <= newest + 40
        cuts += len(usage["messages"]) < len(before["messages"])
    assert cuts >= 2
