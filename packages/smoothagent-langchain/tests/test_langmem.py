"""langmem's `SummarizationNode`: the built-in's update, without its pause, and what is warmed is what is sent."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langmem.short_term import SummarizationNode as BuiltIn
from pydantic import SecretStr

from agent_server import AgentServer, serving
from smoothagent import running
from smoothagent_langchain.langmem import SummarizationNode

OUTPUT = "r" * 400
LIMITS: dict[str, Any] = {"max_tokens": 1200, "max_tokens_before_summary": 900, "max_summary_tokens": 64}


class State(MessagesState):
    context: dict[str, Any]
    summarized_messages: list[AnyMessage]


def _future_of(what: Any) -> Any:
    job = getattr(what, "_job", None)
    return getattr(what, "_future", None) if job is None else job.future


def settle(node: Any) -> None:
    """Until what the node prepares is there."""
    for talk in getattr(node, "_talks", {}).values():
        for what in (talk.running, talk.upcoming):
            deadline = time.monotonic() + 10
            while (future := _future_of(what)) is not None and not future.done():
                assert time.monotonic() < deadline
                time.sleep(0.002)
            talk.upcoming.lane.wait(talk.upcoming.lane.spawn(asyncio.sleep(0)), 10)


def agent(server: AgentServer, make: Any, saver: Any = None, **more: Any) -> tuple[Any, Any]:
    """A graph as langmem's own page has it, with a tool; and its node."""
    model = ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("x"), max_retries=0, temperature=0)
    node = make(model=model.bind(max_tokens=64), **{**LIMITS, **more})

    def look(number: int) -> str:
        """Look at something."""
        settle(node)
        return f"{number} {OUTPUT}"

    bound = model.bind_tools([look])

    def call_model(state: State) -> dict[str, Any]:
        return {"messages": [bound.invoke([SystemMessage("You are careful."), *state["summarized_messages"]])]}

    async def acall_model(state: State) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke([SystemMessage("You are careful."), *state["summarized_messages"]])]}

    graph: Any = StateGraph(State)
    graph.add_node("summarize", node)
    graph.add_node("model", acall_model if more.pop("asynchronous", False) else call_model)
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "summarize")
    graph.add_edge("summarize", "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "summarize")
    return graph.compile(checkpointer=saver), node


def text_of(body: dict[str, Any]) -> str:
    return "".join(f"<{m['role']}>{m.get('content')}{m.get('tool_calls')}" for m in body["messages"])


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("with_thread", [False, True])
def test_summaries_are_ready_and_all_but_the_newest_result_is_warm(with_thread: bool) -> None:
    with serving(AgentServer(turns=24)) as server:
        graph, node = agent(server, SummarizationNode, InMemorySaver() if with_thread else None)
        config: Any = {"recursion_limit": 200}
        if with_thread:
            config["configurable"] = {"thread_id": "one"}
        out = graph.invoke({"messages": [HumanMessage("the task", id="h0")], "context": {}}, config)
        settle(node)
        assert len(server.main) == 25
        assert len(out["messages"]) == 1 + 2 * 24 + 1
        commits: list[int] = []
        for before, body in zip(server.main, server.main[1:], strict=False):
            known = [text_of(b) for b in server.bodies[: server.bodies.index(body)]]
            sent = text_of(body)
            if len(body["messages"]) < len(before["messages"]):
                commits.append(len(sent) - max(shared(sent, k) for k in known))
            calls = sum(len(m.get("tool_calls") or ()) for m in body["messages"])
            assert [m["role"] for m in body["messages"]].count("tool") == calls
        assert len(commits) >= 3
        # Cold is the newest result, and what stands around it.
        assert max(commits) <= len(OUTPUT) + 60
        # One summary a commit, none of them while somebody waited for it, but for one that may be under way.
        assert len(commits) <= len(server.summaries) <= len(commits) + 1
        context = out["context"]["running_summary"]
        assert context.summary.startswith("SUMMARY")
        assert context.last_summarized_message_id in {m.id for m in out["messages"]}


def history(turns: int) -> list[BaseMessage]:
    out: list[BaseMessage] = [SystemMessage("be brief", id="s"), HumanMessage("the task", id="h")]
    for i in range(turns):
        call: Any = {"id": f"c{i}", "name": "look", "args": {"number": i}, "type": "tool_call"}
        out += [
            AIMessage("", tool_calls=[call], id=f"a{i}"),
            ToolMessage(f"{i} {OUTPUT}", tool_call_id=f"c{i}", id=f"t{i}"),
        ]
    return out


def stepped(node: Any, turns: int, *, asynchronous: bool = False, think: bool = True) -> list[dict[str, Any]]:
    """The node's updates as the history grows, the context handed back each time."""
    context: dict[str, Any] = {}
    updates: list[dict[str, Any]] = []
    for i in range(turns):
        given = {"messages": history(i), "context": context}
        update = asyncio.run(node.ainvoke(given)) if asynchronous else node.invoke(given)
        context = update.get("context", context)
        updates.append(update)
        if think:
            settle(node)
    return updates


def model_of(server: AgentServer) -> Any:
    return ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("x"), max_retries=0, temperature=0)


