"""Isolation: the sub-agent's prompt is warm before its instruction is complete, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conversations import runtime_of
from examples import examples
from scripted import WHO, CharCounter, ScriptedBackend, tokens_of
from smoothagent import (
    BackendUnreachableError,
    ClosedError,
    ConfigurationError,
    Delegation,
    KeepRecent,
    Prompt,
    Stream,
    Usage,
)
from virtual_clock import run_virtual

HEAD: list[dict[str, Any]] = [{"role": "system", "content": "you are a sub-agent"}]
FILES: list[dict[str, Any]] = [{"role": "user", "content": "file contents"}]
PROMPT = Prompt(model="sub", tools=[{"type": "function", "function": {"name": "sed"}}])


def instruction(text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Task: {text}"}


def delegated(
    test: Callable[[Delegation[Any], ScriptedBackend], Awaitable[None]],
    backend: ScriptedBackend | None = None,
    **more: Any,
) -> None:
    server = backend or ScriptedBackend(delay=0.1)

    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), server, **more)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await test(delegation, server)
        await delegation.aclose()
        await runtime.aclose()
        assert server.running == 0

    run_virtual(main())


def test_the_head_is_warmed_at_once_and_the_instruction_as_it_streams() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        assert [s.messages for s in server.sent] == [HEAD]
        delegation.feed("read")
        await asyncio.sleep(1)
        delegation.feed(" it all")
        delegation.extend(FILES)
        await asyncio.sleep(1)
        assert server.sent[-1].messages == [*HEAD, *FILES, instruction("read it all")]
        assert all(s.prompt == PROMPT and s.conversation == delegation.session for s in server.sent)
        assert delegation.warmed_text == len("read it all")
        out = await delegation.aon_commit("read it all and answer")
        assert out == [*HEAD, *FILES, instruction("read it all and answer")]
        assert server.commits == 1

    delegated(test)


@given(st.lists(st.text(max_size=8), max_size=6), st.sampled_from([0.0, 0.05, 1.0]))
@examples(30)
def test_every_prefill_is_a_prefix_of_the_request_but_for_the_growing_message(texts: list[str], pause: float) -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        for text in texts:
            delegation.feed(text)
            await asyncio.sleep(pause)
        whole = "".join(texts)
        out = delegation.on_commit(whole)
        assert out == [*HEAD, instruction(whole)]
        for sent in server.sent:
            assert sent.messages[: len(HEAD)] == HEAD
            if len(sent.messages) > len(HEAD):
                assert out[-1]["content"].startswith(sent.messages[-1]["content"])

    delegated(test)


@given(st.text(max_size=30), st.integers(1, 5))
@examples(30)
def test_partial_tool_call_json_gives_the_same_instruction(text: str, size: int) -> None:
    arguments = json.dumps({"agent": "reader", "task": text, "depth": 2})

    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        for i in range(0, len(arguments), size):
            delegation.feed_json(arguments[i : i + size], field="task")
        await asyncio.sleep(1)
        if text:
            assert server.sent[-1].messages == [*HEAD, instruction(text)]
        assert delegation.on_commit(text) == [*HEAD, instruction(text)]

    delegated(test)


@pytest.mark.parametrize("arguments", ['{"task": "a" oops', "[1, 2", "nonsense", '{"other": "x"}'])
def test_arguments_that_are_not_what_was_expected_cost_warmth_only(arguments: str) -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        delegation.feed_json(arguments, field="task")
        await asyncio.sleep(1)
        assert delegation.on_commit("do it") == [*HEAD, instruction("do it")]

    delegated(test)


def test_another_instruction_than_was_fed_is_counted_as_a_misprediction() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        delegation.feed("this")
        await asyncio.sleep(1)
        assert delegation.on_commit("that") == [*HEAD, instruction("that")]

    server = ScriptedBackend(delay=0.1)

    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await test(delegation, server)
        assert runtime.ledger.snapshot().mispredictions == 1
        await delegation.aclose()

    run_virtual(main())


def test_the_warming_is_in_a_hurry_from_the_first_word_of_the_instruction_to_the_hand_over() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        assert not server.hurried
        delegation.feed("do ")
        await asyncio.sleep(1)
        assert server.hurried == {delegation.session}
        delegation.on_commit("do this")
        await asyncio.sleep(1)
        assert not server.hurried
        assert server.promotions == 1

    delegated(test)


def test_committing_twice_swaps_once() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        assert delegation.on_commit("x") == delegation.on_commit("x")
        assert server.commits == 1

    delegated(test)


def test_a_commit_never_waits_and_stops_the_warming() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        assert await delegation.aon_commit("go") == [*HEAD, instruction("go")]
        assert asyncio.get_running_loop().time() == began
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert server.running == 0

    delegated(test, ScriptedBackend(delay=100.0))


@pytest.mark.parametrize("error", [BackendUnreachableError("gone"), RuntimeError("a bug")])
def test_a_server_that_fails_costs_warmth_only(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        delegation.feed("text")
        await asyncio.sleep(1)
        assert delegation.on_commit("text") == [*HEAD, instruction("text")]

    delegated(test, ScriptedBackend(delay=0.1, fault=lambda kind, n: error))
    assert [r.levelname for r in caplog.records if "it starts cold" in r.message] == ["WARNING"]


def test_without_lookahead_or_backend_it_still_builds_the_request() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        delegation.feed("text")
        await asyncio.sleep(1)
        assert server.sent == []
        assert delegation.on_commit("text") == [*HEAD, instruction("text")]

    delegated(test, lookahead=False)

    async def alone() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), None)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        assert delegation.on_commit("x") == [*HEAD, instruction("x")]
        with delegation.main_request() as request:
            assert request.extras == {}
        delegation.cancel()

    run_virtual(alone())


def test_cancelling_stops_the_work_frees_the_server_and_says_so_afterwards() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        delegation.feed("more")
        await asyncio.sleep(0.05)
        assert server.running == 1
        await delegation.aclose()
        assert server.running == 0
        delegation.cancel()
        assert server.released == [delegation.session]
        for use in (
            lambda: delegation.feed("x"),
            lambda: delegation.feed_json('{"task": "x', field="task"),
            lambda: delegation.extend(FILES),
            lambda: delegation.on_commit("x"),
        ):
            with pytest.raises(ClosedError, match="delegation is over"):
                use()

    delegated(test)


def test_its_own_calls_are_routed_and_booked() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        out = delegation.on_commit("go")
        assert server.warm[delegation.session] == tokens_of(out)[: len(tokens_of(HEAD))]
        async with delegation.main_request() as request:
            assert request.extras == server.route(delegation.session, Stream.MAIN)
            request.first_token()
            request.usage(Usage(40, 5, 21))
        assert server.events == ["arrived", "first", "done"]
        assert delegation.cached_tokens == 21

    delegated(test)


def test_the_head_is_a_copy_and_the_callers_context_stays_with_the_caller() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        token = WHO.set("the caller")
        head = list(HEAD)
        other = Delegation(
            backend=server,
            codec=delegation._codec,  # pyright: ignore[reportPrivateUsage]
            lane=delegation._lane,  # pyright: ignore[reportPrivateUsage]
            ledger=delegation._ledger,  # pyright: ignore[reportPrivateUsage]
            prompt=PROMPT,
            head=head,
            instruction=instruction,
        )
        head.append(FILES[0])
        other.feed("text")
        await asyncio.sleep(1)
        out = other.on_commit("text")
        assert out == [*HEAD, instruction("text")]
        assert out[0] is HEAD[0]
        assert {s.who for s in server.sent} == {"nobody"}
        WHO.reset(token)
        await other.aclose()

    delegated(test)


# ---- what it holds, what it costs, and what goes on from it ----------------------------------------------------------


def test_a_server_that_is_not_warmed_is_asked_for_nothing() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        delegation.feed("read it")
        await asyncio.sleep(5)
        assert server.sent == []
        assert delegation.on_commit("read it") == [*HEAD, instruction("read it")]

    delegated(test, ScriptedBackend(delay=0.1, warms=False))


def test_what_is_dropped_or_closed_with_its_parent_holds_no_slot() -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        used = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await asyncio.sleep(1)
        used.on_commit("read it")
        await asyncio.sleep(0.1)
        sessions = [used.session]
        del used
        gc.collect()
        await asyncio.sleep(0)
        assert server.released == sessions
        waiting = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await asyncio.sleep(1)
        await runtime.aclose()
        await asyncio.sleep(0.1)
        assert waiting.session in server.released
        with pytest.raises(ClosedError):
            waiting.feed("more")

    run_virtual(main())


def test_a_task_that_nobody_speaks_of_is_given_up() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(200)
        delegation.feed("read")
        await asyncio.sleep(200)
        assert server.released == []
        await asyncio.sleep(200)
        assert server.released == [delegation.session]

    delegated(test)


@pytest.mark.parametrize("commits", [False, True])
def test_a_prefill_that_is_cut_short_is_booked(commits: bool) -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=10.0)
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await asyncio.sleep(1)
        if commits:
            delegation.on_commit("read it")
            await asyncio.sleep(1)
        await delegation.aclose()
        counts = runtime.ledger.snapshot()
        assert counts.prefilled_tokens == len(tokens_of(HEAD))
        assert counts.wasted_tokens == (0 if commits else len(tokens_of(HEAD)))
        await runtime.aclose()

    run_virtual(main())


def test_a_sub_agent_of_many_turns_goes_on_where_it_was_warmed() -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1, elsewhere=True)
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await asyncio.sleep(1)
        messages = delegation.on_commit("read it")
        child = runtime.sub_agent(delegation, KeepRecent(1, at_turns=3), tokens=CharCounter())
        assert await child.aon_commit(messages) == messages
        async with child.main_request() as request:
            assert request.extras == server.route(delegation.session, Stream.MAIN)
            assert server.delivered == [delegation.session]  # what was warmed elsewhere has come
        for number in range(4):
            messages = [*messages, {"role": "assistant", "content": f"step {number}"}, instruction(str(number))]
            child.on_segment_boundary(messages)
            await asyncio.sleep(1)
            messages = await child.aon_commit(messages)
        assert child.last_commit is not None
        assert {s.conversation for s in server.sent} == {delegation.session}
        assert server.released == []
        await child.aclose()
        assert server.released == [delegation.session]
        await runtime.aclose()

    run_virtual(main())


@pytest.mark.parametrize("ends", ["on_commit", "cancel"])
def test_a_task_that_ends_with_its_last_word_is_over(ends: str) -> None:
    """The word and the end come at once: nothing is prefilled beside the sub-agent, nor leased again."""

    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1)
        before = len(server.sent)
        delegation.feed("read it")
        if ends == "on_commit":
            delegation.on_commit("read it")
        else:
            delegation.cancel()
        await asyncio.sleep(1000)
        assert len(server.sent) == before
        assert server.released == ([delegation.session] if ends == "cancel" else [])

    delegated(test)


def test_one_who_takes_his_time_still_delegates() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        await asyncio.sleep(1000)
        assert server.released == [delegation.session]
        delegation.feed("read")
        assert delegation.on_commit("read it") == [*HEAD, instruction("read it")]
        async with delegation.main_request() as request:
            assert request.extras
        assert server.commits == 0

    delegated(test)


def test_a_parent_that_closes_leaves_the_sub_agents_that_work() -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        works, waits = (runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction) for _ in range(2))
        await asyncio.sleep(1)
        works.on_commit("read it")
        async with works.main_request():
            await runtime.aclose()
            await asyncio.sleep(1)
            assert waits.session in server.released
            assert works.session not in server.released
        await works.aclose()
        assert works.session in server.released
        sent = len(server.sent)
        with pytest.raises(ClosedError):
            runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await asyncio.sleep(1)
        assert len(server.sent) == sent

    run_virtual(main())


def test_what_was_under_way_is_booked_before_it_is_forgotten() -> None:
    class Forgetful(ScriptedBackend):
        def release(self, conversation: str) -> None:
            super().release(conversation)
            self.computed[conversation] = 0

    async def main() -> None:
        server = Forgetful(delay=10.0, unwind=0.5)
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        await asyncio.sleep(1)
        delegation.cancel()
        await asyncio.sleep(2)
        assert runtime.ledger.snapshot().wasted_tokens == len(tokens_of(HEAD))
        assert server.released == [delegation.session]
        await runtime.aclose()

    run_virtual(main())


def test_only_a_task_that_has_begun_is_gone_on_with() -> None:
    async def test(delegation: Delegation[Any], server: ScriptedBackend) -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=4), server, lookahead=False)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"call task.on_commit\(…\) first"):
                runtime.sub_agent(delegation, KeepRecent(1, at_turns=3))
            gc.collect()
            await asyncio.sleep(0)
        assert server.released == []  # a refusal frees nothing of what is being warmed
        delegation.on_commit("x")
        child = runtime.sub_agent(delegation, KeepRecent(1, at_turns=3))
        assert child.lookahead is False
        async with child.main_request() as request:
            request.usage(Usage(10, 1, 7))
        assert delegation.cached_tokens == 7
        await child.aclose()
        await runtime.aclose()

    delegated(test)


def test_one_that_ended_before_its_first_step_is_not_waited_for() -> None:
    async def main() -> None:
        server = ScriptedBackend(delay=0.1)
        runtime = runtime_of(KeepRecent(2, at_turns=4), server)
        delegation = runtime.delegate(prompt=PROMPT, head=HEAD, instruction=instruction)
        delegation.on_commit("x")
        child = runtime.sub_agent(delegation, KeepRecent(1, at_turns=3))
        clock = asyncio.get_running_loop().time
        began = clock()
        await delegation.aclose()
        assert clock() == began
        await child.aclose()
        await runtime.aclose()

    run_virtual(main())
