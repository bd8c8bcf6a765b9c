"""Sub-agents start warm: their system text and tools, and the task as it is written."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from deepagents import create_deep_agent
from deepagents.backends import StateBackend
from langchain.agents import create_agent
from langchain.agents.middleware.types import AgentMiddleware
from langchain.tools import tool
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agent_server import AgentServer, kind_of, serving
from smoothagent import Delegation, OpenAIBackend, Prompt
from smoothagent.jsonstream import FieldStream
from smoothagent_langchain import IsolationMiddleware, hearing, isolation
from smoothagent_langchain.deepagents import SubAgentMiddleware, SummarizationMiddleware
from smoothagent_langchain.models import backend_for
from smoothagent_langchain.routed import routed, unrouted

READER = "You are a reader. " + "Read with care. " * 20
WRITER = "You are a writer. " + "Write with care. " * 20


@dataclass
class Delegating(AgentServer):
    """Its agent hands a task to a sub-agent on every turn but the last.

    Attributes:
        kinds: for whom, one after the other.
        first: the argument that the model writes first.
        waits: from which task on it goes on writing only once what it has written is warmed.
        patience: seconds that it waits at most.
    """

    kinds: tuple[str, ...] = ("reader",) * 4
    first: str = "description"
    waits: int = 1
    patience: float = 10.0
    made: int = 0

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        if kind_of(body) != "main":
            return super().answer(body)
        if system_of(body).startswith(("You are a reader", "You are a writer")):
            return {"role": "assistant", "content": "the report"}, "stop"
        if self.made == len(self.kinds):
            return {"role": "assistant", "content": "done"}, "stop"
        kind, number = self.kinds[self.made], self.made
        self.made += 1
        arguments = {"description": task(number), "subagent_type": kind}
        if self.first != "description":
            arguments = dict(reversed(arguments.items()))
        call = {"name": "task", "arguments": json.dumps(arguments)}
        calls = [{"id": f"call-{number}", "type": "function", "function": call}]
        return {"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls"

    def cut(self, arguments: str) -> Iterator[str]:
        """Twenty characters at a time, waiting until what is written of the task is warmed."""
        written, text = FieldStream("description"), ""
        for start in range(0, len(arguments), 20):
            piece = arguments[start : start + 20]
            yield piece
            more = written.feed(piece)
            text += more
            if more and self.made > self.waits:
                self.let_it_warm(text)

    def let_it_warm(self, text: str) -> None:
        deadline = time.monotonic() + self.patience
        while not any(b["messages"][-1]["content"] == text for b in self.answered) and time.monotonic() < deadline:
            time.sleep(0.002)


@contextmanager
def delegating(**given: Any) -> Generator[Delegating]:
    """The server, which streams calls in pieces."""
    server = Delegating(**given)
    server.pieces = server.cut
    with serving(server):
        yield server


def drop_in(server: AgentServer) -> SubAgentMiddleware:
    """Deep Agents' middleware, ours, with one sub-agent."""
    reader: Any = {
        "name": "reader",
        "description": "r",
        "system_prompt": READER,
        "model": model_of(server),
        "tools": [],
    }
    return SubAgentMiddleware(backend=StateBackend(), subagents=[reader])


def task(number: int) -> str:
    return f'Task {number}: read file {number} and tell "all" that is said of it, line by line.\nThen stop.' + "." * 60