@pytest.mark.parametrize("same_key", [False, True])
def test_the_update_is_the_built_ins_for_the_same_summary(same_key: bool) -> None:
    """From our running summary the built-in, asked again, makes the same messages."""
    with serving(AgentServer()) as server:
        more: dict[str, Any] = {"output_messages_key": "messages"} if same_key else {}
        ours = SummarizationNode(model=model_of(server), **LIMITS, **more)
        theirs = BuiltIn(
            model=model_of(server), **{**LIMITS, "max_tokens_before_summary": 10_000, "max_tokens": 20_000}, **more
        )
        updates = stepped(ours, 30)
        taken = 0
        for i, update in enumerate(updates):
            if "context" not in update:
                continue
            taken += 1
            again = theirs.invoke({"messages": history(i), "context": update["context"]})
            assert [(m.type, m.content) for m in again[ours.output_messages_key]] == [
                (m.type, m.content) for m in update[ours.output_messages_key]
            ]
            assert ours.token_counter(m for m in update[ours.output_messages_key] if m.type != "remove") <= 1200
        assert taken > 10


def test_nobody_waits_for_a_summary_below_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.01)
    with serving(AgentServer(hold_from=0)) as server:
        server.released.clear()
        node = SummarizationNode(model=model_of(server), **LIMITS)
        server.hold = lambda body: server.released.wait(60)  # pyright: ignore[reportAttributeAccessIssue]
        updates = stepped(node, 9, think=False)
        # 900 tokens are reached with the 8th turn; it goes on as it is.
        assert all("context" not in update for update in updates)
        assert len(updates[-1]["summarized_messages"]) == len(history(8))
        server.released.set()
        settle(node)
        [*_, last] = stepped(node, 9)
        assert last["context"]["running_summary"].summary.startswith("SUMMARY")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_strict_summarizes_at_the_limit(asynchronous: bool) -> None:
    with serving(AgentServer(pause=0.05)) as server:
        theirs = stepped(BuiltIn(model=model_of(server), **LIMITS), 12)
        ours = stepped(
            SummarizationNode(model=model_of(server), strict=True, **LIMITS), 12, asynchronous=asynchronous, think=False
        )
        assert [i for i, u in enumerate(ours) if "context" in u] == [i for i, u in enumerate(theirs) if "context" in u]


def test_a_summary_of_an_edited_history_is_dropped() -> None:
    with serving(AgentServer()) as server:
        node = SummarizationNode(model=model_of(server), **LIMITS)
        stepped(node, 8)
        assert len(server.summaries) == 1
        edited = history(9)
        edited[1] = HumanMessage("another task", id="h")
        update = node.invoke({"messages": edited, "context": {}})
        asked = json.dumps(server.summaries[-1])
        assert len(server.summaries) == 2
        assert "another task" in asked
        assert update["context"]["running_summary"].summary.startswith("SUMMARY")


def test_a_failing_summary_is_made_as_the_built_in_makes_it() -> None:
    with serving(AgentServer(fail=[500])) as server:
        node = SummarizationNode(model=model_of(server), **LIMITS)
        updates = stepped(node, 12)
        assert any("context" in update for update in updates)
    with serving(AgentServer(fail=[500] * 50)) as server:
        node = SummarizationNode(model=model_of(server), **LIMITS)
        with pytest.raises(Exception, match="500"):
            stepped(node, 14)


