"""The pacer's promises, on a virtual clock, over generated days of an agent's life."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from smoothagent.errors import BackendUnreachableError, ConfigurationError
from smoothagent.serving.costs import Kind
from smoothagent.serving.others import Load
from smoothagent.serving.pacer import HOLD, Pacer
from smoothagent.serving.piece import Grant
from smoothagent.serving.unpaced import Unpaced
from virtual_clock import run_virtual


@dataclass
class Turn:
    tool: float
    prefill: float
    decode: float
    fails: bool


@dataclass
class World:
    """A server's costs, and what happened when."""

    per_token: float
    fixed: float
    pacer: Pacer = field(default_factory=Pacer)
    pieces: list[tuple[float, float, bool]] = field(default_factory=list[tuple[float, float, bool]])
    waits: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    decodes: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    async def work(self, conversation: str, tokens: int, *, elsewhere: bool = False) -> None:
        loop = asyncio.get_running_loop()
        done = 0
        while done < tokens:
            async with self.pacer.piece(conversation, Kind.PREFILL, elsewhere=elsewhere) as grant:
                start = loop.time()
                n = min(tokens - done, grant.tokens)
                try:
                    await asyncio.sleep(self.fixed + self.per_token * n)
                    grant.report(n)
                    done += n
                finally:
                    self.pieces.append((start, loop.time(), grant.beside_decode))

    async def agent(self, conversation: str, turns: list[Turn]) -> None:
        loop = asyncio.get_running_loop()
        for turn in turns:
            await asyncio.sleep(turn.tool)
            arrived = loop.time()
            self.pacer.main_arrived(conversation)
            await asyncio.sleep(turn.prefill)
            self.waits.append((arrived, loop.time()))
            if not turn.fails:
                first = loop.time()
                self.pacer.main_first_token(conversation)
                await asyncio.sleep(turn.decode)
                self.decodes.append((first, loop.time()))
            self.pacer.main_done(conversation)


seconds = st.floats(0.001, 3.0)
turns = st.lists(st.builds(Turn, seconds, seconds, seconds, st.booleans()), max_size=8)


@examples(150)
@given(
    agents=st.lists(turns, min_size=1, max_size=3),
    works=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    per_token=st.floats(0.0005, 0.02),
    fixed=st.floats(0.0, 0.02),
    elsewhere=st.booleans(),
)
def test_no_piece_between_arrival_and_first_token_and_all_work_gets_done(
    agents: list[list[Turn]], works: list[int], per_token: float, fixed: float, elsewhere: bool
) -> None:
    world = World(per_token, fixed)

    async def main() -> None:
        jobs = [world.work(f"w{i}", n, elsewhere=elsewhere) for i, n in enumerate(works)]
        await asyncio.gather(*jobs, *(world.agent(f"a{i}", t) for i, t in enumerate(agents)))

    run_virtual(main())
    for start, end, _ in world.pieces:
        for arrived, first in world.waits:
            overlap = min(end, first) - max(start, arrived)
            assert overlap <= 1e-9, ((start, end), (arrived, first))
    ordered = sorted((start, end) for start, end, _ in world.pieces)
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(ordered)), "one piece at a time"


@examples(150)
@given(
    decode=st.floats(0.5, 20.0),
    tool=st.floats(0.001, 3.0),
    per_token=st.floats(0.0005, 0.01),
    fixed=st.floats(0.0, 0.02),
)
def test_work_elsewhere_fills_decodes_and_pauses_alike_and_costs_no_credit(
    decode: float, tool: float, per_token: float, fixed: float
) -> None:
    world = World(per_token, fixed)
    turn = Turn(tool, 0.5, decode, fails=False)

    async def main() -> None:
        job = asyncio.ensure_future(world.work("w", 1_000_000, elsewhere=True))
        await world.agent("a", [turn] * 3)
        job.cancel()

    run_virtual(main())
    assert world.pacer.stats.charged == 0
    worked = sum(end - start for start, end, _ in world.pieces)
    assert worked >= 0.99 * 3 * (decode + tool)
    assert max(end - start for start, end, _ in world.pieces) <= 4 * 2 * 0.15 + per_token + fixed


