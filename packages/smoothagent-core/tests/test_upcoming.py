"""What is certain of the next prompt is prefilled, and the call that brings it finds it; a server that comes late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scripted import HANG, ScriptedBackend
from smoothagent import BackendError, KeepRecent, LookaheadRuntime, OpenAICodec, Prompt, Stream, Usage
from smoothagent.lane import LoopLane
from smoothagent.serving.late import LateBackend
from smoothagent.upcoming import Upcoming
from virtual_clock import run_virtual

Wire = dict[str, Any]
PROMPT = Prompt(model="m")


def said(*texts: str) -> list[Wire]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def upcoming(backend: ScriptedBackend) -> Upcoming[Any]:
    made = Upcoming[Any](LoopLane(asyncio.get_running_loop()))
    made.serve(backend, OpenAICodec())
    return made


async def call(ahead: Upcoming[Any], messages: list[Wire], prompt: Prompt = PROMPT) -> dict[str, Any]:
    async with ahead.request(prompt, messages) as request:
        request.usage(Usage(10, 1, 5))
        return request.extras


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_call_that_begins_as_was_warmed_goes_to_where_it_is_warm(elsewhere: bool) -> None:
    async def main() -> None:
        backend = ScriptedBackend(elsewhere=elsewhere, pause=lambda kind, n: 0.5 if kind == "deliver" else None)
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await asyncio.sleep(2)
        extras = await call(ahead, said("a", "b", "c"))
        assert extras == {"extra_body": {"stream_of": f"{ahead.session}:{Stream.MAIN}"}}
        assert backend.commits == 1
        assert backend.delivered == ([ahead.session] if elsewhere else [])
        assert backend.events == ["arrived", "first", "done"]
        assert ahead.ledger.snapshot().mispredictions == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (said("a", "x", "c"), PROMPT),
        (said("a"), PROMPT),
        (said("a", "b", "c"), Prompt(model="m", system="another")),
    ],
)
def test_a_call_that_begins_otherwise_was_not_foreseen(messages: list[Wire], prompt: Prompt) -> None:
    async def main() -> None:
        backend = ScriptedBackend()
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await asyncio.sleep(2)
        await call(ahead, messages, prompt)
        assert backend.commits == 0
        assert ahead.ledger.snapshot().mispredictions == 1

    run_virtual(main())


def test_what_was_warmed_is_used_once() -> None:
    async def main() -> None:
        backend = ScriptedBackend()
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await asyncio.sleep(2)
        await call(ahead, said("a", "b", "c"))
        await call(ahead, said("a", "b", "c", "d", "e"))
        assert backend.commits == 1
        assert ahead.ledger.snapshot().mispredictions == 0

    run_virtual(main())


def test_where_nothing_has_been_computed_nothing_is_swapped_in() -> None:
    """An untouched slot is no warm one."""

    class Waiting(ScriptedBackend):
        async def prefill(self, *args: Any, **more: Any) -> Usage:
            await asyncio.sleep(100)
            return await super().prefill(*args, **more)

    async def main() -> None:
        backend = Waiting()
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await asyncio.sleep(2)
        await call(ahead, said("a", "b", "c"))
        assert backend.commits == 0

    run_virtual(main())


def test_what_has_come_of_a_beginning_counts_when_it_goes_on() -> None:
    """An extension that has not begun when the call comes leaves what was warmed before."""

    class FirstOnly(ScriptedBackend):
        async def prefill(self, conversation: str, messages: Any, *args: Any, **more: Any) -> Usage:
            if len(messages) > 2:
                await asyncio.sleep(100)
            return await super().prefill(conversation, messages, *args, **more)

    async def main() -> None:
        backend = FirstOnly()
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        assert not ahead.is_warm(PROMPT, said("a", "b", "c"))
        await asyncio.sleep(2)
        assert ahead.is_warm(PROMPT, said("a", "b", "c"))
        assert not ahead.is_warm(PROMPT, said("a", "x", "c"))
        assert not ahead.is_warm(Prompt(model="m", system="another"), said("a", "b", "c"))
        ahead.warm(PROMPT, said("a", "b", "c", "d"))
        await asyncio.sleep(2)
        assert ahead.expects(PROMPT, said("a", "b", "c", "d", "e"))
        assert not ahead.is_warm(PROMPT, said("a", "b", "c", "d", "e"))
        await call(ahead, said("a", "b", "c", "d", "e"))
        assert backend.commits == 1
        assert not ahead.expects(PROMPT, said("a", "b", "c", "d", "e")), "it is the call's now"

    run_virtual(main())


def test_a_call_that_comes_at_once_was_not_mispredicted() -> None:
    """Nothing was computed yet, so nothing was in vain; and what comes of it later is not taken for the next call's."""

    async def main() -> None:
        backend = ScriptedBackend()
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await call(ahead, said("x"))
        await asyncio.sleep(5)
        await call(ahead, said("a", "b", "c"))
        assert backend.prefills == backend.commits == 0
        assert ahead.ledger.snapshot().mispredictions == 0

    run_virtual(main())


