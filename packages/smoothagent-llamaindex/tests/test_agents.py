"""Agents whose runs stay within limits: in real runs on a real HTTP server."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow
from llama_index.core.agent.workflow import FunctionAgent as BuiltIn
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, ToolCallBlock
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel

from agent_server import AgentServer, serving
from li import OUTPUT, llm_of, played, said, tool_of, turns_of, warmed_before, watch
from smoothagent import ConfigurationError, KeepRecent, Offload, OffloadStore, SlidingWindow, Summarize
from smoothagent.read_tool import has_read_tool
from smoothagent_llamaindex import CodeActAgent, Delegate, FunctionAgent, ReActAgent, read_offloaded, with_lookahead
from smoothagent_llamaindex import conversations as conversations_module
from smoothagent_llamaindex.aside import finish_reason
from smoothagent_llamaindex.models import prompt_for


@pytest.mark.parametrize("streaming", [False, True])
def test_keep_recent_sends_the_newest_turns_and_they_are_warm(streaming: bool) -> None:
    server, _ = played(lambda: KeepRecent(3, at_turns=6), turns=20, streaming=streaming)
    counts = [turns_of(b) for b in server.main]
    cuts = [i for i in range(1, len(counts)) if counts[i] < counts[i - 1]]
    assert len(cuts) >= 4
    assert max(counts) <= 6
    for i in cuts[1:]:
        body = server.main[i]
        assert [m["role"] for m in body["messages"][:2]] == ["system", "user"]
        assert warmed_before(server, body) >= len(body["messages"]) - 1


def test_a_sliding_window_moves_on_every_turn_and_is_warm() -> None:
    server, _ = played(lambda: SlidingWindow(4), turns=16)
    assert [turns_of(b) for b in server.main][5:] == [4] * 12
    for body in server.main[8:]:
        assert warmed_before(server, body) >= len(body["messages"]) - 1


def test_a_summary_is_asked_for_in_place_and_what_it_leaves_is_warm() -> None:
    server, _ = played(lambda: Summarize(1000, keep=300, max_tokens=100, question="Transcript so far: sum up."))
    assert server.summaries
    made = [b for b in server.main if "SUMMARY" in str(b["messages"])]
    assert made
    first = made[0]
    assert warmed_before(server, first) >= len(first["messages"]) - 1
    asked = server.summaries[0]
    assert asked["messages"][0] == first["messages"][0], "the agent's own prompt up to there"
    assert asked["tools"] == first["tools"]


def test_offloaded_outputs_come_back_byte_for_byte(tmp_path: Path) -> None:
    store = OffloadStore(tmp_path)
    tool = read_offloaded(store)
    server, _ = played(lambda: Offload(1200, keep=2, store=store, min_chars=100), turns=16, tools=[tool])
    sent = [m for m in server.main[-1]["messages"] if m["role"] == "tool"]
    moved = [m for m in sent if OUTPUT not in m["content"]]
    assert len(moved) >= 5
    for number, message in enumerate(moved):
        page = tool.call(ref=message["content"]).content
        assert page.partition("\n")[2] == f"{number + 1} {OUTPUT}"
    assert {t["function"]["name"] for t in server.main[0]["tools"]} == {"look", "read_offloaded"}


def test_events_and_messages_are_those_of_the_built_in() -> None:
    _, ours = played(lambda: KeepRecent(3, at_turns=6), turns=8)
    _, theirs = played(None, turns=8)

    def shown(events: list[Any]) -> list[Any]:
        return [(type(e), e.delta) if isinstance(e, AgentStream) else type(e) for e in events]

    assert shown(ours) == shown(theirs)
    assert ours[-1].result.response.content == theirs[-1].result.response.content == "done"


def test_spans_are_those_of_the_built_in() -> None:
    class Noted(SimpleSpanHandler):
        names: list[str] = []  # noqa: RUF012

        def span_enter(self, id_: str, *args: Any, **kwargs: Any) -> None:
            self.names.append(id_.rpartition("-")[0][: id_.find("-")])

    def spans(strategy: Any) -> list[str]:
        noted = Noted()
        root = get_dispatcher("root")
        root.add_span_handler(noted)
        try:
            played(strategy, turns=7)
        finally:
            root.span_handlers.remove(noted)
        return noted.names

    noted = [spans(lambda: KeepRecent(3, at_turns=6)), spans(None)]
    assert sorted(noted[0]) == sorted(noted[1])


def test_an_agent_without_a_strategy_is_the_built_in() -> None:
    agent = FunctionAgent(tools=[], llm=MockLLM())
    assert type(agent.llm) is MockLLM


def test_runs_on_one_memory_are_one_conversation() -> None:
    """The second run goes on where the first one ended, and its windows are warm."""

    async def main() -> AgentServer:
        with serving(AgentServer(turns=8)) as server:
            agent: Any = FunctionAgent(
                tools=[tool_of(server)],
                llm=llm_of(server),
                system_prompt="S",
                strategy=lambda: KeepRecent(3, at_turns=6),
            )
            watch(server, agent.llm)
            memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
            await agent.run(user_msg="the task", memory=memory, max_iterations=100)
            server.turns = 20
            await agent.run(user_msg="go on", memory=memory, max_iterations=100)
            [conversations] = server.watched
            assert len(conversations.pool) == 1
            return server

    server = asyncio.run(main())
    assert max(turns_of(b) for b in server.main) <= 6
    late = server.main[-1]["messages"]
    assert "go on" in [m["content"] for m in late]


def test_two_runs_at_once_that_begin_alike_do_not_meet() -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=10_000)) as server:
            made = 0

            def look(number: int) -> str:
                """Look at something."""
                nonlocal made
                made += 1
                server.turns = 0 if made >= 24 else server.turns
                return f"{made} {OUTPUT}"

            agent: Any = FunctionAgent(
                tools=[look], llm=llm_of(server), system_prompt="S", strategy=lambda: KeepRecent(3, at_turns=6)
            )
            runs = [agent.run(user_msg="the task", max_iterations=1000) for _ in range(3)]
            await asyncio.gather(*runs)
            return server

    server = asyncio.run(main())
    assert max(turns_of(b) for b in server.main) <= 6
    for body in server.main:
        outputs = [m["content"].split()[0] for m in body["messages"] if m["role"] == "tool"]
        assert outputs == sorted(outputs, key=int), "none of another run's"
        asked = [c["id"] for m in body["messages"] for c in m.get("tool_calls") or ()]
        assert asked == [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]


def test_a_workflow_of_agents_has_a_conversation_for_each() -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=12)) as server:
            llm = llm_of(server)
            strategy = lambda: KeepRecent(2, at_turns=4)  # noqa: E731
            one = FunctionAgent(
                name="one", description="1", tools=[tool_of(server)], llm=llm, system_prompt="ONE", strategy=strategy
            )
            two = FunctionAgent(
                name="two", description="2", tools=[tool_of(server)], llm=llm, system_prompt="TWO", strategy=strategy
            )
            watch(server, one.llm)
            watch(server, two.llm)
            made = server.answer

            def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
                message, why = made(body)
                if len(server.main) == 6 and "tool_calls" in message and "ONE" in str(body["messages"][0]):
                    function = {"name": "handoff", "arguments": '{"to_agent": "two", "reason": "r"}'}
                    message["tool_calls"][0]["function"] = function
                return message, why

            server.answer = answer
            workflow: Any = AgentWorkflow(agents=[one, two], root_agent="one")
            await workflow.run(user_msg="the task", max_iterations=100)
            return server

    server = asyncio.run(main())
    systems = [b["messages"][0]["content"] for b in server.main]
    assert {"ONE", "TWO"} == set(systems)
    assert systems.count("TWO") >= 4
    assert max(turns_of(b) for b in server.main if b["messages"][0]["content"] == "ONE") <= 4
    for body in server.main:
        calls = [c["id"] for m in body["messages"] for c in m.get("tool_calls") or ()]
        results = [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]
        assert set(results) <= set(calls), "no result without its call"


def test_a_context_that_was_saved_goes_on() -> None:
    """LlamaIndex saves a context without its memory, so that the new run has a conversation of its own."""

    async def main() -> AgentServer:
        with serving(AgentServer(turns=7)) as server:
            agent: Any = FunctionAgent(
                tools=[tool_of(server)],
                llm=llm_of(server),
                system_prompt="S",
                strategy=lambda: KeepRecent(3, at_turns=6),
            )
            watch(server, agent.llm)
            context = Context(agent)
            memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
            await agent.run(user_msg="the task", ctx=context, memory=memory, max_iterations=100)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that the memory is left out
                restored = Context.from_dict(agent, context.to_dict())
            again = ChatMemoryBuffer.from_defaults(
                chat_history=[m.model_copy(deep=True) for m in memory.get_all()], token_limit=100_000
            )
            server.turns = 16
            await agent.run(user_msg="go on", ctx=restored, memory=again, max_iterations=100)
            return server

    server = asyncio.run(main())
    assert max(turns_of(b) for b in server.main[8:]) <= 6
    assert server.main[-1]["messages"][-1]["role"] == "tool"


def test_react_and_code_agents_stay_within_limits() -> None:
    async def main(kind: str) -> AgentServer:
        with serving(AgentServer(turns=0)) as server:
            made = 0

            def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
                nonlocal made
                if body.get("max_tokens") == 1:
                    return {"role": "assistant", "content": "x"}, "length"
                made += 1
                if kind == "react":
                    text = f'Thought: step {made}\nAction: look\nAction Input: {{"number": {made}}}'
                    text = text if made < 14 else "Thought: enough\nAnswer: done"
                else:
                    text = f"<execute>\nlook({made})\n</execute>" if made < 14 else "done"
                return {"role": "assistant", "content": text}, "stop"

            server.answer = answer
            strategy = lambda: KeepRecent(3, at_turns=6)  # noqa: E731
            given: dict[str, Any] = {"llm": llm_of(server), "system_prompt": "S", "strategy": strategy}

            async def run(code: str) -> str:
                await asyncio.to_thread(server.idle)
                return f"{code} {OUTPUT}"

            agent: Any = (
                ReActAgent(tools=[tool_of(server)], **given)
                if kind == "react"
                else CodeActAgent(code_execute_fn=run, tools=[], **given)
            )
            watch(server, agent.llm)
            await agent.run(user_msg="the task", max_iterations=100)
            return server

    for kind in ("react", "code"):
        server = asyncio.run(main(kind))
        counts = [turns_of(b) for b in server.main]
        assert max(counts) <= 6, kind
        cuts = [i for i in range(1, len(counts)) if counts[i] < counts[i - 1]]
        assert len(cuts) >= 2, kind
        for i in cuts[1:]:
            body = server.main[i]
            assert warmed_before(server, body) >= len(body["messages"]) - 2, kind


# ---- the LLM itself ------------------------------------------------------------------------------


def chat_of(turns: int) -> list[ChatMessage]:
    out = [said("system", "S")]
    for i in range(turns):
        out += [said("user", f"question {i} {OUTPUT}"), said("assistant", f"answer {i}")]
    return [*out, said("user", "the last one")]


def test_any_caller_of_the_llm_gets_the_view() -> None:
    with serving(AgentServer(turns=0)) as server:
        llm = with_lookahead(llm_of(server), lambda: KeepRecent(2, at_turns=4))
        watch(server, llm)
        history = [said("system", "S")]
        for i in range(12):
            history = [*history, said("user", f"question {i}")]
            history = [*history, llm.chat(history).message]
            server.idle()
        assert max(turns_of(b) for b in server.main) <= 4
        assert len(history) == 1 + 24
        for body in server.main[6:]:
            assert body["messages"][-1]["content"].startswith("question")


def test_one_off_calls_pass_through() -> None:
    with serving(AgentServer(turns=0)) as server:
        llm = with_lookahead(llm_of(server), lambda: KeepRecent(2, at_turns=4))
        for i in range(3):
            llm.chat([said("user", f"a question {i}")])
            llm.complete(f"a prompt {i}")
        lookahead: Any = llm
        assert len(lookahead._lookahead.conversations.pool) == 0
        assert len(server.bodies) == 6


def test_the_llm_given_stays_as_it_is_and_the_copy_is_of_its_class() -> None:
    with serving(AgentServer(turns=0)) as server:
        own = llm_of(server, additional_kwargs={"extra_body": {"mine": 1}})
        llm = with_lookahead(own, lambda: KeepRecent(2, at_turns=4))
        assert isinstance(llm, type(own))
        assert type(llm).__name__ == type(own).__name__
        if hasattr(own, "to_payload"):  # what its events say of it
            assert llm.to_payload() == own.to_payload()
        assert llm.to_dict() == own.to_dict()
        assert type(pickle.loads(pickle.dumps(llm))) is type(own)
        twin: Any = copy.deepcopy(llm)
        llm_any: Any = llm
        assert twin._lookahead is llm_any._lookahead
        llm.chat(chat_of(3))
        assert server.main[0]["mine"] == 1


def test_a_stream_that_is_left_ends_its_call() -> None:
    with serving(AgentServer(turns=0)) as server:
        llm = with_lookahead(llm_of(server), lambda: KeepRecent(2, at_turns=4))
        conversations: Any = llm
        conversations = conversations._lookahead.conversations
        for response in llm.stream_chat(chat_of(2)):
            assert response.message.content
            break
        assert not conversations._busy
        llm.stream_chat(chat_of(2))  # never read
        assert not conversations._busy

        async def main() -> None:
            stream = await llm.astream_chat(chat_of(2))
            async for _ in stream:
                break
            await stream.aclose()
            await llm.astream_chat(chat_of(2))
            assert not conversations._busy

        asyncio.run(main())


class Own(CustomLLM):
    """An LLM that nobody knows."""

    fails: bool = False
    asked: list[int] = []  # noqa: RUF012  pydantic copies it

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="own", context_window=100_000)

    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        if self.fails:
            raise ValueError("the model is out")
        self.asked.append(len(messages))
        return ChatResponse(message=said("assistant", "a"))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_any_llm_has_its_conversations_transformed() -> None:
    own = Own()
    llm = with_lookahead(own, lambda: KeepRecent(2, at_turns=4))
    history = [said("system", "S")]
    for i in range(10):
        history = [*history, said("user", f"q{i}")]
        history = [*history, llm.chat(history).message]
    assert max(own.asked) <= 2 + 2 * 4 + 1
    assert len(history) == 21


def test_its_errors_come_through() -> None:
    llm = with_lookahead(Own(fails=True), lambda: KeepRecent(2, at_turns=4))
    with pytest.raises(ValueError, match="the model is out"):
        llm.chat(chat_of(2))
    held: Any = llm
    assert not held._lookahead.conversations._busy


def test_a_dead_server_is_the_agents_error_and_nothing_else() -> None:
    with serving(AgentServer(turns=0)) as server:
        llm = llm_of(server)
    ours = with_lookahead(llm, lambda: KeepRecent(2, at_turns=4))
    errors: list[type[BaseException]] = []
    for one in (llm, ours):
        with pytest.raises(Exception, match="Connection error") as raised:
            one.chat(chat_of(2))
        errors.append(raised.type)
    assert errors[0] is errors[1]


def test_lookahead_that_fails_costs_nothing() -> None:
    with serving(AgentServer(turns=0, fail=[500] * 50)) as server:
        llm = with_lookahead(llm_of(server), lambda: KeepRecent(2, at_turns=4))
        history = [said("system", "S")]
        for i in range(10):
            history = [*history, said("user", f"q{i}")]
            history = [*history, llm.chat(history).message]
        assert max(turns_of(b) for b in server.main) <= 4


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pass a factory"):
        with_lookahead(MockLLM(), KeepRecent(2, at_turns=4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="at_turns must exceed turns"):
        FunctionAgent(tools=[], llm=MockLLM(), strategy=lambda: KeepRecent(5, at_turns=5))


def test_the_built_in_agent_takes_the_llm_too() -> None:
    async def main() -> AgentServer:
        with serving(AgentServer(turns=12)) as server:
            llm = with_lookahead(llm_of(server), lambda: SlidingWindow(4))
            watch(server, llm)
            agent: Any = BuiltIn(tools=[tool_of(server)], llm=llm, system_prompt="S")
            await agent.run(user_msg="the task", max_iterations=100)
            return server

    server = asyncio.run(main())
    assert [turns_of(b) for b in server.main][5:] == [4] * 8
    for body in server.main[8:]:
        assert warmed_before(server, body) >= len(body["messages"]) - 1


def test_summaries_of_an_llm_that_only_its_object_reaches() -> None:
    class Writes(Own):
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            summary = str(messages[-1].content).startswith("Sum up")
            self.asked.append(-1 if summary else len(messages))
            return ChatResponse(message=said("assistant", "SUMMARY of it" if summary else f"an answer {OUTPUT}"))

    own = Writes()
    llm = with_lookahead(
        own, lambda: Summarize(600, keep=100, max_tokens=50, question="Sum up.", keep_latest_user=False)
    )
    history = [said("system", "S")]
    for i in range(12):
        history = [*history, said("user", f"q{i}")]
        history = [*history, llm.chat(history).message]
    assert -1 in own.asked
    assert max(own.asked) <= 18
    assert own.asked[-1] <= 14


class Streams(Own):
    """One whose methods call each other, as LlamaIndex's own custom LLMs do."""

    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        response = self.chat(messages, **kwargs)
        yield ChatResponse(message=response.message, delta=response.message.content)


