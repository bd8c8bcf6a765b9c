"""Sub-agents start warm: their system text and tools, and the task as it is written."""

# LangChain's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportTypedDictNotRequiredAccess=false

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends import StateBackend
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from agent_server import AgentServer, kind_of, serving
from smoothagent.jsonstream import FieldStream
from smoothagent_langchain import IsolationMiddleware
from smoothagent_langchain.deepagents import SubAgentMiddleware

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
        while not any(b["messages"][-1]["content"] == text for b in self.prefills) and time.monotonic() < deadline:
            time.sleep(0.002)


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
    """Characters of each first call of a sub-agent that nothing before it had."""
    out: list[int] = []
    for i, body in enumerate(server.bodies):
        if kind_of(body) == "main" and system_of(body).startswith(kind):
            sent = text_of(body)
            warm = [text_of(b) for b in server.bodies[:i] if kind_of(b) == "prefill"]
            out.append(len(sent) - max((shared(sent, w) for w in warm), default=0))
    return out


def model_of(server: AgentServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url, api_key=SecretStr("x"), max_retries=0, temperature=0, **more)


def run(
    server: Delegating, middleware: IsolationMiddleware, *, asynchronous: bool = False, streaming: bool = True
) -> None:
    """A deep agent with two sub-agents."""
    server.pieces = server.cut
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
    with serving(Delegating(first=first)) as server:
        assert isinstance(server, Delegating)
        middleware = IsolationMiddleware()
        run(server, middleware, asynchronous=asynchronous)
        colds = cold(server, "You are a reader")
        assert len(colds) == 4
        assert colds[0] > len(READER)  # nothing is known before the first
        assert max(colds[1:]) <= 21
        assert middleware.ledger.snapshot().prefilled_tokens > 0


def test_another_sub_agent_than_the_last_is_warmed_as_soon_as_it_is_named() -> None:
    with serving(Delegating(kinds=("reader", "writer", "reader", "writer"), first="subagent_type", waits=2)) as server:
        assert isinstance(server, Delegating)
        run(server, IsolationMiddleware())
        assert cold(server, "You are a reader")[1] <= 21
        assert cold(server, "You are a writer")[1] <= 21


def test_an_agent_that_does_not_stream_delegates_as_without_us() -> None:
    with serving(Delegating(waits=99)) as server:
        assert isinstance(server, Delegating)
        run(server, IsolationMiddleware(), streaming=False)
        assert not server.prefills


def test_the_drop_in_delegates_as_the_built_in_does() -> None:
    """``SubAgentMiddleware`` under ``create_agent``, with the models of the specs."""
    with serving(Delegating()) as server:
        assert isinstance(server, Delegating)
        server.pieces = server.cut
        spec: Any = {
            "name": "reader",
            "description": "reads",
            "system_prompt": READER,
            "model": model_of(server),
            "tools": [],
        }
        middleware = SubAgentMiddleware(backend=StateBackend(), subagents=[spec])
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
    with serving(Delegating()) as server:
        assert isinstance(server, Delegating)
        server.pieces = server.cut
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


def test_a_server_that_fails_costs_the_sub_agent_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Delegating(fail=[500] * 99, patience=0.1)) as server:
        assert isinstance(server, Delegating)
        run(server, IsolationMiddleware())
    assert "cold" in caplog.text
