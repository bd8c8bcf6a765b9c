"""Lookahead work on a llama.cpp server of its own, handed over at the commit through the folder both save slots to."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from serving.fake_llama import FakeLlama, tokens_of
from serving.test_llamacpp import CALL, PROMPT, QUESTION, RESULT, SYSTEM, USER, main_call, rendered
from smoothagent.errors import BackendUnreachableError, ConfigurationError
from smoothagent.serving.backend import Stream, Usage
from smoothagent.serving.openai import OpenAIBackend
from virtual_clock import run_virtual

SIDE = "http://side:8080/v1"
VIEW = [SYSTEM, {"role": "user", "content": "Summary: all is well. " * 20}]


def pair(agents: FakeLlama, side: FakeLlama, **kwargs: Any) -> OpenAIBackend:
    """A backend on two servers that save to one folder, unless ``side`` has a folder already."""
    if not side.files:
        side.files = agents.files
    b = OpenAIBackend(client=agents.client(), lookahead_url=SIDE, **kwargs)
    assert b._side is not None  # pyright: ignore[reportPrivateUsage]
    b._side._given = side.client(SIDE)  # pyright: ignore[reportPrivateUsage]
    return b


def busy(server: FakeLlama) -> list[dict[str, Any]]:
    """What the server was made to compute."""
    return server.bodies("/completion") + server.bodies("/v1/chat/completions")


def test_what_was_warmed_there_is_here_after_the_commit_and_a_second_time() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def cycle(view: list[Any]) -> Usage:
        await b.prefill("c", view, PROMPT)
        await b.prefill("c", [*view, CALL], PROMPT)
        assert b.committed("c")
        assert await b.deliver("c")
        return await main_call(agents, b, [*view, CALL, RESULT])

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        computed_here = agents.evaluated
        for number in range(3):
            b._pacer.sizes.paused(0.1)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            view = [SYSTEM, {"role": "user", "content": f"Summary {number}: " + "all is well. " * 30}]
            usage = await cycle(view)
            warm = tokens_of(
                rendered(agents, [*view, CALL, RESULT], reply=False).partition("line one")[0], special=True
            )
            assert usage.cached_tokens == len(warm)
            assert usage.prompt_tokens - len(warm) + computed_here == agents.evaluated, "nothing was prefilled here"
            computed_here = agents.evaluated
        assert not agents.bodies("/completion")

    run_virtual(main())


def test_in_long_tool_times_the_agents_own_server_does_it_with_all_its_threads() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        for _ in range(2):
            await main_call(agents, b, [SYSTEM, USER])
            await asyncio.sleep(2)
        await b.prefill("c", VIEW, PROMPT)
        assert await b.prefill("c", [*VIEW, {"role": "assistant", "content": "It"}], PROMPT, partial=True) == Usage()
        assert not busy(side)
        assert not b.committed("c"), "it is where requests go"
        usage = await main_call(agents, b, VIEW)
        assert usage.cached_tokens == len(tokens_of(rendered(agents, VIEW, reply=False), special=True))

    run_virtual(main())


def test_a_summary_is_written_there_over_mains_kv() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        before, evaluated = list(agents.slots[0].tokens), agents.evaluated
        answer = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=50, lookahead=True)
        assert answer.text == agents.answer
        assert (agents.slots[0].tokens, agents.evaluated) == (before, evaluated)
        assert side.evaluated <= len(rendered(side, [QUESTION], reply=True)) + len(side.answer) + 20

    run_virtual(main())


def test_the_next_lookahead_begins_with_what_was_delivered() -> None:
    """Offloads in a row: the next view is the present one but for its newest outputs."""
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        await b.prefill("c", VIEW, PROMPT)
        b.committed("c")
        await b.deliver("c")
        before = side.evaluated
        longer = [*VIEW, {"role": "assistant", "content": "I see."}]
        await b.prefill("c", longer, PROMPT)
        # And what surely follows it: the message's end, the next one's beginning.
        assert side.evaluated - before <= len("<assistant>I see.</>\n<user>") + 1

    run_virtual(main())


def test_it_runs_beside_a_decode_at_full_speed_and_stands_still_for_a_prefill() -> None:
    agents, side = FakeLlama(per_step=0.02, answer="x" * 100), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        job = asyncio.ensure_future(b.prefill("c", [SYSTEM, {"role": "user", "content": "y" * 400}], PROMPT))
        b.main_arrived("c")
        evaluated = side.evaluated
        await asyncio.sleep(2.0)
        assert side.evaluated == evaluated, "stands still"
        b.main_first_token("c")
        await asyncio.sleep(2.0)
        assert job.done(), "400 tokens of 4 ms in 2 s beside a decode"
        b.main_done("c")

    run_virtual(main())
    assert b.stats[1].charged == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (FakeLlama(n_ctx=2048), "n_ctx is '2048'.*'4096'"),
        (FakeLlama(n_slots=8), "total_slots is '8'.*'4'"),
        (FakeLlama(path="/models/b.gguf"), "model is 'b.gguf'.*'a.gguf'"),
        (FakeLlama(template="another"), "chat_template is 'another'"),
        (FakeLlama(weights={"n_params": 7}), "weights is .*'n_params': 7"),
    ],
)
def test_another_model_or_window_is_an_error(other: FakeLlama, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        run_virtual(pair(FakeLlama(), other).caps())


def test_a_server_that_is_no_llama_cpp_takes_none() -> None:
    b = OpenAIBackend(client=FakeLlama().client(), dialect="openai", lookahead_url=SIDE)
    with pytest.raises(ConfigurationError, match=r"lookahead_url.*needs llama\.cpp"):
        run_virtual(b.caps())


def _gone(side: FakeLlama) -> None:
    side.faults["/props"] = [httpx2.ConnectError("refused")] * 9


def _cannot_save(side: FakeLlama) -> None:
    side.can_save = False


def _another_folder(side: FakeLlama) -> None:
    side.files = {"another": []}


@pytest.mark.parametrize("broken", [_gone, _cannot_save, _another_folder])
def test_where_it_cannot_be_used_the_work_is_done_here_and_that_is_said(broken: Any) -> None:
    agents, side = FakeLlama(), FakeLlama()
    broken(side)
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        await b.prefill("c", VIEW, PROMPT)
        assert not b.committed("c")
        usage = await main_call(agents, b, VIEW)
        assert usage.cached_tokens == len(tokens_of(rendered(agents, VIEW, reply=False), special=True))
        assert (await b.generate("c", [*VIEW, QUESTION], PROMPT, max_tokens=50, lookahead=True)).text
        assert "lookahead" in " ".join((await b.caps()).notes)

    run_virtual(main())
    assert all(x["id_slot"] == 2 and len(x["prompt"]) <= 16 for x in busy(side)), "nothing but the proof"


def test_its_own_server_is_no_second_one() -> None:
    b = OpenAIBackend(client=FakeLlama().client(), lookahead_url="http://fake:8080/v1")
    with pytest.raises(ConfigurationError, match="is the agent's own server"):
        run_virtual(b.caps())


def test_kv_that_cannot_be_restored_in_full_is_not_relied_on() -> None:
    """A file of the same name from another folder, or a server that keeps less of it."""
    agents, side = FakeLlama(keeps=10), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.prefill("c", VIEW, PROMPT)
        assert not b.committed("c")
        assert "10 could be restored" in " ".join((await b.caps()).notes)

    run_virtual(main())


def test_hand_overs_that_are_slow_end_the_use_of_it_but_not_of_copies_here() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        for number in range(3):
            view = [SYSTEM, {"role": "user", "content": f"{number} " + "x" * 200}]
            side.per_copy = 0.0
            await b.prefill("c", view, PROMPT)
            side.per_copy = 5.0
            assert b.committed("c")
            delivery = asyncio.ensure_future(b.deliver("c"))
            await asyncio.sleep(1.0)
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
            b.undelivered("c")
            await asyncio.sleep(10)
        assert not b.committed("c")
        notes = " ".join((await b.caps()).notes)
        assert "3 times in a row" in notes
        # Within the agent's own server copies are made as ever.
        answer = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=50, lookahead=True)
        assert answer.text == agents.answer
        assert any(s.path.endswith("action=restore") for s in agents.seen)

    run_virtual(main())


def test_a_commit_that_is_taken_back_leaves_main_where_it_was() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        await b.prefill("c", VIEW, PROMPT)
        assert b.committed("c")
        b.undelivered("c")
        usage = await main_call(agents, b, [SYSTEM, USER, CALL, RESULT])
        assert usage.cached_tokens is not None
        assert usage.cached_tokens >= len(rendered(agents, [SYSTEM, USER], reply=False))

    run_virtual(main())


def test_what_was_warmed_there_is_not_committed_to_once_it_cannot_be_brought() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        await b.prefill("c", VIEW, PROMPT)
        dialect: Any = b._dialect  # pyright: ignore[reportPrivateUsage]
        dialect._copies.unlink("gone")
        before = b.route("c", Stream.MAIN)
        assert not b.committed("c")
        assert b.route("c", Stream.MAIN) == before
        # What is warmed after that is warmed here, and committed to.
        await b.prefill("c", VIEW, PROMPT)
        assert not b.committed("c")
        usage = await main_call(agents, b, VIEW)
        assert usage.cached_tokens == len(tokens_of(rendered(agents, VIEW, reply=False), special=True))

    run_virtual(main())


def test_slots_that_are_anothers_by_now_are_left_alone() -> None:
    agents, side = FakeLlama(n_slots=3), FakeLlama(n_slots=3)
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await b.prefill("c", VIEW, PROMPT)
        assert b.committed("c")
        side.per_copy = 0.5
        delivery = asyncio.ensure_future(b.deliver("c"))
        await asyncio.sleep(0.1)
        b.release("c")
        usage = await main_call(agents, b, [SYSTEM, USER], "d")
        assert not await delivery
        again = await main_call(agents, b, [SYSTEM, USER, CALL, RESULT], "d")
        assert again.cached_tokens is not None
        assert again.cached_tokens >= usage.prompt_tokens - len("<assistant>")

    run_virtual(main())


def test_one_that_hangs_is_noticed_although_arrivals_cut_its_requests_short() -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await main_call(agents, b, [SYSTEM, USER])
        await b.prefill("c", [SYSTEM], PROMPT)
        side.faults["/completion"] = ["hang"] * 99
        job = asyncio.ensure_future(b.prefill("c", VIEW, PROMPT))
        for _ in range(20):
            await asyncio.sleep(2)
            await main_call(agents, b, [SYSTEM, USER])
        with pytest.raises(BackendUnreachableError, match="20 s of requests unanswered"):
            await job

    run_virtual(main())


def test_an_answer_is_warmed_as_the_history_will_have_it() -> None:
    """Templates may open an answer otherwise than they render it afterwards."""
    agents, side = FakeLlama(opening="<think>"), FakeLlama(opening="<think>")
    b = pair(agents, side)
    said = {"role": "assistant", "content": "It defines add. " * 8}

    async def main() -> None:
        await b.prefill("c", VIEW, PROMPT)
        await b.prefill("c", [*VIEW, {**said, "content": said["content"][:60]}], PROMPT, partial=True)
        before = side.evaluated
        await b.prefill("c", [*VIEW, said], PROMPT)
        rest = len(said["content"]) - 60 + len("</>\n<user>") + 1
        assert side.evaluated - before <= rest + 1

    run_virtual(main())


@examples(40)
@given(faults=st.lists(st.sampled_from(["/completion", "/slots/2?action=save", "/slots/0?action=restore"]), max_size=4))
def test_its_faults_never_reach_the_agent(faults: list[str]) -> None:
    agents, side = FakeLlama(), FakeLlama()
    b = pair(agents, side)

    async def main() -> None:
        await b.caps()
        await main_call(agents, b, [SYSTEM, USER])
        for path in faults:
            (side if "restore" not in path else agents).faults.setdefault(path, []).append(
                (500, {"error": {"message": "broken"}})
            )
        outcomes = await asyncio.gather(b.prefill("c", VIEW, PROMPT), return_exceptions=True)
        if b.committed("c"):
            await asyncio.gather(b.deliver("c"), return_exceptions=True)
        usage = await main_call(agents, b, [*VIEW, CALL, RESULT])
        assert usage.prompt_tokens, outcomes

    run_virtual(main())