def test_an_llm_whose_methods_call_each_other_is_asked_once() -> None:
    own = Streams()
    llm = with_lookahead(own, lambda: KeepRecent(2, at_turns=4))
    held: Any = llm

    async def main() -> None:
        history = [said("system", "S")]
        for i in range(6):
            history = [*history, said("user", f"q{i}")]
            if i % 2:
                history = [*history, (await llm.achat(history)).message]
                continue
            answers: list[ChatMessage] = []
            async for response in await llm.astream_chat(history):
                answers.append(response.message)
                # Whoever reads is not inside of the call.
                llm.chat([said("user", "another's"), said("assistant", "a"), said("user", "b")])
            history = [*history, answers[-1]]
        assert len(held._lookahead.conversations.pool) == 2

    asyncio.run(main())
    assert len(own.asked) == 6 + 3


def test_what_an_llm_was_given_before_stays() -> None:
    helper = BuiltIn(name="helper", tools=[], llm=MockLLM())
    first: Any = with_lookahead(MockLLM(), lambda: KeepRecent(2, at_turns=4))
    agent: Any = FunctionAgent(tools=[], llm=first, delegates={"t": Delegate(helper, field="prompt")})
    assert agent.llm._lookahead.conversations is first._lookahead.conversations
    again: Any = with_lookahead(agent.llm, lambda: KeepRecent(3, at_turns=6))
    assert again._lookahead.delegates is agent.llm._lookahead.delegates
    assert again._lookahead.conversations is not first._lookahead.conversations


