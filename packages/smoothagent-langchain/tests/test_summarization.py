"""The drop-in for LangChain's `SummarizationMiddleware`, in a real agent on a real HTTP server."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware import SummarizationMiddleware as BuiltIn
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from pydantic import SecretStr

from agent_server import AgentServer, serving
from smoothagent_langchain import SlidingWindowMiddleware, SummarizationMiddleware

OUTPUT = "r" * 400
CONFIG: Any = {"configurable": {"thread_id": "one"}, "recursion_limit": 500}


def model_of(server: AgentServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("x"), max_retries=0, temperature=0, **more)


def tool_of(server: AgentServer) -> Callable[[int], str]:
    def look(number: int) -> str:
        """Look at something."""
        server.idle()
        return f"{number} {OUTPUT}"

    return look


def watched(server: AgentServer, middleware: Sequence[Any]) -> Sequence[Any]:
    """The same; their lookahead is what the tool waits for."""
    server.watched += [m.threads for m in middleware if getattr(m, "threads", None) is not None]
    return middleware


def played(
    middleware: Callable[[ChatOpenAI], Sequence[AgentMiddleware[Any, Any, Any]]],
    *,
    turns: int = 14,
    asynchronous: bool = False,
    checkpointer: bool = True,
    server: AgentServer | None = None,
    streaming: bool = False,
) -> tuple[AgentServer, list[BaseMessage]]:
    """One agent's run; the server with what it was asked, and the state's messages."""
    with serving(server or AgentServer(turns=turns)) as s:
        model = model_of(s, streaming=streaming)
        saver = InMemorySaver() if checkpointer else None
        chosen = watched(s, middleware(model))
        agent = create_agent(
            model, [tool_of(s)], system_prompt="You are careful.", middleware=chosen, checkpointer=saver
        )
        config: Any = CONFIG if checkpointer else {"recursion_limit": 500}
        task: Any = {"messages": [HumanMessage("the task")]}
        out = asyncio.run(agent.ainvoke(task, config)) if asynchronous else agent.invoke(task, config)
        s.idle()
        return s, out["messages"]


def ours(**more: Any) -> Callable[[ChatOpenAI], list[Any]]:
    given: dict[str, Any] = {"trigger": ("tokens", 1000), "keep": ("messages", 4), **more}
    return lambda model: [SummarizationMiddleware(model, **given)]


def built_in(model: ChatOpenAI) -> list[Any]:
    return [BuiltIn(model, trigger=("tokens", 1000), keep=("messages", 4))]


def is_summary(message: dict[str, Any]) -> bool:
    return str(message.get("content")).startswith("Here is a summary of the conversation to date:\n\n")


def commits(server: AgentServer) -> list[int]:
    """Which of the agent's calls were the first with a new summary."""
    seen: list[Any] = [next((m["content"] for m in b["messages"] if is_summary(m)), None) for b in server.main]
    return [i for i, (a, b) in enumerate(itertools.pairwise(seen), 1) if b != a]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("checkpointer", [False, True])
def test_a_summary_is_ready_and_its_prompt_warm_when_it_is_due(asynchronous: bool, checkpointer: bool) -> None:
    server, _ = played(ours(), asynchronous=asynchronous, checkpointer=checkpointer)
    made = commits(server)
    assert len(made) >= 2
    for i in made:
        body = server.main[i]
        before = server.bodies[: next(k for k, b in enumerate(server.bodies) if b is body)]
        warmed = [b for b in before if any(b is p for p in server.prefills)][-1]
        # Nothing but the newest tool result is cold, and the tools are the same.
        n = len(warmed["messages"])
        assert body["messages"][:n] == warmed["messages"]
        assert all(m["role"] == "tool" for m in body["messages"][n:])
        assert len(body["messages"]) - n == 1
        assert body["tools"] == warmed["tools"]


def test_the_question_is_put_to_the_agents_own_prompt() -> None:
    server, _ = played(ours())
    assert server.summaries
    for body in server.summaries:
        asked = [m for m in body["messages"] if m["role"] != "assistant" or "tool_calls" in m][:-1]
        assert any(main["messages"][: len(asked)] == asked for main in server.main)
        assert body["tools"] == server.main[0]["tools"]


def test_what_a_summary_leaves_has_the_built_ins_form() -> None:
    mine, messages = played(ours())
    theirs, expected = played(built_in)
    for state in (messages, expected):
        assert isinstance(state[0], HumanMessage)
        assert state[0].additional_kwargs == {"lc_source": "summarization"}
        assert state[0].id
        assert all(m.id for m in state)
    assert len({m.id for m in messages}) == len(messages)
    for i in commits(mine):
        kept = mine.main[i]["messages"][2:]
        assert 4 <= len(kept) <= 8
        assert kept[0]["role"] != "tool"
    assert len(commits(theirs)) >= 2
    assert abs(len(commits(mine)) - len(commits(theirs))) <= 1