def system_of(body: dict[str, Any]) -> str:
    content = body["messages"][0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def text_of(body: dict[str, Any]) -> str:
    return json.dumps(body.get("tools")) + "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cold(server: AgentServer, kind: str) -> list[int]:
    """Characters of each first call of a sub-agent that no answered prefill before it had."""
    out: list[int] = []
    for i, body in enumerate(server.bodies):
        if kind_of(body) == "main" and system_of(body).startswith(kind):
            sent = text_of(body)
            done = [b for b in server.bodies[:i] if kind_of(b) == "prefill" and any(b is a for a in server.answered)]
            warm = [text_of(b) for b in done]
            out.append(len(sent) - max((shared(sent, w) for w in warm), default=0))
    return out


def model_of(server: AgentServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("x"), max_retries=0, temperature=0, **more)


def run(
    server: Delegating, middleware: IsolationMiddleware, *, asynchronous: bool = False, streaming: bool = True
) -> None:
    """A deep agent with two sub-agents."""
    subagents: Any = [
        {"name": name, "description": f"a {name}", "system_prompt": prompt}
        for name, prompt in (("reader", READER), ("writer", WRITER))
    ]
    agent: Any = create_deep_agent(
        model=model_of(server, streaming=streaming),
        backend=StateBackend(),
        system_prompt="You delegate.",
        subagents=subagents,
        middleware=[middleware],
    )
    asked: Any = {"messages": [HumanMessage("Have it read.")]}
    out = asyncio.run(agent.ainvoke(asked)) if asynchronous else agent.invoke(asked)
    assert [m.content for m in out["messages"] if m.type == "tool"] == ["the report"] * len(server.kinds)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", ["description", "subagent_type"])
def test_the_task_is_warm_when_the_sub_agent_starts(asynchronous: bool, first: str) -> None:
    with delegating(first=first) as server:
        middleware = IsolationMiddleware()
        run(server, middleware, asynchronous=asynchronous)
        colds = cold(server, "You are a reader")
        assert len(colds) == 4
        assert colds[0] > len(READER)  # nothing is known before the first
        assert max(colds[1:]) <= 21
        assert middleware.ledger.snapshot().prefilled_tokens > 0


def test_another_sub_agent_than_the_last_is_warmed_as_soon_as_it_is_named() -> None:
    with delegating(kinds=("reader", "writer", "reader", "writer"), first="subagent_type", waits=2) as server:
        run(server, IsolationMiddleware())
        assert cold(server, "You are a reader")[1] <= 21
        assert cold(server, "You are a writer")[1] <= 21


def test_an_agent_that_does_not_stream_delegates_as_without_us() -> None:
    with delegating(waits=99) as server:
        run(server, IsolationMiddleware(), streaming=False)
        assert not server.prefills


def test_the_drop_in_delegates_as_the_built_in_does() -> None:
    """``SubAgentMiddleware`` under ``create_agent``, with the models of the specs."""
    with delegating() as server:
        middleware = drop_in(server)
        assert middleware.name == "SubAgentMiddleware"
        agent: Any = create_agent(
            model_of(server, streaming=True), system_prompt="You delegate.", middleware=[middleware]
        )
        out = agent.invoke({"messages": [HumanMessage("Have it read.")]})
        assert out["messages"][-1].content == "done"
        colds = cold(server, "You are a reader")
        assert len(colds) == 4
        assert max(colds[1:]) <= 21


def test_a_tool_of_ones_own_starts_sub_agents_too() -> None:
    """Any tool that runs another agent, its task in any argument."""
    with delegating() as server:
        reader: Any = create_agent(model_of(server), system_prompt=READER)

        @tool("task")
        def ask_reader(description: str, subagent_type: str = "") -> str:
            """Ask the reader."""
            return reader.invoke({"messages": [HumanMessage(description)]})["messages"][-1].content

        middleware = IsolationMiddleware(agent=None)
        agent: Any = create_agent(
            model_of(server, streaming=True), [ask_reader], system_prompt="You delegate.", middleware=[middleware]
        )
        agent.invoke({"messages": [HumanMessage("Have it read.")]})
        assert max(cold(server, "You are a reader")[1:]) <= 21


def test_a_model_behind_its_own_client_is_asked_for_nothing_unless_told_to() -> None:
    """What only the model object can reach is not asked for one token a chunk, which would be paid for."""
    for warm, some in ((None, False), (True, True)):
        with delegating(patience=0.05) as server, httpx.Client(trust_env=False) as own:
            agent: Any = create_deep_agent(
                model=model_of(server, streaming=True, http_client=own),
                backend=StateBackend(),
                system_prompt="You delegate.",
                subagents=cast("Any", [{"name": "reader", "description": "reads", "system_prompt": READER}]),
                middleware=[IsolationMiddleware(warm=warm)],
            )
            agent.invoke({"messages": [HumanMessage("Have it read.")]})
            assert bool(server.prefills) is some
            assert len(server.prefills) <= 3 * 2  # the task, which cannot be shown half, is not asked about again


def test_the_parents_way_to_the_server_is_not_the_sub_agents() -> None:
    """Inside another middleware of ours the parent's model goes to the parent's slot."""
    parent: Any = routed(ChatOpenAI(model="m", api_key=SecretStr("x"), max_retries=0), {"extra_body": {"id_slot": 0}})
    assert type(parent.root_async_client).__name__ == "Routed"
    plain: Any = unrouted(parent)
    assert type(plain.root_async_client).__name__ == "AsyncOpenAI"
    assert unrouted(plain) is plain
    assert isinstance(backend_for(parent), OpenAIBackend)
    with delegating() as server:
        summaries = SummarizationMiddleware(model_of(server), backend=StateBackend(), trigger=("tokens", 100_000))
        agent: Any = create_deep_agent(
            model=model_of(server, streaming=True),
            backend=StateBackend(),
            system_prompt="You delegate.",
            subagents=cast("Any", [{"name": "reader", "description": "reads", "system_prompt": READER}]),
            middleware=[summaries, IsolationMiddleware()],
        )
        agent.invoke({"messages": [HumanMessage("Have it read.")]})
        assert max(cold(server, "You are a reader")[1:]) <= 21


class Held:
    """Hooks of a middleware whose delegations are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Delegation[Any]] = []
        real = Delegation[Any]

        def made(**given: Any) -> Delegation[Any]:
            self.made.append(real(**given))
            return self.made[-1]

        monkeypatch.setattr(isolation, "Delegation", made)

    @property
    def open(self) -> int:
        return sum(not cast("Any", d)._closed for d in self.made)


def test_calls_that_are_written_and_not_made_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person says no, a limit ends the run: the next answer of the conversation lets go of it."""
    held = Held(monkeypatch)

    class SaysNo(AgentMiddleware[Any, Any, Any]):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            if "Task 2" in str(request.tool_call["args"]):
                assert held.open == 1
                return ToolMessage("the report", tool_call_id=request.tool_call["id"])
            return handler(request)

    with delegating() as server:
        middleware = [SaysNo(), drop_in(server)]
        agent: Any = create_agent(
            model_of(server, streaming=True), system_prompt="You delegate.", middleware=middleware
        )
        agent.invoke({"messages": [HumanMessage("Have it read.")]})
        assert len(held.made) == 3
        assert held.open == 0


def test_calls_of_one_id_and_answers_that_break_off_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("x"), max_retries=0)
    middleware = IsolationMiddleware(agent=None)
    middleware.learn("", hearing.Known(model, (), Prompt(model="m")))
    request: Any = SimpleNamespace(model=model, state={"messages": [HumanMessage("x", id="first")]})

    def chunk(**given: Any) -> Any:
        call: Any = {"name": "task", "args": '{"description": "read"', "type": "tool_call_chunk", **given}
        return SimpleNamespace(message=AIMessageChunk(content="", tool_call_chunks=[call]))

    def answers(*calls: dict[str, Any], ends: bool = True) -> Any:
        def handler(request: Any) -> Any:
            ear: Any = hearing.EARS.get()
            run = uuid.uuid4()
            for call in calls:
                ear.on_llm_new_token("", chunk=chunk(**call), run_id=run)
            if not ends:
                raise ConnectionError("cancelled")
            ear.on_llm_end(None, run_id=run)

        return handler

    middleware.wrap_model_call(request, answers({"index": None, "id": "a"}, {"index": None, "id": "b"}))
    assert (len(held.made), held.open) == (2, 2)
    middleware.wrap_model_call(request, answers({"index": 0, "id": "a"}, {"index": 1, "id": "a"}))
    assert (len(held.made), held.open) == (4, 1)
    with pytest.raises(ConnectionError):
        middleware.wrap_model_call(request, answers({"index": 0, "id": "c"}, ends=False))
    assert (len(held.made), held.open) == (5, 0)
    middleware.wrap_model_call(request, answers({"index": 0, "id": None}))
    assert (len(held.made), held.open) == (6, 0)  # nobody could find it again
    nameless: Any = SimpleNamespace(model=model, state={"messages": [HumanMessage("x")]})
    middleware.wrap_model_call(nameless, answers({"index": 0, "id": "d"}))
    assert (len(held.made), held.open) == (7, 0)  # nor know whose it is
    # Another conversation's answer lets go of none of this one's.
    other: Any = SimpleNamespace(model=model, state={"messages": [HumanMessage("y", id="another")]})
    middleware.wrap_model_call(request, answers({"index": 0, "id": "e"}))
    middleware.wrap_model_call(other, answers())
    assert (len(held.made), held.open) == (8, 1)
    middleware.wrap_model_call(request, answers())
    assert held.open == 0