def test_impossible_arguments_are_refused_where_they_are_given() -> None:
    one = KeepRecent(2, at_turns=4)
    with pytest.raises(ConfigurationError, match="the same KeepRecent again"):
        with_lookahead(MockLLM(), lambda: one)
    with pytest.raises(ConfigurationError, match="the ceiling must be at least hard"):
        with_lookahead(MockLLM(), lambda: Summarize(2000), ceiling=1000)


def test_a_conversation_ends_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run would hold the server's slots until it has long been idle."""
    monkeypatch.setattr(conversations_module, "_GRACE", 0.01)

    async def main() -> Any:
        with serving(AgentServer(turns=4)) as server:
            agent: Any = FunctionAgent(
                tools=[tool_of(server)], llm=llm_of(server), strategy=lambda: KeepRecent(3, at_turns=6)
            )
            watch(server, agent.llm)
            await agent.run(user_msg="the task", max_iterations=100)
            return agent.llm._lookahead.conversations

    conversations = asyncio.run(main())
    for _ in range(200):
        gc.collect()
        if not len(conversations.pool):
            break
        time.sleep(0.01)
    assert len(conversations.pool) == 0


def test_structured_output_is_no_part_of_the_conversation() -> None:
    class Answer(BaseModel):
        number: int

    async def main() -> tuple[AgentServer, Any]:
        with serving(AgentServer(turns=5)) as server:
            made = server.answer

            def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
                message, why = made(body)
                if [t["function"]["name"] for t in body.get("tools", [])] == ["Answer"]:
                    call = {"id": "1", "type": "function", "function": {"name": "Answer", "arguments": '{"number": 7}'}}
                    return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
                return message, why

            server.answer = answer
            agent: Any = FunctionAgent(
                tools=[tool_of(server)],
                llm=llm_of(server),
                output_cls=Answer,
                strategy=lambda: KeepRecent(3, at_turns=6),
            )
            watch(server, agent.llm)
            result = await agent.run(user_msg="the task", max_iterations=100)
            assert len(agent.llm._lookahead.conversations.pool) <= 1
            return server, result

    _, result = asyncio.run(main())
    assert result.structured_response == {"number": 7}


