"""Whose call is whose: contexts know theirs by the history in it, whoever makes it."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import json
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    LLMMessage,
    RequestUsage,
    SystemMessage,
)
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient

import smoothagent_autogen as ours
from ag import INFO, answer, calls, client_of, looking, played, results, settled, streamable, user, warmed_before
from agent_server import AgentServer, kind_of, serving
from smoothagent import KeepRecent
from smoothagent_autogen.aside import limit
from smoothagent_autogen.seen import SEEN


def test_several_agents_with_one_client_and_one_task_are_kept_apart() -> None:
    async def main() -> None:
        with serving(streamable(AgentServer(turns=1000))) as server:
            client = client_of(server)
            contexts = [ours.BufferedChatCompletionContext(4) for _ in range(3)]

            async def work(number: int) -> None:
                context = contexts[number]
                first = user("the same task")
                await context.add_message(first)
                for turn in range(8):
                    view = await context.get_messages()
                    await asyncio.sleep(0)
                    await client.create([SystemMessage(content=f"agent {number}"), *view])
                    # All three agents' histories look the same, but for the system text.
                    await context.add_message(calls(f"c{turn}"))
                    await settled(context)
                    await context.add_message(results(f"c{turn}"))

            await asyncio.gather(*(work(number) for number in range(3)))
            for number in range(3):
                sent = [b for b in server.main if b["messages"][0]["content"] == f"agent {number}"]
                warm = [b for b in server.prefills if b["messages"][0]["content"] == f"agent {number}"]
                assert len(sent) == 8
                assert len(warm) >= 4
                for body in sent[3:]:
                    # A question stands in the place of the result that was still to come.
                    assert any(p["messages"][:-1] == body["messages"][:-1] for p in warm)

    asyncio.run(main())


def test_an_agent_loaded_from_its_configuration_is_seen_as_well() -> None:
    """Its client is another object than its context's."""

    async def main() -> None:
        with serving(streamable(AgentServer(turns=4))) as server:
            made = AssistantAgent(
                "agent", client_of(server), model_context=ours.BufferedChatCompletionContext(4), system_message="S"
            )
            agent: Any = AssistantAgent.load_component(made.dump_component())
            context: Any = agent._model_context
            assert type(context) is ours.BufferedChatCompletionContext
            for number in range(6):
                await agent.run(task=f"task {number}")
                await settled(context)
            assert server.prefills

    asyncio.run(main())


def test_a_client_behind_a_cache_is_seen() -> None:
    async def main() -> None:
        with serving(streamable(AgentServer(turns=8))) as server:
            context = ours.BufferedChatCompletionContext(4)
            agent = AssistantAgent(
                "agent",
                ChatCompletionCache(client_of(server)),
                tools=[looking(context)],
                model_context=context,
                max_tool_iterations=100,
            )
            await agent.run(task="the task")
            moved = server.main[3:]
            assert [warmed_before(server, b) for b in moved] == [len(b["messages"]) - 1 for b in moved]

    asyncio.run(main())


