"""The drop-in for Deep Agents' `SummarizationMiddleware`, in a real deep agent on a real HTTP server."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends import StateBackend
from deepagents.middleware.summarization import SummarizationMiddleware as BuiltIn
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from agent_server import AgentServer, serving
from smoothagent_langchain.deepagents import SummarizationMiddleware
from test_summarization import CONFIG, OUTPUT, model_of, tool_of, watched

HEAD = "You are in the middle of a conversation that has been summarized."


def played(make: Callable[[ChatOpenAI], Any], *, asynchronous: bool = False) -> tuple[AgentServer, dict[str, Any]]:
    """One deep agent's run; the server with what it was asked, and the whole state, private keys included."""
    with serving(AgentServer(turns=16)) as server:
        model = model_of(server)
        [middleware] = watched(server, [make(model)])
        saver = InMemorySaver()
        agent: Any = create_deep_agent(
            model=model, tools=[tool_of(server)], middleware=[middleware], backend=StateBackend(), checkpointer=saver
        )
        task: Any = {"messages": [HumanMessage("the task")]}
        asyncio.run(agent.ainvoke(task, CONFIG)) if asynchronous else agent.invoke(task, CONFIG)
        server.idle()
        return server, agent.get_state(CONFIG).values


def ours(model: ChatOpenAI) -> Any:
    return SummarizationMiddleware(model, backend=StateBackend(), trigger=("messages", 14), keep=("messages", 4))


def theirs(model: ChatOpenAI) -> Any:
    return BuiltIn(model, backend=StateBackend(), trigger=("messages", 14), keep=("messages", 4))


def summary_of(body: dict[str, Any]) -> str | None:
    return next((m["content"] for m in body["messages"] if str(m["content"]).startswith(HEAD)), None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_summary_is_ready_and_its_prompt_warm_when_it_is_due(asynchronous: bool) -> None:
    server, state = played(ours, asynchronous=asynchronous)
    summaries = [summary_of(b) for b in server.main]
    made = [i for i in range(1, len(summaries)) if summaries[i] != summaries[i - 1]]
    assert len(made) >= 2
    for i in made:
        body = server.main[i]
        before = server.bodies[: next(k for k, b in enumerate(server.bodies) if b is body)]
        warmed = [b for b in before if any(b is p for p in server.prefills)][-1]
        n = len(warmed["messages"])
        assert body["messages"][:n] == warmed["messages"]
        assert [m["role"] for m in body["messages"][n:]] == ["tool"], "nothing but the newest result is cold"
        assert body["tools"] == warmed["tools"]
    # The state keeps every message, and the file what was summarized.
    assert len(state["messages"]) == 2 + 2 * 16
    event = state["_summarization_event"]
    path, session = event["file_path"], state["_summarization_session_id"]
    assert path == f"/conversation_history/{session}.md"
    assert path in event["summary_message"].content
    saved = str(state["files"][path])
    assert saved.count("## Summarized at") == len(made)
    covered = event["cutoff_index"]
    results = [str(m.content) for m in state["messages"][:covered] if m.type == "tool"]
    assert all(OUTPUT in r and r.split()[0] in saved for r in results)


def test_it_summarizes_as_often_as_the_built_in_and_leaves_its_form() -> None:
    mine, state = played(ours)
    other, expected = played(theirs)
    mine_event, their_event = state["_summarization_event"], expected["_summarization_event"]
    assert mine_event.keys() == their_event.keys()
    assert mine_event["summary_message"].additional_kwargs == their_event["summary_message"].additional_kwargs
    count = [len({summary_of(b) for b in s.main} - {None}) for s in (mine, other)]
    assert abs(count[0] - count[1]) <= 1
    for body in mine.main:
        if summary_of(body):
            kept = [m for m in body["messages"] if m["role"] != "system"][1:]
            assert kept[0]["role"] != "tool", "no result without its call"


def test_it_takes_the_defaults_place() -> None:
    server, _ = played(ours)
    # Ours asks at the end of the agent's own prompt, with its tools; the default asks about a transcript.
    assert server.summaries
    assert all(b.get("tools") == server.main[0]["tools"] for b in server.summaries)