def test_tools_in_an_llms_own_form_are_known_by_name() -> None:
    class Declared:
        name = "read_offloaded"

    class Googles:
        function_declarations = [Declared()]  # noqa: RUF012

    prompt = prompt_for(MockLLM(), {"tools": [Googles(), {"name": "flat"}, FunctionTool.from_defaults(lambda: "")]})
    assert [t.get("name") or t["function"]["name"] for t in prompt.tools][:2] == ["read_offloaded", "flat"]
    assert has_read_tool(prompt)


def test_results_whose_calls_have_no_ids_are_paired() -> None:
    """Ollama gives its calls none, and LlamaIndex answers them with the tool's name."""
    own = Own()
    llm = with_lookahead(own, lambda: KeepRecent(2, at_turns=4))
    history = [said("system", "S"), said("user", "u")]
    for _ in range(8):
        call: Any = ToolCallBlock(tool_name="look", tool_kwargs={"n": 1})
        history = [*history, ChatMessage(role="assistant", blocks=[call])]
        history = [*history, said("tool", "r", additional_kwargs={"tool_call_id": "look"})]
        llm.chat(history)
    assert max(own.asked) <= 2 + 2 * 4


def test_a_tool_that_edits_the_runs_state_leaves_the_conversation_what_it_is() -> None:
    """LlamaIndex puts copies in the place of what the state holds, the memory included."""

    async def main() -> tuple[AgentServer, int]:
        with serving(AgentServer(turns=14)) as server:

            async def look(ctx: Context, number: int) -> str:
                """Look at something."""
                async with ctx.store.edit_state() as state:
                    state["number"] = number
                await asyncio.to_thread(server.idle)
                return f"{number} {OUTPUT}"

            # LlamaIndex looks for the class itself.
            look.__annotations__ = {"ctx": Context, "number": int, "return": str}
            agent: Any = FunctionAgent(
                tools=[look], llm=llm_of(server), system_prompt="S", strategy=lambda: KeepRecent(3, at_turns=6)
            )
            watch(server, agent.llm)
            handler = agent.run(user_msg="the task", max_iterations=100)
            await handler
            gc.collect()
            return server, len(agent.llm._lookahead.conversations.pool)

    server, conversations = asyncio.run(main())
    assert conversations == 1
    counts = [turns_of(b) for b in server.main]
    cuts = [i for i in range(1, len(counts)) if counts[i] < counts[i - 1]]
    assert max(counts) <= 6
    for i in cuts[1:]:
        body = server.main[i]
        assert warmed_before(server, body) >= len(body["messages"]) - 1


