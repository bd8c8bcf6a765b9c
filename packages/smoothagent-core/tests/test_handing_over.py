"""What was warmed on another server is handed over before the first request after a commit, or not at all."""

from __future__ import annotations

import asyncio
import logging

import pytest

from conversations import Conversation, runtime_of, steady
from scripted import HANG, ScriptedBackend
from smoothagent import BackendUnreachableError, KeepRecent, Prompt
from virtual_clock import run_virtual


async def at_the_commit(conversation: Conversation) -> None:
    """Go on until the hook has committed; the request that follows is not made yet."""
    for number, turn in enumerate(steady(20).turns):
        if turn.user is not None:
            conversation.add({"role": turn.role, "content": turn.user + str(number)})
        if (await conversation.commit(number)).report is not None:
            return
        conversation.add({"role": "assistant", "content": f"{number} {turn.text}"})
        conversation.hook(1)
        await asyncio.sleep(3)
    raise AssertionError("it never committed")


def waits(server: ScriptedBackend) -> tuple[float, float]:
    """Seconds that the first request after a commit waits before it is routed, and the one after it."""

    async def main() -> tuple[float, float]:
        clock = asyncio.get_running_loop().time
        runtime = runtime_of(KeepRecent(2, at_turns=5), server)
        await at_the_commit(Conversation(runtime, server))
        seconds: list[float] = []
        for _ in range(2):
            began = clock()
            async with runtime.main_request() as request:
                assert request.extras
                seconds.append(clock() - began)
            await asyncio.sleep(5)
        await runtime.aclose()
        assert server.running == 0
        return seconds[0], seconds[1]

    return run_virtual(main())


def test_nothing_is_handed_over_where_there_is_one_server() -> None:
    server = ScriptedBackend(delay=0.1)
    assert waits(server) == (0, 0)
    assert server.commits == 1
    assert not server.delivered


def test_the_first_request_waits_for_it() -> None:
    server = ScriptedBackend(delay=0.1, elsewhere=True)
    assert waits(server) == (pytest.approx(0.1), 0)
    assert len(server.delivered) == 1


def test_one_that_takes_too_long_is_given_up_before_the_request_is_sent() -> None:
    """It would replace what the request has computed meanwhile."""
    server = ScriptedBackend(delay=0.1, elsewhere=True, pause=lambda kind, n: HANG if kind == "deliver" else None)
    assert waits(server) == (pytest.approx(1.0), 0)
    assert not server.delivered
    assert ("deliver", 1) in server.cancelled
    assert len(server.called_back) == 1, "the request goes where requests went before"


def test_one_that_brings_nothing_is_taken_back() -> None:
    server = ScriptedBackend(delay=0.1, elsewhere=True, arrives=False)
    assert waits(server) == (pytest.approx(0.1), 0)
    assert len(server.delivered) == len(server.called_back) == 1


def test_one_that_is_under_way_when_the_conversation_is_closed_ends() -> None:
    """Its slots are another conversation's then."""
    server = ScriptedBackend(delay=0.1, elsewhere=True, pause=lambda kind, n: HANG if kind == "deliver" else None)

    async def main() -> None:
        runtime = runtime_of(KeepRecent(2, at_turns=5), server)
        await at_the_commit(Conversation(runtime, server))
        await asyncio.sleep(1)
        await runtime.aclose()
        await asyncio.sleep(1)
        assert server.running == 0

    run_virtual(main())


def test_one_that_fails_is_said_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = ScriptedBackend(
        delay=0.1,
        elsewhere=True,
        fault=lambda kind, n: BackendUnreachableError("it is gone") if kind == "deliver" else None,
    )
    with caplog.at_level(logging.WARNING):
        assert waits(server) == (pytest.approx(0.1), 0)
    assert "it is gone" in caplog.text
    assert len(server.called_back) == 1


def test_a_sub_agents_first_request_waits_for_it_too() -> None:
    server = ScriptedBackend(delay=0.1, elsewhere=True)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        runtime = runtime_of(KeepRecent(2, at_turns=5), server)
        delegation = runtime.delegate(
            prompt=Prompt(model="sub"),
            head=[{"role": "system", "content": "you are a sub-agent"}],
            instruction=lambda text: {"role": "user", "content": text},
        )
        await asyncio.sleep(1)
        delegation.on_commit("go")
        began = clock()
        async with delegation.main_request():
            assert clock() - began == pytest.approx(0.1)
            assert server.delivered == [delegation.session]
        await delegation.aclose()
        await runtime.aclose()

    run_virtual(main())