class Foreign(ChatCompletionClient):
    """A client of a kind that nobody knows."""

    def __init__(self) -> None:
        self.asked: list[list[LLMMessage]] = []
        self.counted = RequestUsage(prompt_tokens=0, completion_tokens=0)

    async def create(self, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:
        self.asked.append(list(messages))
        usage = RequestUsage(prompt_tokens=100 * len(messages), completion_tokens=5)
        self.counted = RequestUsage(
            prompt_tokens=self.counted.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.counted.completion_tokens + usage.completion_tokens,
        )
        last = messages[-1].content
        said = "SUMMARY of it" if isinstance(last, str) and "summar" in last.lower() else "answer"
        return CreateResult(content=said, usage=usage, finish_reason="stop", cached=False)

    async def create_stream(self, messages: Sequence[LLMMessage], **kwargs: Any) -> AsyncGenerator[Any, None]:
        result = await self.create(messages, **kwargs)
        yield str(result.content)
        yield result

    async def close(self) -> None: ...

    def actual_usage(self) -> RequestUsage:
        return self.counted

    def total_usage(self) -> RequestUsage:
        return self.counted

    def count_tokens(self, messages: Sequence[LLMMessage], **kwargs: Any) -> int:
        return 100 * len(messages)

    def remaining_tokens(self, messages: Sequence[LLMMessage], **kwargs: Any) -> int:
        return 10_000

    @property
    def capabilities(self) -> Any:
        return INFO

    @property
    def model_info(self) -> Any:
        return INFO


@pytest.mark.parametrize("streams", [False, True])
def test_another_client_writes_the_summary_on_a_copy(streams: bool) -> None:
    """Nothing is prefilled there; the user's counters count the agent's own calls alone."""

    async def main() -> None:
        client = Foreign()
        context = ours.SummarizingChatCompletionContext(2_000, keep=600)
        agent = AssistantAgent("agent", client, model_context=context, model_client_stream=streams)
        for number in range(30):
            await agent.run(task=f"{number} " + "words and more words " * 12)
            await settled(context)
        assert context.last_commit is not None
        own = [m for m in client.asked if "answer" in str(m) or len(m) == 2]
        summaries = [m for m in client.asked if "summar" in str(m[-1].content).lower()]
        assert summaries
        assert client.counted.completion_tokens == 5 * (len(client.asked) - len(summaries))
        assert own

    asyncio.run(main())


def test_a_client_that_is_copied_or_made_later_is_seen() -> None:
    class Later(Foreign):
        async def create(self, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:
            return await super().create(messages, **kwargs)

    async def main() -> None:
        context = ours.SummarizingChatCompletionContext(2_000, keep=600)
        agent = AssistantAgent("agent", copy.copy(Later()), model_context=context)
        for number in range(12):
            await agent.run(task=f"{number} " + "words and more words " * 24)
            await settled(context)
        assert context.last_commit is not None

    asyncio.run(main())


class Counting(Foreign):
    """One that counts in place, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self._total_usage = {"completion_tokens": 0}
        self._create_calls: list[int] = []

    async def create(self, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:
        result = await super().create(messages, **kwargs)
        self._total_usage["completion_tokens"] += result.usage.completion_tokens
        self._create_calls.append(len(messages))
        return result


@pytest.mark.parametrize("cached", [False, True])
def test_counters_that_change_in_place_count_the_agents_calls_alone(cached: bool) -> None:
    async def main() -> None:
        client = Counting()
        context = ours.SummarizingChatCompletionContext(2_000, keep=600)
        agent = AssistantAgent("agent", ChatCompletionCache(client) if cached else client, model_context=context)
        for number in range(20):
            await agent.run(task=f"{number} " + "words and more words " * 12)
            await settled(context)
        assert context.last_commit is not None
        own: Any = client
        assert own._total_usage == {"completion_tokens": 5 * 20}
        assert len(own._create_calls) == 20
        assert len(client.asked) > 20

    asyncio.run(main())


class BaseAnthropicChatCompletionClient(Foreign):
    """As strict as hosted servers are, and as careless with what it is asked as AutoGen's client for Claude."""

    async def create(self, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:
        last = messages[-1]
        if isinstance(last, AssistantMessage):
            if not isinstance(last.content, str):
                raise ValueError("400: calls without results")
            last.content = last.content.rstrip()
        result = await super().create(messages, **kwargs)
        self.limits.append(kwargs.get("extra_create_args", {}).get("max_tokens"))
        return result.model_copy(update={"content": f"{result.content}  "})

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int | None] = []


def test_what_is_asked_through_the_client_is_what_servers_take_and_changes_nothing() -> None:
    async def main() -> None:
        client = BaseAnthropicChatCompletionClient()
        context = ours.BufferedChatCompletionContext(4, warm=True)
        for number in range(6):
            await context.add_message(user(f"{number}"))
            answered = await client.create(await context.get_messages())
            await context.add_message(answer(str(answered.content)))
            await settled(context)
            await context.add_message(user("and"))
            await client.create(await context.get_messages())
            await context.add_message(calls(f"c{number}"))
            await settled(context)
            await context.add_message(results(f"c{number}"))
        stored = context._messages  # pyright: ignore[reportPrivateUsage]
        assert {
            str(m.content)[-2:] for m in stored if isinstance(m, AssistantMessage) and isinstance(m.content, str)
        } == {"  "}
        assert client.limits.count(1) >= 5

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        (
            "BaseOllamaChatCompletionClient",
            {"options": {"num_ctx": 32_768}},
            {"options": {"num_ctx": 32_768, "num_predict": 9}},
        ),
        ("BaseOpenAIChatCompletionClient", {"model": "m"}, {"max_tokens": 9}),
        ("BaseOpenAIChatCompletionClient", {"model": "m", "max_completion_tokens": 5}, {"max_completion_tokens": 9}),
        ("BaseOpenAIChatCompletionClient", {"model": "o3-mini"}, {"max_completion_tokens": 9}),
        ("BaseAnthropicChatCompletionClient", {"thinking": {"budget_tokens": 2_000}}, None),
        ("Another", {}, None),
    ],
)
def test_a_length_limit_is_what_the_client_takes(name: str, own: dict[str, Any], expected: Any) -> None:
    client: Any = type(name, (Foreign,), {})()
    client._create_args = own
    assert limit(client, 9) == expected


