"""The paper's Listing 2, and what its reader brings: a model and tools, in each form of message."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from openai.types.chat import ChatCompletionMessage

import oracle
from conversations import Form, dressed, wire_of
from smoothagent import LookaheadRuntime, Message

FORMS: list[Form] = ["dict", "Message", "openai"]


class DictAnswer(dict[str, Any]):
    """A model's answer as a mapping."""

    @property
    def has_tool_call(self) -> bool:
        return bool(self.get("tool_calls"))

    @property
    def tool_call(self) -> Any:
        return self["tool_calls"][0]


class MessageAnswer(Message):
    """The same as a neutral message."""

    @property
    def has_tool_call(self) -> bool:
        return bool(self.tool_calls)

    @property
    def tool_call(self) -> Any:
        return {"id": self.tool_calls[0].id}


class OpenAIAnswer(ChatCompletionMessage):
    """The same as the openai client's own object."""

    @property
    def has_tool_call(self) -> bool:
        return bool(self.tool_calls)

    @property
    def tool_call(self) -> Any:
        assert self.tool_calls
        return {"id": self.tool_calls[0].id}


class Llm:
    """Always asks for one more tool call; ids repeat as some servers' do."""

    def __init__(self, form: Form) -> None:
        self.form: Form = form
        self.sent: list[oracle.Wires] = []
        self.objects: list[Any] = []

    def begin(self) -> list[Any]:
        system, query = {"role": "system", "content": "s" * 50}, {"role": "user", "content": "what is in there?"}
        return [dressed(system, self.form), dressed(query, self.form)]

    def generate(self, messages: list[Any]) -> Any:
        self.sent.append([copy.deepcopy(wire_of(m)) for m in messages])
        number = len(self.sent)
        call = {"id": f"c{number % 3}", "type": "function", "function": {"name": "sed", "arguments": f"{{{number}}}"}}
        wire: dict[str, Any] = {"role": "assistant", "content": "a" * 20, "tool_calls": [call]}
        if self.form == "dict":
            answer: Any = DictAnswer(wire)
        elif self.form == "Message":
            plain: Message = dressed(wire, "Message")
            answer = MessageAnswer(plain.role, plain.content, plain.tool_calls)
        else:
            answer = OpenAIAnswer.model_validate(wire)
        self.objects.append(answer)
        return answer

    async def agenerate(self, messages: list[Any]) -> Any:
        answer = self.generate(messages)
        await asyncio.sleep(1)
        return answer

    def paired(self) -> bool:
        return all(oracle.paired(sent) for sent in self.sent)


def execute_tool(form: Form) -> Callable[[Any], Any]:
    def run(tool_call: Any) -> Any:
        wire = {"role": "tool", "tool_call_id": tool_call["id"], "content": "r" * 150}
        return dressed(wire, form)

    return run


def agent(
    runtime: LookaheadRuntime[Any], llm: Llm, execute_tool: Callable[[Any], Any], messages: list[Any], turns: int
) -> list[Any]:
    for _ in range(turns):
        messages = runtime.on_commit(messages)

        response = llm.generate(messages)
        messages.append(response)
        if response.has_tool_call:
            obs = execute_tool(response.tool_call)
            messages.append(obs)

        runtime.on_segment_boundary(messages)
    return messages


async def aagent(
    runtime: LookaheadRuntime[Any], llm: Llm, execute_tool: Callable[[Any], Any], messages: list[Any], turns: int
) -> list[Any]:
    for _ in range(turns):
        messages = await runtime.aon_commit(messages)

        response = await llm.agenerate(messages)
        messages.append(response)
        if response.has_tool_call:
            obs = execute_tool(response.tool_call)
            messages.append(obs)

        runtime.on_segment_boundary(messages)
    return messages
