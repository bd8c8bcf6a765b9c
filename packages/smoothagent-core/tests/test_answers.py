"""What the agent's model is answering is part of the next prompt: it is warmed as it streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conversations import Conversation, runtime_of, steady
from scripted import ScriptedBackend
from smoothagent import BackendRefusedError, Budget, KeepRecent, Ledger, LookaheadRuntime, Prompt
from virtual_clock import run_virtual

WORDS = ["It defines add, and nothing else that matters here. "] * 6


def answered(
    server: ScriptedBackend, *, prompt: Prompt | None = None, words: list[str] = WORDS
) -> tuple[list[Any], list[list[Any]]]:
    """The view of a request whose answer streams slowly, and what was warmed meanwhile."""

    async def main() -> tuple[list[Any], list[list[Any]]]:
        runtime: LookaheadRuntime[Any] = runtime_of(KeepRecent(2, at_turns=8), server, prompt or Prompt())
        conversation = Conversation(runtime, server)
        await conversation.run(steady(7))
        await asyncio.sleep(3)  # the last segment is warm
        conversation.add({"role": "user", "content": "and now?"})
        view = await runtime.aon_commit(conversation.given())
        assert runtime.last_commit is None
        before = len(server.sent)
        async with runtime.main_request() as request:
            for word in words:
                request.text(word)
                await asyncio.sleep(1)
        seen = [s.messages for s in server.sent[before:] if s.kind == "prefill"]
        conversation.add({"role": "assistant", "content": "".join(words)})
        conversation.hook(1)
        await asyncio.sleep(5)
        await runtime.aclose()
        return view, seen

    return run_virtual(main())


def test_it_is_warmed_behind_all_that_the_request_held() -> None:
    view, seen = answered(ScriptedBackend(delay=0.1))
    first, *partial = seen
    assert first[-1]["content"] == "and now?", "the user's message is warmed beside the answer"
    assert len(partial) >= 3
    for messages in partial:
        *before, last = messages
        # The system text, the latest user message of what is dropped, and the end of the present view.
        assert before[2:] == view[-len(before[2:]) :]
        assert last["role"] == "assistant"
        assert "".join(WORDS).startswith(last["content"])
    assert len(partial[-1][-1]["content"]) >= 4 * len(WORDS[0])


def test_a_volatile_tail_is_not_repeated_so_nothing_stands_behind_it() -> None:
    _, seen = answered(ScriptedBackend(delay=0.1), prompt=Prompt(volatile_tail=1))
    assert all(m[-1]["role"] != "assistant" or m[-1]["content"] not in "".join(WORDS) for m in seen)


def test_where_it_would_cost_the_agent_something_answers_are_not_followed() -> None:
    _, seen = answered(ScriptedBackend(delay=0.1, follows=False))
    assert not seen, "not even the user's message is warmed before the answer is there"


def test_thoughts_are_not_part_of_the_next_prompt() -> None:
    words = ["<think>Let me see what this file could be about, then.", " Hm, a lot. " * 8, "</think>", *WORDS]
    _, seen = answered(ScriptedBackend(delay=0.1), words=words)
    partial = [m[-1]["content"] for m in seen if m[-1]["role"] == "assistant" and "defines" in m[-1]["content"]]
    assert partial
    assert all("".join(WORDS).startswith(text.lstrip()) for text in partial)
    assert not any("think" in str(m[-1]["content"]) for m in seen)


def test_a_server_that_refuses_answers_is_still_warmed_for_the_rest() -> None:
    server = ScriptedBackend(delay=0.1)

    async def main() -> None:
        runtime: LookaheadRuntime[Any] = runtime_of(KeepRecent(2, at_turns=8), server)
        conversation = Conversation(runtime, server)
        await conversation.run(steady(7))
        await asyncio.sleep(3)  # the last segment is warm
        await runtime.aon_commit(conversation.given())
        server.fault = lambda kind, n: BackendRefusedError("no", status=400) if kind == "prefill" else None
        before = len(server.sent)
        async with runtime.main_request() as request:
            for word in WORDS:
                request.text(word)
                await asyncio.sleep(1)
        assert len(server.sent) - before == 1, "it is asked no more"
        server.fault = lambda kind, n: None
        conversation.add({"role": "assistant", "content": "a"})
        conversation.hook(1)
        await asyncio.sleep(3)
        assert server.sent[-1].messages[-1] == {"role": "assistant", "content": "a"}
        await runtime.aon_commit([*conversation.given(), {"role": "user", "content": "next"}])
        assert runtime.last_commit is not None
        assert runtime.last_commit.kind == "lookahead"
        await runtime.aclose()

    run_virtual(main())


def test_a_budget_that_is_spent_ends_it() -> None:
    server = ScriptedBackend(delay=0.1)

    async def main() -> None:
        ledger = Ledger(Budget(max_background_tokens=1_000_000))
        runtime: LookaheadRuntime[Any] = runtime_of(KeepRecent(2, at_turns=8), server, ledger=ledger)
        conversation = Conversation(runtime, server)
        await conversation.run(steady(7))
        await asyncio.sleep(3)  # the last segment is warm
        await runtime.aon_commit(conversation.given())
        ledger.add(prefilled_tokens=1_000_000)
        before = len(server.sent)
        async with runtime.main_request() as request:
            for word in WORDS:
                request.text(word)
                await asyncio.sleep(1)
        assert len(server.sent) == before
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize("text", ["", "a"])
def test_text_without_a_lookahead_is_no_matter(text: str) -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime: LookaheadRuntime[Any] = runtime_of(KeepRecent(2, at_turns=8), server)
        await runtime.aon_commit([{"role": "user", "content": "hello"}])
        async with runtime.main_request() as request:
            request.text(text)
            assert server.events == ["arrived", *(["first"] if text else [])]
        await runtime.aclose()
        assert not server.sent

    run_virtual(main())