def test_another_agents_call_that_looks_the_same_is_not_taken() -> None:
    async def main() -> None:
        mine, theirs = Foreign(), Foreign()
        context = ours.SummarizingChatCompletionContext(2_000)
        task = user("the task")
        await context.add_message(task)
        asked, done = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            view = await context.get_messages()
            asked.set()
            await done.wait()  # as one that asks a server for its tools
            await mine.create([SystemMessage(content="mine"), *view])

        async def second() -> None:
            await asked.wait()
            await theirs.create([SystemMessage(content="theirs"), task])
            done.set()

        await asyncio.gather(first(), second())
        shape = context._conversation._shape  # pyright: ignore[reportPrivateUsage]
        assert shape is not None
        assert shape.client is mine

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["window", "strategy"])
def test_a_method_that_is_held_since_before_the_view_is_the_right_one(kind: str) -> None:
    """``client.create(await context.get_messages())`` takes hold of the method first."""

    class Fresh(Foreign):
        async def create(self, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:
            return await super().create(messages, **kwargs)

    async def main() -> None:
        client = Fresh()
        context: Any = (
            ours.BufferedChatCompletionContext(4) if kind == "window" else ours.SummarizingChatCompletionContext(2_000)
        )
        await context.add_message(user("the task"))
        await client.create(await context.get_messages())
        shape = context._ahead._last if kind == "window" else context._conversation._shape
        assert shape is not None
        assert shape.client is client

    asyncio.run(main())


def test_a_view_that_is_sent_by_another_task_is_still_known() -> None:
    async def main() -> None:
        client = Foreign()
        context = ours.SummarizingChatCompletionContext(2_000)
        await context.add_message(user("the task"))
        view = await asyncio.create_task(context.get_messages())
        await asyncio.create_task(client.create(view))
        assert context._conversation._shape is not None  # pyright: ignore[reportPrivateUsage]

    asyncio.run(main())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("shots", [False, True])
def test_what_stands_around_the_context_is_warmed_with_it(several: bool, shots: bool) -> None:
    """System messages of the context's own, and an agent's examples before it."""

    async def main() -> None:
        first = SystemMessage(content="the context's \n")
        context = ours.LookaheadChatCompletionContext(
            lambda: KeepRecent(2, at_turns=4), initial_messages=None if shots else [first]
        )
        before: list[LLMMessage] = [user("like this"), answer("so")] if shots else []
        with serving(streamable(AgentServer())) as server:
            client = client_of(server, model_info={**INFO, "multiple_system_messages": several})
            await context.add_message(user("the task"))
            for turn in range(12):
                view = await context.get_messages()
                await client.create([SystemMessage(content="the agent's"), *before, *view])
                await context.add_message(calls(f"c{turn}"))
                await settled(context)
                await context.add_message(results(f"c{turn}"))
            assert context.last_commit is not None
            assert context.last_commit.kind == "lookahead"
            cut = [b for a, b in itertools.pairwise(server.main) if len(b["messages"]) < len(a["messages"])]
            assert len(cut) >= 3
            # Nothing but the newest result is cold.
            assert [warmed_before(server, body) for body in cut] == [len(body["messages"]) - 1 for body in cut]

    asyncio.run(main())


def test_an_answer_that_is_handed_over_is_not_the_agents() -> None:
    async def main() -> None:
        with serving(streamable(AgentServer())) as server:
            client = client_of(server)
            context = ours.BufferedChatCompletionContext(3)
            for number in range(4):
                await context.add_message(user(f"{number}"))
                await client.create(await context.get_messages())
                await context.add_message(answer("mine"))
                await settled(context)
            before = len(server.prefills)
            assert before
            await context.add_message(answer("another's"))
            await settled(context)
            assert len(server.prefills) == before

    asyncio.run(main())


@pytest.mark.parametrize("turns", [1, 3])
def test_a_loop_that_ends_with_a_reflection_is_foreseen(turns: int) -> None:
    server, _ = played(
        ours.BufferedChatCompletionContext(5),
        turns=1000,
        tasks=6,
        max_tool_iterations=turns,
        reflect_on_tool_use=True,
    )
    foreseen = [
        warmed_before(server, b) == len(b["messages"]) - 1
        for b in server.main[4 * turns :]
        if b["messages"][-1]["role"] == "tool" and bool(b.get("tools")) == (turns > 1)
    ]
    assert len(foreseen) >= 4
    assert all(foreseen)


class Iterable:
    """An answer that can only be iterated."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        for piece in self.pieces:
            yield piece


RESULT = CreateResult(
    content="answer", usage=RequestUsage(prompt_tokens=1, completion_tokens=1), finish_reason="stop", cached=False
)


@pytest.mark.parametrize("pieces", [("a", RESULT), ("a", None, RESULT), ()])
def test_streams_of_any_kind_come_through(pieces: tuple[Any, ...]) -> None:
    class Streams(Foreign):
        def create_stream(self, messages: Sequence[LLMMessage], **kwargs: Any) -> Any:
            return Iterable(*pieces)

    async def main() -> None:
        client = Streams()
        context = ours.BufferedChatCompletionContext(4)
        await context.add_message(user("the task"))
        stream = client.create_stream(await context.get_messages())
        assert [piece async for piece in stream] == list(pieces)
        # Nobody waits for a call any more: it is what it was.
        assert isinstance(client.create_stream([user("x")]), Iterable) == (not SEEN.listens())

    asyncio.run(main())


def test_messages_are_passed_as_they_were() -> None:
    class Keyword(Foreign):
        async def create(self, *, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:  # type: ignore[override]
            return await super().create(messages, **kwargs)

    async def main() -> None:
        client = Keyword()
        context = ours.SummarizingChatCompletionContext(2_000)
        await context.add_message(user("the task"))
        await client.create(messages=await context.get_messages())
        assert context._conversation._shape is not None  # pyright: ignore[reportPrivateUsage]
        assert (await client.create(messages=[user("x")])).content == "answer"

    asyncio.run(main())


def test_a_client_that_raises_at_once_does_so_still() -> None:
    class Raises(Foreign):
        def create_stream(self, messages: Sequence[LLMMessage], **kwargs: Any) -> Any:
            raise RuntimeError("no stream")

    async def main() -> None:
        context = ours.BufferedChatCompletionContext(4)
        await context.add_message(user("the task"))
        view = await context.get_messages()
        with pytest.raises(RuntimeError, match="no stream"):
            Raises().create_stream(view)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["window", "strategy"])
def test_a_view_reaches_the_agent_where_its_call_cannot_be_watched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(one: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(SEEN, "watch", broken)

    async def main() -> None:
        context: Any = (
            ours.BufferedChatCompletionContext(4) if kind == "window" else ours.SummarizingChatCompletionContext(2_000)
        )
        await context.add_message(user("the task"))
        assert await context.get_messages() == [user("the task")]

    asyncio.run(main())


def test_a_context_whose_calls_are_not_seen_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        client = Foreign()
        context = ours.SummarizingChatCompletionContext(2_000)
        for number in range(4):
            await context.add_message(user(f"{number}"))
            await client.create([*await context.get_messages(), user("and now?")])
            await context.add_message(answer("so"))

    asyncio.run(main())
    assert "nothing is transformed" in caplog.text


def test_errors_and_cancelled_calls_come_through() -> None:
    class Failing(Foreign):
        async def create(self, messages: Sequence[LLMMessage], **kwargs: Any) -> CreateResult:
            raise RuntimeError("no model")

    async def main() -> None:
        context = ours.BufferedChatCompletionContext(4)
        agent = AssistantAgent("agent", Failing(), model_context=context)
        with pytest.raises(RuntimeError, match="no model"):
            await agent.run(task="the task")
        with serving(AgentServer()) as server:
            asked, over = threading.Event(), threading.Event()

            def never(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
                asked.set()
                over.wait(30)
                return {"role": "assistant", "content": "late"}, "stop"

            server.answer = never
            client = client_of(server)
            context = ours.BufferedChatCompletionContext(4)
            agent = AssistantAgent("agent", client, model_context=context)
            token = CancellationToken()
            running = asyncio.create_task(agent.run(task="the task", cancellation_token=token))
            await asyncio.to_thread(asked.wait, 30)
            token.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            over.set()
            assert [type(m).__name__ for m in await context.get_messages()] == ["UserMessage"]

    asyncio.run(main())


def test_a_stream_that_is_left_is_closed() -> None:
    async def main() -> None:
        with serving(streamable(AgentServer(turns=0))) as server:
            client = client_of(server)
            context = ours.BufferedChatCompletionContext(4)
            await context.add_message(user("the task"))
            stream = client.create_stream(await context.get_messages())
            async for _ in stream:
                break
            await stream.aclose()
            await context.add_message(calls("c"))
            await settled(context)

    asyncio.run(main())
    gc.collect()


def test_calls_of_nobody_pass_through() -> None:
    async def main() -> None:
        with serving(streamable(AgentServer(turns=0))) as server:
            client = client_of(server)
            context = ours.BufferedChatCompletionContext(4)
            await context.add_message(user("the task"))
            await context.get_messages()
            await client.create([user("something else")])
            await context.add_message(calls("c"))
            await settled(context)
            assert server.prefills == []

    asyncio.run(main())


def ledger(made: int) -> str:
    """How MagenticOne's orchestrator wants to be told who is next."""
    told = {
        "is_request_satisfied": made > 16,
        "is_in_loop": False,
        "is_progress_being_made": True,
        "next_speaker": "b" if made % 4 else "a",
        "instruction_or_question": f"do {made}",
    }
    return json.dumps({name: {"reason": "so", "answer": answer} for name, answer in told.items()})


def answering(kind: str, server: AgentServer) -> Any:
    """What the model says in a team of a kind."""

    def answer(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        made = len(server.main)
        if kind_of(body) == "prefill":
            return {"role": "assistant", "content": "x"}, "length"
        if kind == "graph":
            return {"role": "assistant", "content": f"after {len(body['messages'])}"}, "stop"
        if "is_request_satisfied" in str(body["messages"][-1]["content"]):
            return {"role": "assistant", "content": ledger(made)}, "stop"
        if body.get("tools"):
            names = [t["function"]["name"] for t in body["tools"]]
            call = {"id": f"c{made}", "type": "function", "function": {"name": names[0], "arguments": "{}"}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        return {"role": "assistant", "content": "b" if made % 3 else "a"}, "stop"

    return answer


def team_of(kind: str, client: ChatCompletionClient, context: Callable[[int], Any]) -> Any:
    """A team whose agents have a context of their own each."""

    def agent(name: str, **more: Any) -> AssistantAgent:
        return AssistantAgent(name, client, model_context=context(5), system_message=f"I am {name}", **more)

    end = MaxMessageTermination(9)
    match kind:
        case "round robin":
            return RoundRobinGroupChat([agent("a"), agent("b")], termination_condition=end)
        case "selector":
            more: dict[str, Any] = {"allow_repeated_speaker": True, "model_context": context(5)}
            return SelectorGroupChat([agent("a"), agent("b")], client, termination_condition=end, **more)
        case "swarm":
            pair = [agent("a", handoffs=["b"]), agent("b", handoffs=["a"])]
            return Swarm(pair, termination_condition=end)  # type: ignore[arg-type]
        case "graph":
            first, left, right, last = (agent(name) for name in "abcd")
            graph = DiGraphBuilder().add_node(first).add_node(left).add_node(right).add_node(last)
            for source, target in ((first, left), (first, right), (left, last), (right, last)):
                graph.add_edge(source, target)
            return GraphFlow([first, left, right, last], graph=graph.build())
        case "magentic one":
            return MagenticOneGroupChat([agent("a", description="a"), agent("b", description="b")], client)
        case _:
            inner = RoundRobinGroupChat([agent("a"), agent("b")], termination_condition=MaxMessageTermination(3))
            mind = SocietyOfMindAgent("mind", inner, client, model_context=context(5))
            return RoundRobinGroupChat([mind], termination_condition=MaxMessageTermination(4))


@pytest.mark.parametrize("kind", ["round robin", "selector", "swarm", "society of mind", "graph", "magentic one"])
def test_teams_work(kind: str) -> None:
    """With a context of its own each; whatever they are warmed for, the requests are the built-in's."""

    async def run(module: Any) -> list[str]:
        with serving(AgentServer(turns=0)) as server:
            server.answer = answering(kind, server)
            client = client_of(server, model_info={**INFO, "structured_output": False})
            await team_of(kind, client, module.BufferedChatCompletionContext).run(task="the task")
            told = [str(b["messages"]) for b in server.main]
            assert len(told) >= 4
            return sorted(told) if kind == "graph" else told  # two of its agents are asked at once

    from autogen_core import model_context as built_in

    assert asyncio.run(run(ours)) == asyncio.run(run(built_in))


def test_a_strategy_in_a_team_is_kept_to_its_agent() -> None:
    server, agent = played(ours.LookaheadChatCompletionContext(lambda: KeepRecent(2, at_turns=4)))
    own: Any = agent
    assert isinstance(own._model_client, OpenAIChatCompletionClient)
    cut = [len(b["messages"]) for b in server.main]
    assert max(cut) <= 12