def test_strict_summarizes_at_the_trigger_exactly() -> None:
    mine, _ = played(ours(strict=True))
    theirs, _ = played(built_in)
    assert commits(mine)[:1] == commits(theirs)[:1]


def test_every_call_has_its_result_in_every_request() -> None:
    server, _ = played(ours(keep=("messages", 3)), turns=20)
    for body in [*server.main, *server.summaries]:
        calls = [c["id"] for m in body["messages"] for c in m.get("tool_calls") or ()]
        results = [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]
        assert calls == results


def test_the_state_of_a_streaming_agent_and_its_events_show_nothing_of_the_background() -> None:
    with serving(AgentServer(turns=12)) as server:
        model = model_of(server, streaming=True)
        agent = create_agent(
            model,
            [tool_of(server)],
            system_prompt="S",
            middleware=watched(server, ours()(model)),
            checkpointer=InMemorySaver(),
        )
        said: list[str] = []
        for chunk, _ in agent.stream({"messages": [HumanMessage("go")]}, CONFIG, stream_mode="messages"):
            if isinstance(chunk, AIMessage):
                said.append(str(chunk.content))
        assert commits(server)
        assert not any("SUMMARY" in text for text in said)
        assert "x" not in said

        async def events() -> list[Any]:
            config: Any = {**CONFIG, "configurable": {"thread_id": "two"}}
            stream = agent.astream_events({"messages": [HumanMessage("go")]}, config, version="v2")
            return [e async for e in stream]

        server.bodies.clear()
        seen = asyncio.run(events())
        ends = [e for e in seen if e["event"] == "on_chat_model_end"]
        assert len(ends) == len(server.main)
        assert commits(server)