def test_what_an_llm_notes_of_its_calls_stays() -> None:
    class Counting(type(llm_of(AgentServer()))):
        n: int = 0

        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            self.n += 1
            return super().chat(messages, **kwargs)

    with serving(AgentServer(turns=0)) as server:
        own: Any = Counting(model="m", api_base=server.url, api_key="x", is_chat_model=True, max_retries=0)
        llm = with_lookahead(own, lambda: KeepRecent(2, at_turns=4))
        for _ in range(3):
            llm.chat(chat_of(2))
        assert llm.n == 3


def test_streams_that_are_lists_are_read() -> None:
    class Lists(Own):
        def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
            return [ChatResponse(message=said("assistant", "a"), delta="a")]

    llm = with_lookahead(Lists(), lambda: KeepRecent(2, at_turns=4))
    assert [r.delta for r in llm.stream_chat(chat_of(2))] == ["a"]


@pytest.mark.parametrize("choice", [{"type": "auto"}, "auto", None])
def test_calls_that_may_use_tools_are_conversations_whatever_form_that_has(choice: Any) -> None:
    llm: Any = with_lookahead(Own(), lambda: KeepRecent(2, at_turns=4))
    llm.chat(chat_of(2), tools=[{"name": "t"}], **({} if choice is None else {"tool_choice": choice}))
    assert len(llm._lookahead.conversations.pool) == 1