@examples(150)
@given(
    decode=st.floats(0.5, 20.0),
    per_token=st.floats(0.0005, 0.006),
    fixed=st.floats(0.0, 0.02),
    promoted=st.booleans(),
    own=st.booleans(),
    first=st.floats(0.0, 1.0),
)
def test_pieces_beside_a_decode_stay_within_their_share(
    decode: float, per_token: float, fixed: float, promoted: bool, own: bool, first: float
) -> None:
    own = own and promoted
    world = World(per_token, fixed)
    pacer = world.pacer
    if promoted:
        pacer.promote("a" if own else "w")

    async def main() -> None:
        job = asyncio.ensure_future(world.work("a" if own else "w", 1_000_000))
        await world.agent("a", [Turn(first, 0.1, decode, fails=False)])
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    run_virtual(main())
    beside = [(end - start) for start, end, beside in world.pieces if beside]
    # The fixed part is a round trip, during which the main request gets its tokens.
    spent = sum(max(0.0, seconds - fixed) for seconds in beside)
    share = pacer.promoted_share if own else pacer.share
    # One piece may be under way when credit is just enough; the first are of a size that knows nothing.
    longest = max(beside, default=0.0)
    assert spent <= share * (decode - spent) + (1 + share) * (longest + pacer.sizes.idle_piece)
    if decode > 3:
        assert spent > 0.3 * share / (1 + share) * decode * per_token / (per_token + fixed), "the credit is used"


def test_arrival_cancels_the_piece_in_flight_and_the_body_sees_it() -> None:
    pacer = Pacer()
    log: list[str] = []

    async def main() -> None:
        async def job() -> Grant:
            async with pacer.piece("c", Kind.DECODE) as grant:
                try:
                    await asyncio.sleep(10)
                except asyncio.CancelledError:
                    log.append(f"cut at {asyncio.get_running_loop().time()}")
                    raise
            return grant

        task = asyncio.ensure_future(job())
        await asyncio.sleep(1)
        pacer.main_arrived("c")
        assert (await task).preempted
        assert task.cancelling() == 0

    run_virtual(main())
    assert log == ["cut at 1.0"]
    assert pacer.stats.preempted == 1


def test_a_cancellation_from_outside_passes_through_and_frees_the_place() -> None:
    pacer = Pacer()

    async def main() -> None:
        async def job() -> None:
            async with pacer.piece("c", Kind.PREFILL):
                await asyncio.sleep(10)

        task = asyncio.ensure_future(job())
        waiting = asyncio.ensure_future(job())
        await asyncio.sleep(1)
        waiting.cancel()
        pacer.main_arrived("c")
        task.cancel()
        for t in (task, waiting):
            with pytest.raises(asyncio.CancelledError):
                await t
        pacer.main_done("c")
        async with asyncio.timeout(1), pacer.piece("c", Kind.PREFILL):
            pass

    run_virtual(main())


def test_a_connection_that_breaks_while_cut_is_the_cut() -> None:
    pacer = Pacer()

    async def main() -> None:
        async def job() -> bool:
            async with pacer.piece("c", Kind.PREFILL) as grant:
                try:
                    await asyncio.sleep(10)
                except asyncio.CancelledError:
                    raise BackendUnreachableError("broken") from None
            return grant.preempted

        task = asyncio.ensure_future(job())
        await asyncio.sleep(1)
        pacer.main_arrived("c")
        assert await task

    run_virtual(main())


def test_the_promoted_conversation_goes_first() -> None:
    pacer = Pacer()
    order: list[str] = []

    async def main() -> None:
        async def job(name: str) -> None:
            async with pacer.piece(name, Kind.PREFILL):
                order.append(name)
                await asyncio.sleep(1)

        jobs = [asyncio.ensure_future(job(n)) for n in ("a", "b", "c")]
        await asyncio.sleep(0.5)
        pacer.promote("c")
        await asyncio.gather(*jobs)

    run_virtual(main())
    assert order == ["a", "c", "b"]


def test_a_copy_waits_until_its_own_main_slot_is_at_rest() -> None:
    pacer = Pacer()

    async def main() -> None:
        pacer.main_arrived("c")
        pacer.main_first_token("c")
        asyncio.get_running_loop().call_later(5, pacer.main_done, "c")
        async with pacer.piece("c", Kind.COPY, at_rest=True):
            assert asyncio.get_running_loop().time() == 5

    run_virtual(main())


def test_other_processes_are_waited_for_but_not_for_ever() -> None:
    looks = 0

    async def watch(own: int) -> Load:
        nonlocal looks
        looks += 1
        return Load(waiting=1)

    pacer = Pacer(watch=watch, foreign_patience=10)

    async def main() -> None:
        async with pacer.piece("c", Kind.PREFILL) as grant:
            assert grant.beside_decode
            assert 10 <= asyncio.get_running_loop().time() < 11

    run_virtual(main())
    assert looks < 250
    assert pacer.stats.overdue == 1