class Inner(AgentMiddleware[Any, Any, Any]):
    """Changes the system text after ours has passed the request on."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(system_message=SystemMessage("Inner words.")))


def test_what_inner_middleware_changes_is_what_is_warmed() -> None:
    server, _ = played(lambda model: [*ours()(model), Inner()])
    assert commits(server)
    for body in [*server.prefills, *server.summaries]:
        assert body["messages"][0] == {"role": "system", "content": "Inner words."}


def test_a_summary_prompt_of_the_users_is_used_as_the_built_in_uses_it() -> None:
    server, _ = played(ours(summary_prompt="Context Extraction Assistant: sum up {messages}"))
    assert commits(server)
    for body in server.summaries:
        assert len(body["messages"]) == 1
        assert body["messages"][0]["content"].startswith("Context Extraction Assistant: sum up")
        assert "tools" not in body


@pytest.mark.parametrize("status", [429, 500])
def test_a_server_that_refuses_lookahead_for_a_while_costs_nothing_but_time(status: int) -> None:
    server, messages = played(ours(), server=AgentServer(turns=20, fail=[status] * 3))
    assert len(server.main) == 21
    assert messages[-1].content == "done"
    assert commits(server), "the history is summarized after all"
    sizes = [len(b["messages"]) for b in server.main]
    assert max(sizes) < 30


def test_a_summary_that_cannot_be_had_in_place_is_had_as_the_built_in_has_it() -> None:
    """A model that thinks for longer than the limit, say."""
    server, _ = played(ours(max_summary_tokens=2), turns=20)
    assert commits(server)
    assert any(len(b["messages"]) == 1 for b in server.summaries), "about a transcript"


def test_usage_that_reaches_the_trigger_does_not_make_what_is_prepared_too_long() -> None:
    """System text and tools are not in the messages, and what the server reports is of the prompt as it was."""
    server, _ = played(ours(trigger=("tokens", 1500)), server=AgentServer(turns=24, extra_usage=700))
    made = commits(server)
    assert len(made) >= 2
    for i in made:
        body = server.main[i]
        before = server.bodies[: next(k for k, b in enumerate(server.bodies) if b is body)]
        warmed = [b for b in before if any(b is p for p in server.prefills)][-1]["messages"]
        assert body["messages"][: len(warmed)] == warmed
        assert len(body["messages"]) - len(warmed) == 1
    assert len(server.summaries) < 12 * len(made)


def test_going_back_before_a_summary_brings_the_whole_history_back() -> None:
    """Time travel to where the summary ended: nothing of it may be missing."""
    with serving(AgentServer(turns=12)) as server:
        model = model_of(server)
        agent = create_agent(
            model,
            [tool_of(server)],
            system_prompt="S",
            middleware=watched(server, ours()(model)),
            checkpointer=InMemorySaver(),
        )
        agent.invoke({"messages": [HumanMessage("the task")]}, CONFIG)
        assert commits(server)
        gone_back = 0
        for old in list(agent.get_state_history(CONFIG)):
            if not old.values.get("messages") or old.next != ("SummarizationMiddleware.before_model",):
                continue
            server.bodies.clear()
            server.turns = 0
            whole = to_wire(model, old.values["messages"])
            agent.invoke(None, old.config)
            sent = server.main[0]["messages"][1:]
            gone_back += 1
            assert sent == whole or (is_summary(sent[0]) and 4 <= len(sent) - 1 <= 8)
        assert gone_back > 10


def to_wire(model: ChatOpenAI, messages: list[BaseMessage]) -> list[dict[str, Any]]:
    return model._get_request_payload(messages)["messages"]  # pyright: ignore[reportPrivateUsage]


def test_two_of_ours_in_one_agent_both_work() -> None:
    def both(model: ChatOpenAI) -> list[Any]:
        return [SlidingWindowMiddleware(3), *ours()(model)]

    server, messages = played(both, turns=20)
    assert commits(server) or isinstance(messages[0], HumanMessage)
    assert max(sum(m["role"] == "assistant" for m in b["messages"]) for b in server.main) <= 3
    assert len(server.prefills) > 10


def test_the_users_llm_cache_sees_none_of_it() -> None:
    cache = InMemoryCache()
    set_llm_cache(cache)
    try:
        server, _ = played(ours())
    finally:
        set_llm_cache(None)
    assert commits(server)
    keys = list(cache._cache)  # pyright: ignore[reportPrivateUsage]
    assert len(keys) == len(server.main)
    assert not any("Context Extraction" in prompt or "id_slot" in llm for prompt, llm in keys)


def test_runs_without_a_thread_leave_nothing_behind() -> None:
    with serving(AgentServer(turns=3)) as server:
        model = model_of(server)
        [middleware] = ours()(model)
        agent = create_agent(model, [tool_of(server)], middleware=watched(server, [middleware]))
        for _ in range(5):
            server.bodies.clear()
            agent.invoke({"messages": [HumanMessage("the task")]})
        assert all(job is None for job in jobs_of(middleware))


def jobs_of(middleware: SummarizationMiddleware) -> list[Any]:
    assert middleware.threads is not None
    runtimes = [r for r, _ in middleware.threads.pool._runtimes.values()]  # pyright: ignore[reportPrivateUsage]
    return [r._lookahead.state.job for r in runtimes]  # pyright: ignore[reportPrivateUsage]


def test_one_object_serves_many_threads() -> None:
    with serving(AgentServer(turns=10**6)) as server:
        model = model_of(server)

        def look(number: int, config: RunnableConfig) -> str:
            """Look at something."""
            return f"{config['configurable']['thread_id']} {number} {OUTPUT}"

        agent = create_agent(model, [look], system_prompt="S", middleware=ours()(model), checkpointer=InMemorySaver())

        async def one(name: str) -> list[BaseMessage]:
            config: Any = {"configurable": {"thread_id": name}, "recursion_limit": 60}
            with pytest.raises(GraphRecursionError):
                await agent.ainvoke({"messages": [HumanMessage(f"I am {name}")]}, config)
            return (await agent.aget_state(config)).values["messages"]

        async def main() -> list[list[BaseMessage]]:
            return await asyncio.gather(*(one(f"agent-{n}") for n in range(4)))

        summarized = 0
        for n, messages in enumerate(asyncio.run(main())):
            text = "".join(str(m.content) for m in messages)
            assert not any(f"agent-{k}" in text for k in range(4) if k != n)
            calls = [c["id"] for m in messages if isinstance(m, AIMessage) for c in m.tool_calls]
            results = [m.tool_call_id for m in messages if isinstance(m, ToolMessage)]
            assert set(results) <= set(calls)
            summarized += str(messages[0].content).startswith("Here is a summary")
        assert summarized >= 2
        for body in server.main:
            names = {f"agent-{k}" for k in range(4) if f"agent-{k} " in str(body["messages"])}
            assert len(names) <= 1


def test_impossible_arguments_are_refused_as_the_built_in_refuses_them() -> None:
    with serving(AgentServer()) as server:
        model = model_of(server)
        with pytest.raises(ValueError, match="thresholds must be greater than 0"):
            SummarizationMiddleware(model, trigger=("tokens", 0))
        with pytest.raises(ValueError, match=r"soft=1.5: a fraction of the trigger"):
            SummarizationMiddleware(model, trigger=("tokens", 10), soft=1.5)
