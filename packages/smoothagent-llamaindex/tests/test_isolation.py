"""Sub-agents that a tool starts find their prompt, and the instruction as it was written, in the cache."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent as BuiltIn
from llama_index.core.llms import MockLLM

from agent_server import AgentServer, serving
from li import OUTPUT, llm_of
from smoothagent import ConfigurationError, KeepRecent, OpenAIBackend, Stream
from smoothagent_llamaindex import Delegate, FunctionAgent

TASK = 'Find out what the function does, "all" of it, and say so in détail. ' * 6


class Marked(OpenAIBackend):
    """Marks each of the agents' calls with its conversation."""

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        super().route(conversation, stream)
        return {"extra_body": {"user": conversation}}


def delegated(
    *, template: str | None = None, strategy: Any = None, calls: bool = True, of_its_own: Any = None
) -> AgentServer:
    """An agent that hands a task to another, which uses a tool and answers."""

    async def main() -> AgentServer:
        server = AgentServer(pieces=lambda text: re.findall(r".{1,40}", text, re.DOTALL))
        with serving(server):
            made = server.answer

            def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
                message, why = made(body)
                if "tool_calls" not in message:
                    return message, why
                system = body["messages"][0]["content"]
                results = sum(m["role"] == "tool" for m in body["messages"])
                if system == "BOSS" and results < 2:
                    arguments = json.dumps({"prompt": f"{results} {TASK}"})
                    message["tool_calls"][0]["function"] = {"name": "research", "arguments": arguments}
                elif system == "BOSS" or results >= 2:
                    return {"role": "assistant", "content": "done"}, "stop"
                return message, why

            server.answer = answer

            def look(number: int) -> str:
                """Look at something."""
                return f"{number} {OUTPUT}"

            backend = Marked(server.url, "m") if of_its_own else None
            given: dict[str, Any] = {"strategy": of_its_own, "backend": backend} if of_its_own else {}
            make: Any = FunctionAgent if of_its_own else BuiltIn
            helper = make(name="helper", tools=[look], llm=llm_of(server), system_prompt="HELPER " * 40, **given)

            async def research(prompt: str) -> str:
                """Research something."""
                # A tool that takes long enough for what was written to be warmed, on whatever machine this is.
                wanted = prompt[: len(prompt) // 2 + 40]
                for _ in range(3000):
                    if any(wanted in m["content"] for b in server.prefills for m in b["messages"]) or not calls:
                        break
                    await asyncio.sleep(0.01)
                text = prompt if template is None else template.format(prompt=prompt)
                return str(await helper.run(user_msg=text, max_iterations=50))

            boss: Any = FunctionAgent(
                name="boss",
                tools=[research],
                llm=llm_of(server),
                system_prompt="BOSS",
                strategy=strategy,
                backend=backend,
                delegates={"research": Delegate(helper, field="prompt", template=template)},
            )
            await boss.run(user_msg="the task", max_iterations=50)
        return server

    return asyncio.run(main())


@pytest.mark.parametrize("template", [None, "Write notes about this: {prompt} Be brief."])
@pytest.mark.parametrize("strategy", [None, lambda: KeepRecent(3, at_turns=6)])
def test_the_first_call_of_a_sub_agent_is_warm(template: str | None, strategy: Any) -> None:
    server = delegated(template=template, strategy=strategy)
    firsts = [b for b in server.main if b["messages"][0]["content"].startswith("HELPER") and len(b["messages"]) == 2]
    assert len(firsts) == 2
    for first in firsts:
        before = server.bodies[: next(i for i, b in enumerate(server.bodies) if b is first)]
        warmed = [b for b in before if b in server.prefills and b["messages"][0] == first["messages"][0]]
        assert warmed
        assert all(b["tools"] == first["tools"] for b in warmed)
        texts = [b["messages"][1]["content"] for b in warmed if len(b["messages"]) > 1]
        wanted = first["messages"][1]["content"]
        longest = max((len(t) for t in texts if wanted.startswith(t)), default=0)
        assert longest >= len(wanted) // 2, "streamed chunk by chunk"
    assert [b["messages"][-1]["role"] for b in server.main].count("tool") >= 4, "and all goes on"


def test_a_template_without_its_field_is_refused() -> None:
    helper = BuiltIn(name="helper", tools=[], llm=MockLLM())
    with pytest.raises(ConfigurationError, match=r"it must hold \{prompt\}"):
        FunctionAgent(tools=[], llm=MockLLM(), delegates={"t": Delegate(helper, field="prompt", template="Do it")})


def test_a_sub_agent_with_a_strategy_goes_on_in_the_stream_that_was_warmed() -> None:
    server = delegated(of_its_own=lambda: KeepRecent(3, at_turns=6))
    helpers = [b for b in server.main if b["messages"][0]["content"].startswith("HELPER")]
    runs = [[b["user"] for b in helpers[:3]], [b["user"] for b in helpers[3:]]]
    assert [len(run) for run in runs] == [3, 3]
    for run in runs:
        assert len(set(run)) == 1, "all calls of a run in one conversation"
    assert runs[0][0] != runs[1][0]
    assert all("\0" not in run[0] for run in runs), "the delegation's"