def test_a_tool_time_is_used_although_others_decoded_when_they_were_last_looked_at() -> None:
    """Only another look tells that they have stopped."""
    busy = [Load(decoding=1)]
    looks: list[float] = []

    async def watch(own: int) -> Load:
        looks.append(asyncio.get_running_loop().time())
        return busy[0]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pacer = Pacer(watch=watch)
        async with pacer.piece("c", Kind.PREFILL) as grant:
            await asyncio.sleep(0.01)
            grant.report(16)
        busy[0] = Load()
        await asyncio.sleep(0.1)
        began = loop.time()
        async with pacer.piece("c", Kind.PREFILL) as grant:
            assert not grant.beside_decode
        assert loop.time() - began < 0.1

    run_virtual(main())
    assert len(looks) < 200


def test_a_piece_that_waits_for_others_to_stop_decoding_looks_again_and_again() -> None:
    """Nobody tells this process when they do."""
    decodes_until = 1.0

    async def watch(own: int) -> Load:
        return Load(decoding=int(asyncio.get_running_loop().time() < decodes_until))

    async def main() -> None:
        async with Pacer(watch=watch).piece("c", Kind.PREFILL) as grant:
            assert not grant.beside_decode
        assert decodes_until <= asyncio.get_running_loop().time() < decodes_until + 0.2

    run_virtual(main())