def test_another_users_server_is_never_used() -> None:
    """What one conversation's sub-agent was called like is another's only on the same server, with the same key."""
    middleware = IsolationMiddleware()
    ann = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("ann's"))
    bea = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("bea's"))
    middleware.learn("reader", hearing.Known(ann, (), Prompt(model="m")))
    assert middleware.delegation("reader", bea) is None
    mine = middleware.delegation("reader", ann.model_copy())
    assert mine is not None
    mine.cancel()


def reader_of(model: ChatOpenAI, before: list[Any]) -> Any:
    """A tool that asks twice, the first time with messages before the task."""

    @tool("task")
    def ask(description: str, subagent_type: str) -> str:
        """Ask the reader."""
        first = model.invoke([SystemMessage(READER), *before, HumanMessage(description)])
        model.invoke([SystemMessage("You are a reader of another kind."), HumanMessage(description)])
        return str(first.content)

    return ask


def test_only_system_text_and_the_first_call_are_learned() -> None:
    """A sub-agent that is given the conversation is not to be warmed with somebody's conversation."""
    for before, known in (([], True), ([HumanMessage("a secret"), AIMessage("noted")], False)):
        with delegating(kinds=("reader",) * 2, waits=99) as server:
            ask = reader_of(model_of(server), before)
            middleware = IsolationMiddleware()
            agent: Any = create_agent(
                model_of(server, streaming=True), [ask], system_prompt="You delegate.", middleware=[middleware]
            )
            agent.invoke({"messages": [HumanMessage("Have it read.")]})
            found = middleware._known.get("reader")  # pyright: ignore[reportPrivateUsage]
            texts = [[m.content for m in k.before] for k in found or ()]
            assert texts == ([[READER]] if known else [["You are a reader of another kind."]])


def test_middleware_for_two_tools_go_together() -> None:
    middleware = [IsolationMiddleware(), IsolationMiddleware(tool="ask")]
    assert len({m.name for m in middleware}) == 2
    create_agent(ChatOpenAI(model="m", api_key=SecretStr("x")), middleware=middleware)


def test_a_server_that_fails_costs_the_sub_agent_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with delegating(fail=[500] * 99, patience=0.1) as server:
        run(server, IsolationMiddleware())
    assert "cold" in caplog.text