def test_what_is_prepared_shows_in_no_run_of_the_users() -> None:
    """Neither the summary nor its prompt template, which is a run of its own."""

    class Counting(BaseCallbackHandler):
        def __init__(self) -> None:
            self.runs: list[str] = []

        def on_chain_start(self, serialized: Any, inputs: Any, *, name: str = "", **kwargs: Any) -> None:
            self.runs.append(name)

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.runs.append("model")

    def runs(make: Any) -> list[list[str]]:
        counted: list[list[str]] = []
        with serving(AgentServer()) as server:
            handler = Counting()
            node = make(model=model_of(server).with_config(callbacks=[handler]).with_retry(), **LIMITS)
            graph: Any = StateGraph(State)
            graph.add_node("summarize", node)
            graph.add_edge(START, "summarize")
            compiled = graph.compile()
            context: dict[str, Any] = {}
            for i in range(14):
                handler.runs.clear()
                given: Any = {"messages": history(i), "context": context}
                out = compiled.invoke(given, {"callbacks": [handler]})
                context = out["context"]
                settle(node)
                counted.append([name for name in handler.runs if "Prompt" in name or name == "model"])
            assert server.summaries
        return counted

    ours, theirs = runs(SummarizationNode), runs(BuiltIn)
    # The built-in asks its model in the turn that summarizes; each later turn writes the prompt with the summary.
    assert any("model" in turn for turn in theirs)
    assert not any("model" in turn for turn in ours)
    assert all(turn in ([], ["ChatPromptTemplate"]) for turn in ours)


def test_one_conversation_without_a_thread_is_known_again_after_each_summary() -> None:
    """Also where the messages themselves are replaced, and the summary's message gets a new id each time."""
    with serving(AgentServer()) as server:
        node = SummarizationNode(model=model_of(server), output_messages_key="messages", **LIMITS)
        graph: Any = StateGraph(State)
        graph.add_node("summarize", node)
        graph.add_edge(START, "summarize")
        compiled = graph.compile()
        state: dict[str, Any] = {"messages": [HumanMessage("the task", id="h")], "context": {}}
        for i in range(30):
            state["messages"] = [*state["messages"], *history(i + 1)[-2:]]
            state = compiled.invoke(cast("Any", state))
            settle(node)
        made = len(server.summaries)
        assert 3 <= made <= 7
        assert len({id(talk) for talk in node._talks.values()}) == 1  # pyright: ignore[reportPrivateUsage]


def test_conversations_at_once_share_no_summary() -> None:
    system = SystemMessage("be brief", id="same for all")
    with serving(AgentServer()) as server:
        node = SummarizationNode(model=model_of(server), **LIMITS)
        contexts: dict[str, dict[str, Any]] = {"one": {}, "two": {}}
        for i in range(14):
            for name in contexts:
                mine = [m.model_copy(update={"id": f"{name} {m.id}"}) for m in history(i)[1:]]
                update = node.invoke({"messages": [system, *mine], "context": contexts[name]})
                contexts[name] = update.get("context", contexts[name])
                settle(node)
        for name, context in contexts.items():
            assert all(i.startswith(name) for i in context["running_summary"].summarized_message_ids)
        assert len(server.summaries) <= 6


def test_the_newest_question_stays() -> None:
    with serving(AgentServer()) as server:
        node = SummarizationNode(model=model_of(server), **LIMITS)
        context: dict[str, Any] = {}
        for i in range(1, 20):
            talk = [
                [HumanMessage(f"q{k} " + "q" * 300, id=f"q{k}"), AIMessage("a" * 300, id=f"a{k}")] for k in range(i)
            ]
            messages = [m for pair in talk for m in pair][:-1]
            update = node.invoke({"messages": messages, "context": context})
            context = update.get("context", context)
            settle(node)
            assert update["summarized_messages"][-1].content == messages[-1].content


def test_a_model_that_cannot_be_kept_quiet_is_asked_when_it_is_due(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), serving(AgentServer()) as server:
        node = SummarizationNode(model=RunnableLambda(model_of(server).invoke), **LIMITS)
        updates = stepped(node, 9)
        assert "context" in updates[-1]
        assert len(server.summaries) == 1
    assert "nothing runs ahead" in caplog.text


def test_impossible_limits_are_the_built_ins_error() -> None:
    with serving(AgentServer()) as server:
        with pytest.raises(ValueError, match="soft=2"):
            SummarizationNode(model=model_of(server), max_tokens=100, soft=2)
        node = SummarizationNode(model=model_of(server), max_tokens=100, max_summary_tokens=100)
        with pytest.raises(ValueError, match="must be less than"):
            node.invoke({"messages": history(2)})
        without_ids = [HumanMessage("no id")]
        with pytest.raises(ValueError, match="ID"):
            SummarizationNode(model=model_of(server), max_tokens=1000).invoke({"messages": without_ids})