def test_what_a_look_shows_counts_for_the_piece_it_was_made_for() -> None:
    """Others decode: the piece waits for tool time, and then for credit."""

    async def watch(own: int) -> Load:
        return Load(decoding=1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Pacer(watch=watch).piece("c", Kind.PREFILL) as grant:
            assert grant.beside_decode
        assert loop.time() >= HOLD

    run_virtual(main())


def test_pieces_shrink_while_others_use_the_server() -> None:
    load = Load()

    async def watch(own: int) -> Load:
        return load

    pacer = Pacer(watch=watch)

    async def size() -> int:
        async with pacer.piece("c", Kind.PREFILL) as grant:
            await asyncio.sleep(0.001 * grant.tokens)
            grant.report(grant.tokens)
        return grant.tokens

    async def main() -> tuple[int, int, int]:
        nonlocal load
        for _ in range(3):
            await size()
        alone = await size()
        load = Load(decoding=1)
        await asyncio.sleep(1)
        beside = await size()
        assert pacer.stats.charged == pytest.approx(0.06, abs=0.002)
        load = Load()
        await asyncio.sleep(1)
        return alone, beside, await size()

    alone, beside, shared = run_virtual(main())
    assert alone == pytest.approx(150, abs=2)
    assert beside == pytest.approx(60, abs=2)
    assert shared == pytest.approx(75, abs=2)


def test_a_server_that_cannot_tell_its_load_holds_nothing_up() -> None:
    async def watch(own: int) -> Load:
        raise BackendUnreachableError("gone")

    pacer = Pacer(watch=watch)

    async def main() -> None:
        async with asyncio.timeout(1), pacer.piece("c", Kind.PREFILL):
            pass

    run_virtual(main())


def test_hooks_may_come_from_another_thread_and_in_any_number() -> None:
    pacer = Pacer()
    pacer.main_done("never seen")
    pacer.main_first_token("never seen")
    pacer.forget("never seen")

    async def main() -> Grant:
        async def job() -> Grant:
            async with pacer.piece("c", Kind.PREFILL) as grant:
                await asyncio.Event().wait()
            return grant

        task = asyncio.ensure_future(job())
        await asyncio.sleep(0)
        await asyncio.to_thread(pacer.main_arrived, "c")
        return await task

    assert run_virtual(main()).preempted


def test_a_forgotten_conversation_closes_nothing() -> None:
    pacer = Pacer()
    pacer.main_arrived("gone")
    pacer.forget("gone")

    async def main() -> None:
        async with asyncio.timeout(1), pacer.piece("c", Kind.PREFILL):
            pass

    run_virtual(main())


def test_unpaced_grants_everything_at_once() -> None:
    pacer = Unpaced()

    async def main() -> int:
        pacer.main_arrived("c")
        async with pacer.piece("c", Kind.PREFILL) as grant:
            return grant.tokens

    assert run_virtual(main()) > 10**9


def test_where_tool_time_suffices_decoding_is_left_alone() -> None:
    pacer = Pacer()
    pieces: list[tuple[float, bool]] = []

    async def work(tokens: int) -> None:
        done = 0
        while done < tokens:
            async with pacer.piece("c", Kind.PREFILL) as grant:
                pieces.append((asyncio.get_running_loop().time(), grant.beside_decode))
                n = min(tokens - done, grant.tokens)
                await asyncio.sleep(0.004 * n)
                grant.report(n)
                done += n

    async def turn(tokens: int, decode: float) -> int:
        """Its work comes while it decodes; returns how many pieces ran beside that."""
        pacer.main_arrived("c")
        await asyncio.sleep(0.5)
        pacer.main_first_token("c")
        job = asyncio.ensure_future(work(tokens))
        await asyncio.sleep(decode)
        beside = sum(b for _, b in pieces)
        pacer.main_done("c")
        await asyncio.sleep(2)
        pacer.main_arrived("c")
        await asyncio.sleep(0.5)
        pacer.main_done("c")
        await job
        pieces.clear()
        await asyncio.sleep(1)
        return beside

    async def main() -> list[int]:
        return [await turn(200, 3), await turn(200, 3), await turn(2000, 3), await turn(200, 20)]

    first, second, third, long = run_virtual(main())
    assert first == second == 0, "two seconds of tools are enough for it"
    assert third == 0, "nobody knows yet that they are not"
    assert long > 5, "nobody waits for tool time for ever"


def test_work_that_tool_time_did_not_finish_goes_on_beside_the_decode() -> None:
    pacer = Pacer()
    beside = 0

    async def work() -> None:
        nonlocal beside
        while True:
            async with pacer.piece("c", Kind.PREFILL) as grant:
                beside += grant.beside_decode
                await asyncio.sleep(0.004 * grant.tokens)
                grant.report(grant.tokens)
            await asyncio.sleep(0.01)  # renders and tokenizes the next step

    async def main() -> None:
        job = asyncio.ensure_future(work())
        await asyncio.sleep(1)
        pacer.main_arrived("c")
        await asyncio.sleep(0.5)
        pacer.main_first_token("c")
        await asyncio.sleep(3)
        job.cancel()

    run_virtual(main())
    assert beside > 5


def test_pieces_are_short_where_tool_times_are_short() -> None:
    pacer = Pacer()
    sizes: list[int] = []

    async def job() -> None:
        while True:
            async with pacer.piece("c", Kind.PREFILL) as grant:
                sizes.append(grant.tokens)
                await asyncio.sleep(0.001 * grant.tokens)
                grant.report(grant.tokens)

    async def main() -> None:
        task = asyncio.ensure_future(job())
        await asyncio.sleep(3)
        for pause in (2.0, 0.09):
            pacer.main_arrived("c")
            await asyncio.sleep(1)
            pacer.main_done("c")
            await asyncio.sleep(pause)
        pacer.main_arrived("c")
        pacer.main_done("c")
        sizes.append(0)
        await asyncio.sleep(1)
        task.cancel()

    run_virtual(main())
    assert max(sizes[: sizes.index(0)]) == pytest.approx(150, abs=2)
    assert max(sizes[sizes.index(0) + 2 :]) == pytest.approx(30, abs=2)


def test_a_promoted_conversation_is_careful_beside_others() -> None:
    pacer = Pacer()
    spent = {"alone": 0.0, "beside another": 0.0}

    async def main() -> None:
        pacer.promote("c")
        pacer.main_arrived("c")
        pacer.main_first_token("c")
        where = "alone"

        async def job() -> None:
            while True:
                async with pacer.piece("c", Kind.PREFILL) as grant:
                    await asyncio.sleep(0.002 * grant.tokens)
                    grant.report(grant.tokens)
                    spent[where] += 0.002 * grant.tokens

        task = asyncio.ensure_future(job())
        await asyncio.sleep(20)
        pacer.main_arrived("d")
        pacer.main_first_token("d")
        where = "beside another"
        await asyncio.sleep(20)
        task.cancel()

    run_virtual(main())
    assert spent["alone"] == pytest.approx(20 * 1.0 / 2.0, rel=0.05)
    assert spent["beside another"] == pytest.approx(20 * 0.25 / 1.25, rel=0.1)


@pytest.mark.parametrize("during", ["a piece", "a wait"])
def test_a_loop_that_is_closed_under_it_starves_nobody(during: str) -> None:
    pacer = Pacer()

    async def work() -> None:
        async with pacer.piece("gone", Kind.PREFILL):
            await asyncio.Event().wait()

    async def begin() -> None:
        if during == "a wait":
            pacer.main_arrived("other")
        held.append(asyncio.ensure_future(work()))
        await asyncio.sleep(0)

    held: list[asyncio.Task[None]] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    pacer.main_first_token("other")
    pacer.main_done("other")

    async def later() -> None:
        async with asyncio.timeout(1), pacer.piece("c", Kind.PREFILL) as grant:
            grant.report(1)
        pacer.main_arrived("c")
        pacer.main_first_token("c")
        pacer.main_done("c")
        async with asyncio.timeout(1), pacer.piece("c", Kind.PREFILL):
            pass

    run_virtual(later())
    for task in held:
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        task.get_coro().close()


@pytest.mark.parametrize("name", ["idle_piece", "decode_piece", "share", "promoted_share"])
@pytest.mark.parametrize("value", [0, -0.5])
def test_a_pacer_that_could_do_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"Pacer\({name}={value}\): it must be above 0"):
        Pacer(**cast("dict[str, Any]", {name: value}))