def test_a_delivery_that_hangs_is_not_waited_for() -> None:
    async def main() -> None:
        backend = ScriptedBackend(elsewhere=True, pause=lambda kind, n: HANG if kind == "deliver" else None)
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await asyncio.sleep(2)
        began = asyncio.get_running_loop().time()
        await call(ahead, said("a", "b", "c"))
        assert asyncio.get_running_loop().time() - began <= 1.0
        assert backend.called_back == [ahead.session]

    run_virtual(main())


def test_a_conversation_that_rests_lets_go() -> None:
    async def main() -> None:
        backend = ScriptedBackend()
        ahead = upcoming(backend)
        ahead.warm(PROMPT, said("a", "b"))
        await call(ahead, said("a", "b", "c"))
        assert backend.released == []
        await asyncio.sleep(3600)
        assert ahead.session in backend.released

    run_virtual(main())


def test_a_call_before_a_server_is_known_is_just_a_call() -> None:
    async def main() -> None:
        ahead = Upcoming[Any](LoopLane(asyncio.get_running_loop()))
        ahead.warm(PROMPT, said("a"))
        assert await call(ahead, said("a", "b")) == {}

    run_virtual(main())


def test_a_backend_that_comes_late() -> None:
    async def main() -> None:
        late, server, other = LateBackend(), ScriptedBackend(), ScriptedBackend()
        assert late.route("c", Stream.MAIN) == {}
        assert late.spent("c") == Usage()
        assert await late.count(said("a"), PROMPT) is None
        assert not late.committed("c")
        assert not await late.deliver("c")
        for nothing in (late.settle, late.undelivered, late.release, late.main_arrived, late.main_done):
            nothing("c")
        with pytest.raises(BackendError, match="first call"):
            await late.caps()
        with pytest.raises(BackendError, match="first call"):
            await late.prefill("c", said("a"), PROMPT)
        assert late.serve("c", server)
        assert not late.serve("c", server)
        await late.prefill("c", said("a"), PROMPT)
        assert server.prefills == 1
        assert late.serve("c", other)
        assert server.released == ["c"]

    run_virtual(main())


def test_a_runtime_whose_server_comes_late_prepares_from_then_on() -> None:
    async def main() -> None:
        late, server = LateBackend(), ScriptedBackend()
        lane = LoopLane(asyncio.get_running_loop())
        runtime = LookaheadRuntime[Any](KeepRecent(1, at_turns=4), backend=late, prompt=PROMPT, lane=lane)
        history = said("0")
        kinds: list[str] = []
        for turn in range(12):
            if turn == 2:
                late.serve(runtime.session, server)
            view = await runtime.aon_commit(history)
            assert view[-1] is history[-1]
            async with runtime.main_request():
                await asyncio.sleep(1)
            history += said("", f"answer {turn}")[1:]
            runtime.on_segment_boundary(history)
            await asyncio.sleep(5)
            history += said(f"{turn + 1}")
            if runtime.last_commit is not None:
                kinds.append(runtime.last_commit.kind)
        assert server.prefills >= 1
        assert kinds[-1] == "lookahead"
        await runtime.aclose()

    run_virtual(main())


def test_a_view_is_no_commit() -> None:
    async def main() -> None:
        lane = LoopLane(asyncio.get_running_loop())
        runtime = LookaheadRuntime[Any](KeepRecent(1, at_turns=3), backend=ScriptedBackend(), prompt=PROMPT, lane=lane)
        history = said("0", "1", "2", "3", "4")
        assert runtime.view(history) == history
        history += said("5", "6")[1:]
        for _ in range(2):
            view = await runtime.aon_commit(history)
            history += said("", "x", "y")[1:]
            again = runtime.view(history)
            # Whatever a commit has left is in it, and what came since.
            assert again[: len(view)] == view
            assert again[-2:] == history[-2:]
        before = runtime.last_commit
        runtime.view(history)
        assert runtime.last_commit is before
        await runtime.aclose()

    run_virtual(main())
