"""Hooks that meet one another: from several threads, after closing, with calls that are none of the conversation's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from conversations import PROMPT, runtime_of
from scripted import HANG, ScriptedBackend, client_of
from smoothagent import Generated, KeepRecent, LookaheadRuntime, Offload, OffloadStore, Prompt, Summarize, Usage
from test_runtime_sync import LIMIT, history, summarizer
from test_runtime_sync import runtime_of as threaded
from test_wrap import WHOLE
from virtual_clock import run_virtual


def test_a_boundary_that_comes_while_a_commit_waits_takes_no_message_away() -> None:
    gate = threading.Event()
    server = ScriptedBackend(delay=0, pause=lambda kind, n: 0.05 if kind == "synchronous" else None)
    server.arrived = lambda sent: gate.set()
    runtime = summarizer(server)
    sent, got = history(9), list[Any]()
    agent = threading.Thread(target=lambda: got.append(runtime.on_commit(sent)), daemon=True)
    agent.start()
    assert gate.wait(LIMIT)
    runtime.on_segment_boundary(sent[:-2])  # a tool thread that is late
    agent.join(LIMIT)
    assert got[0][-2:] == sent[-2:]
    assert runtime.last_commit is not None
    runtime.close()


@pytest.mark.parametrize("after", [0.5, 3.0])
def test_closing_while_a_commit_waits_at_the_ceiling_asks_the_server_nothing_more(after: float) -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0, pause=lambda kind, n: HANG if kind == "generate" else None)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server, ceiling=905, wait=10.0)
        runtime.on_segment_boundary(history(3))
        await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        loop.call_later(after, runtime.close)
        sent, began = history(4), loop.time()
        assert await runtime.aon_commit(sent) == sent
        assert loop.time() - began == pytest.approx(after)
        assert not [s for s in server.sent if not s.lookahead]
        assert server.released

    run_virtual(main())


def test_after_closing_a_call_is_a_call_like_any_other() -> None:
    server = ScriptedBackend(delay=0)
    runtime = threaded(KeepRecent(2, at_turns=4), server)
    runtime.on_commit(history(1))
    delegation = runtime.delegate(prompt=PROMPT, head=[], instruction=lambda t: {"role": "user", "content": t})
    request, sub = runtime.main_request(), delegation.main_request()
    runtime.close()
    delegation.cancel()
    server.events.clear()
    for each in (request, sub):
        with each as call:
            assert call.extras == {}
    assert "arrived" not in server.events
    assert "first" not in server.events


@pytest.mark.parametrize(
    ("warms", "answer"),
    [
        (True, Generated("", "stop", False, Usage(50, 0, 0))),
        (True, Generated("fine", "stop", False, Usage(50, 5, 0))),
        (False, Generated("fine", "stop", False, Usage(50, 5, 0))),
    ],
)
def test_no_conversation_stays_promoted_once_its_lookahead_is_over(warms: bool, answer: Generated) -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=4, warms=warms, generated=lambda n, _: answer)
        runtime = runtime_of(Summarize(900, keep=250, max_tokens=50), server, ceiling=5000)
        for turns in range(3, 12):
            sent = history(turns)
            await runtime.aon_commit(sent)
            runtime.on_segment_boundary(sent)
            await asyncio.sleep(1)
        assert server.promotions
        await runtime.aclose()
        await asyncio.sleep(20)
        assert not server.hurried

    run_virtual(main())


def test_a_call_with_other_messages_is_not_the_conversations() -> None:
    """A title call through the wrapped client neither goes to its slot nor teaches its counter."""
    bodies: list[bytes] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        bodies.append(request.content)
        return httpx2.Response(200, json={**WHOLE, "usage": {"prompt_tokens": 7, "completion_tokens": 1}})

    server = ScriptedBackend(delay=0)
    runtime = threaded(Summarize(4000, keep=400, max_tokens=50), server)
    client = OpenAI(base_url="http://fake/v1", api_key="x", http_client=client_of(answer))
    with runtime.wrap(client) as wrapped:
        view: list[Any] = runtime.on_commit(history(3))
        before = runtime.events
        wrapped.chat.completions.create(model="m", messages=[{"role": "user", "content": "a title for this"}])
        assert b":aside" in bodies[-1]
        assert server.events[-3:] == ["arrived", "first", "done"]
        wrapped.chat.completions.create(model="m", messages=view)
        assert b":main" in bodies[-1]
        # System text that a framework keeps apart, and what it adds at the end, are its own business.
        more: list[Any] = [
            {"role": "system", "content": "kept apart"},
            *[dict(m) for m in view],
            {"role": "user", "content": "x"},
        ]
        wrapped.chat.completions.create(model="m", messages=more)
        assert b":main" in bodies[-1]
        assert runtime.events == before
        # Whatever cannot be compared counts as the conversation's: it loses nothing by that.
        for strange in (object(), "text", [object()], None):
            with runtime._request_for({"messages": strange}) as request:  # pyright: ignore[reportPrivateUsage]
                assert request.extras
    runtime.close()


@pytest.mark.parametrize("rewritten", [True, False])
def test_a_harness_that_sends_something_else_than_it_was_given_is_told(
    rewritten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=WHOLE)

    client = OpenAI(base_url="http://fake/v1", api_key="x", http_client=client_of(answer))
    runtime = threaded(KeepRecent(2, at_turns=40))
    with runtime.wrap(client) as wrapped:
        for turns in range(1, 9):
            view: list[Any] = runtime.on_commit(history(turns))
            wrapped.chat.completions.create(model="m", messages=[{"role": "user", "content": "a title"}])
            sent: list[Any] = [view[0], {"role": "user", "content": "put in between"}, *view[1:]] if rewritten else view
            wrapped.chat.completions.create(model="m", messages=sent)
    runtime.close()
    assert caplog.text.count("did not begin with the messages that on_commit returned") == rewritten


def test_a_harness_that_keeps_reasoning_to_itself_is_recognised() -> None:
    """It stays in the history and is left out of the calls."""
    server = ScriptedBackend(delay=0)
    runtime = threaded(KeepRecent(20, at_turns=40), server)
    kept: list[Any] = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in history(3)]
    runtime.on_commit(kept)
    with runtime._request_for({"messages": history(3)}) as request:  # pyright: ignore[reportPrivateUsage]
        assert ":main" in str(request.extras)
    runtime.close()


def test_tools_are_taken_from_the_calls_unless_the_prompt_names_others(caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=WHOLE)

    client = OpenAI(base_url="http://fake/v1", api_key="x", http_client=client_of(answer))
    tools: list[Any] = [{"type": "function", "function": {"name": "sed", "parameters": {}}}]
    silent = LookaheadRuntime[Any](KeepRecent(2, at_turns=4), prompt=Prompt(model="m"))
    told = LookaheadRuntime[Any](KeepRecent(2, at_turns=4), prompt=Prompt(model="m", tools=[*tools, *tools]))
    with client:
        for runtime in (silent, told):
            wrapped = runtime.wrap(client)
            for turns in range(1, 4):
                view = runtime.on_commit(history(turns))
                wrapped.chat.completions.create(model="m", messages=view, tools=tools)
            wrapped.chat.completions.create(model="m", messages=[{"role": "user", "content": "a title"}])
            runtime.close()
    assert list(silent.prompt.tools) == tools
    assert list(told.prompt.tools) == [*tools, *tools]
    assert caplog.text.count("the tools that the calls send are not those that the runtime was told of") == 1


@pytest.mark.parametrize("reminted", [False, True])
def test_a_call_that_waits_for_somebody_while_the_agent_goes_on_is_no_trouble(reminted: bool) -> None:
    """Its result comes long after an offload has passed it, under an id that may be another by then."""
    store = OffloadStore("memory://waiting")
    strategy = Offload(3000, keep=1, store=store, min_chars=50)
    runtime = threaded(strategy, ScriptedBackend(delay=0), lookahead=False)
    ask = {"name": "ask_a_human", "arguments": "{}"}
    plain = [{**m, "content": str(m["content"]) * 4} if m["role"] == "tool" else m for m in history(12)]
    commits = 0
    for turns in range(2, 13):
        prefix = str(turns) if reminted else ""
        waiting: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"{prefix}wait", "type": "function", "function": ask}],
        }
        answered = [{"role": "tool", "tool_call_id": f"{prefix}wait", "content": "yes"}] if turns > 9 else []
        raw = [*plain[:4], waiting, *plain[4 : 2 + 2 * turns], *answered]
        last = runtime.last_commit
        view = runtime.on_commit(raw)
        commits += runtime.last_commit is not last
        assert len(view) == len(raw)
        assert [m["role"] for m in view] == [m["role"] for m in raw]
        runtime.on_segment_boundary(raw)
    assert commits
    runtime.close()


@pytest.mark.parametrize(("hard", "said"), [(900, True), (3000, False)])
def test_limits_that_leave_no_room_are_said_once(hard: int, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    runtime = threaded(Summarize(hard, keep=hard // 2, max_tokens=50), ScriptedBackend(delay=0), lookahead=False)
    plain = [{**m, "content": str(m["content"]) * 4} if m["role"] == "tool" else m for m in history(14)]
    for turns in range(1, 15):
        runtime.on_commit(plain[: 2 + 2 * turns])
    assert runtime.last_commit is not None
    assert caplog.text.count("is reached again at once") == said
    runtime.close()


@pytest.mark.parametrize("keep", [0, 250])
def test_what_is_rewritten_on_every_call_is_never_covered(keep: int) -> None:
    """A volatile tail: the record still matches the next input, whose tail is another."""
    server = ScriptedBackend(delay=0)
    store = OffloadStore("memory://volatile")
    plain = [{**m, "content": str(m["content"]) * 4} if m["role"] == "tool" else m for m in history(14)]
    prompt = Prompt(model="m", volatile_tail=1, tools=PROMPT.tools)
    strategies = [Summarize(3000, keep=keep, max_tokens=50), Offload(3000, keep=0, store=store, min_chars=50)]
    for strategy in strategies:
        runtime = threaded(strategy, server, lookahead=False)
        commits = 0
        for turns in range(1, 15):
            sent = [*plain[: 2 + 2 * turns], {"role": "user", "content": f"it is turn {turns}"}]
            last = runtime.last_commit
            view = runtime.on_commit(sent, prompt=prompt)
            assert view[-1] is sent[-1]
            commits += runtime.last_commit is not last
        assert 0 < commits < 6, "it does not commit anew on every turn"
        runtime.close()