def test_bedrocks_tools_are_known_by_name() -> None:
    prompt = prompt_for(MockLLM(), {"tools": {"tools": [{"toolSpec": {"name": "read_offloaded"}}], "toolChoice": {}}})
    assert has_read_tool(prompt)


def test_an_answer_that_ran_into_its_limit_is_known_as_such() -> None:
    def ended(raw: Any) -> str | None:
        return finish_reason(ChatResponse(message=said("assistant", "a"), raw=raw))

    assert ended({"choices": [{"finish_reason": "length"}]}) == "length"
    assert ended({"stop_reason": "max_tokens"}) == "length"
    assert ended({"stop_reason": "end_turn"}) == "stop"
    assert ended({"done_reason": "length"}) == "length"
    assert ended(None) is None


def test_a_mistake_in_a_strategy_is_told_where_it_is_made() -> None:
    llm = llm_of(AgentServer(url="http://127.0.0.1:9/v1"))
    strategy: Any = KeepRecent(2, at_turns=4)
    with pytest.raises(ConfigurationError, match="factory"):
        FunctionAgent(tools=[], llm=llm, strategy=strategy)
    with pytest.raises(ConfigurationError, match="read_offloaded"):
        FunctionAgent(tools=[], llm=llm, strategy=lambda: Offload(1_000))
