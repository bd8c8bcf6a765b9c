"""llama.cpp: exact prefixes by token id, a slot a stream, summaries in pieces that any arrival may cut."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from serving.fake_llama import FakeLlama, text_of, tokens_of
from smoothagent.errors import BackendProtocolError, ConfigurationError, PromptTooLongError
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Stream, Usage
from smoothagent.serving.dialects.llamacpp.holdings import common
from smoothagent.serving.openai import OpenAIBackend
from virtual_clock import run_virtual

SYSTEM = {"role": "system", "content": "You are an agent."}
USER = {"role": "user", "content": "Look at the file. " * 20}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "sed", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "line one"}
QUESTION = {"role": "user", "content": "Summarize."}
PROMPT = Prompt()


def rendered(server: FakeLlama, messages: list[Any], *, reply: bool) -> str:
    _, answer = server._apply({"messages": messages, "add_generation_prompt": reply})  # pyright: ignore[reportPrivateUsage]
    return answer["prompt"]


def backend(server: FakeLlama, **kwargs: Any) -> OpenAIBackend:
    return OpenAIBackend(client=server.client(), **kwargs)


async def main_call(server: FakeLlama, b: OpenAIBackend, messages: list[Any], conversation: str = "c") -> Usage:
    """The agent's own call, as a harness makes it."""
    extras = b.route(conversation, Stream.MAIN)
    b.main_arrived(conversation)
    usage = Usage()
    stream = await server.client().chat.completions.create(
        model="local", messages=messages, max_tokens=50, stream=True, **extras
    )
    first = True
    async for event in stream:
        if event.choices and event.choices[0].delta.content and first:
            first = False
            b.main_first_token(conversation)
        if event.usage is not None:
            details = event.usage.prompt_tokens_details
            usage = Usage(event.usage.prompt_tokens, 0, details.cached_tokens if details else None)
    b.main_done(conversation)
    return usage


def test_caps_name_what_is_there() -> None:
    server = FakeLlama()
    caps = run_virtual(backend(server).caps())
    assert (caps.server, caps.prefill, caps.tokenize, caps.window, caps.notes) == ("llama.cpp", True, True, 4096, ())
    assert not any("/slots/" in f for f in server.files)


def test_caps_name_each_missing_flag() -> None:
    caps = run_virtual(backend(FakeLlama(n_slots=2, can_save=False, shows_slots=False)).caps())
    assert not caps.prefill
    said = " ".join(caps.notes)
    assert "--slots" in said
    assert "--slot-save-path" in said
    assert "--parallel" in said


def test_slots_that_do_not_exist_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"slots=\[2, 3, 4\].*slots 0 to 3.*--parallel 5"):
        run_virtual(backend(FakeLlama(), slots=[2, 3, 4]).caps())


def test_main_requests_go_to_their_slot_on_a_connection_of_their_own() -> None:
    b = backend(FakeLlama())

    async def main() -> None:
        assert b.route("c", Stream.MAIN) == {}, "nothing is known yet"
        await b.caps()
        assert b.route("c", Stream.MAIN) == {
            "extra_body": {"id_slot": 0, "cache_prompt": True},
            "extra_headers": {"Connection": "close"},
        }
        b.committed("c")
        assert b.route("c", Stream.MAIN)["extra_body"]["id_slot"] == 2

    run_virtual(main())


def test_without_free_slots_a_conversation_goes_without(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeLlama()
    b = backend(server)

    async def main() -> None:
        await b.caps()
        b.route("first", Stream.MAIN)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                # Left to the server it might land on a slot that "first" holds.
                assert b.route("second", Stream.MAIN)["extra_body"]["id_slot"] == 3
        assert b.route("first", Stream.ASIDE)["extra_body"]["id_slot"] == 3
        assert await b.prefill("second", [SYSTEM, USER], PROMPT) == Usage()
        for ahead in (True, False):
            assert (await b.generate("second", [SYSTEM, USER], PROMPT, max_tokens=50, lookahead=ahead)).text
        assert [x["id_slot"] for x in server.bodies("/v1/chat/completions")] == [3, 3]
        b.release("first")
        assert b.route("second", Stream.MAIN)["extra_body"]["id_slot"] == 0

    run_virtual(main())
    assert len(caplog.records) == 1
    assert "--parallel 6" in caplog.text


def test_a_prefill_is_the_exact_prefix_and_comes_in_pieces() -> None:
    server = FakeLlama()
    b = backend(server)
    messages = [SYSTEM, USER]

    async def main() -> tuple[Usage, Usage]:
        return await b.prefill("c", messages, PROMPT), await b.prefill("c", messages, PROMPT)

    first, second = run_virtual(main())
    expected = tokens_of(rendered(server, messages, reply=False), special=True)
    assert server.slots[2].tokens == expected
    assert first.prompt_tokens == len(expected)
    assert second == Usage(len(expected), 0, len(expected))
    sizes = [len(x["prompt"]) for x in server.bodies("/completion")]
    assert sizes == sorted(sizes)
    assert max(b - a for a, b in itertools.pairwise(sizes)) * server.per_token <= 0.16
    # Every token once, and the last of each piece again where the next one begins.
    assert server.evaluated == len(expected)


@pytest.mark.parametrize("can_save", [True, False])
def test_the_next_lookahead_begins_with_what_it_shares_with_the_view_that_was_committed(can_save: bool) -> None:
    """Offloads in a row: the next view is the present one but for its newest outputs."""
    server = FakeLlama(can_save=can_save)
    b = backend(server)
    view = [SYSTEM, USER, {"role": "assistant", "content": "I see."}]
    later = [*view, {"role": "user", "content": "Go on."}]

    async def main() -> None:
        await b.caps()
        await main_call(server, b, [SYSTEM, {"role": "user", "content": "the raw history " * 20}])
        await b.prefill("c", view, PROMPT)
        b.committed("c")
        await main_call(server, b, later)
        before = server.evaluated
        await b.prefill("c", [*view, {"role": "user", "content": "Another turn."}], PROMPT)
        whole = len(tokens_of(rendered(server, view, reply=False), special=True))
        assert (server.evaluated - before < 40) == can_save
        assert (server.evaluated - before >= whole - 80) == (not can_save)
        usage = await main_call(server, b, [*later, {"role": "assistant", "content": "All is well."}, USER])
        assert usage.cached_tokens
        assert usage.cached_tokens > whole, "main's own slot is as it was"

    run_virtual(main())
    assert b.stats[0].lost == 0


def test_after_a_commit_only_the_newest_message_is_cold() -> None:
    server = FakeLlama()
    b = backend(server)
    view = [SYSTEM, {"role": "user", "content": "Summary: all is well."}]

    async def main() -> Usage:
        await b.caps()
        await main_call(server, b, [SYSTEM, USER])
        await b.prefill("c", view, PROMPT)
        await b.prefill("c", [*view, CALL], PROMPT)
        b.committed("c")
        return await main_call(server, b, [*view, CALL, RESULT])

    usage = run_virtual(main())
    warm = rendered(server, [*view, CALL, RESULT], reply=False).partition("line one")[0]
    assert usage.cached_tokens == len(tokens_of(warm, special=True))


def test_text_that_grows_is_warmed_up_to_its_last_token() -> None:
    server = FakeLlama()
    b = backend(server)

    async def main() -> None:
        for text in ("Do th", "Do this and th", "Do this and that."):
            await b.prefill("c", [SYSTEM, {"role": "user", "content": text}], PROMPT, partial=True)
            held = text_of(server.slots[2].tokens)
            assert held.endswith(f"<user>{text[:-1]}")

    run_virtual(main())
    assert server.evaluated == len(server.slots[2].tokens)


def test_a_system_text_kept_apart_and_tools_are_part_of_the_prefix() -> None:
    server = FakeLlama()
    prompt = Prompt(system="Be brief.", tools=[{"type": "function", "function": {"name": "sed"}}])
    run_virtual(backend(server).prefill("c", [], prompt))
    assert server.bodies("/completion") == []
    run_virtual(backend(server).prefill("c", [USER], prompt))
    assert text_of(server.slots[2].tokens).startswith("[tool sed]<system>Be brief.</>\n<user>Look")


def test_a_slot_that_lost_its_prefix_is_warmed_again_and_counted() -> None:
    server = FakeLlama()
    b = backend(server)
    longer = [SYSTEM, USER, {"role": "assistant", "content": "x" * 200}, QUESTION]

    async def main() -> None:
        await b.prefill("c", [SYSTEM, USER], PROMPT)
        server.slots[2].tokens = server.slots[2].tokens[:5]
        await b.prefill("c", longer, PROMPT)

    run_virtual(main())
    assert server.slots[2].tokens == tokens_of(rendered(server, longer, reply=False), special=True)
    assert b.stats[0].lost == 1
    assert any("--no-kv-unified" in n for n in run_virtual_caps(b))


def test_a_new_prefix_that_is_cut_off_is_no_loss() -> None:
    server = FakeLlama(per_token=0.01)
    b = backend(server)

    async def main() -> None:
        await b.prefill("c", [SYSTEM, USER], PROMPT)
        job = asyncio.ensure_future(b.prefill("c", [SYSTEM, {"role": "user", "content": "Other. " * 20}], PROMPT))
        await asyncio.sleep(0.05)
        b.main_arrived("c")
        await asyncio.sleep(1)
        b.main_done("c")
        await job

    run_virtual(main())
    assert b.stats[1].preempted == 1
    assert b.stats[0].lost == 0


def test_a_loss_that_the_state_does_not_show_is_found_by_the_answer() -> None:
    server = FakeLlama(shows_slots=False)
    b = backend(server)
    longer = [SYSTEM, USER, {"role": "assistant", "content": "x" * 200}, QUESTION]

    async def main() -> None:
        await b.prefill("c", [SYSTEM, USER], PROMPT)
        server.slots[2].tokens = []
        await b.prefill("c", longer, PROMPT)

    run_virtual(main())
    assert server.slots[2].tokens == tokens_of(rendered(server, longer, reply=False), special=True)
    assert b.stats[0].lost == 1


def run_virtual_caps(b: OpenAIBackend) -> tuple[str, ...]:
    assert b._dialect is not None  # pyright: ignore[reportPrivateUsage]
    return b._dialect.caps().notes  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("answer", ["All is well.", "", "Grüße 🎉🎉 und mehr 🚀", "🎉🎉🎉🎉"])
def test_a_summary_in_pieces_is_the_answer_in_one(answer: str) -> None:
    server = FakeLlama(answer=answer)
    b = backend(server)
    question = [SYSTEM, USER, QUESTION]

    async def main() -> None:
        await b.caps()
        await main_call(server, b, [SYSTEM, USER])
        whole = await b.generate("c", question, PROMPT, max_tokens=200, lookahead=False, extends_main=False)
        pieces = await b.generate("c", question, PROMPT, max_tokens=200, lookahead=True)
        assert whole.text == pieces.text == answer
        assert (pieces.finish_reason, pieces.tool_calls) == ("stop", False)

    run_virtual(main())


def test_a_summary_finds_mains_kv_and_leaves_mains_slot_alone() -> None:
    server = FakeLlama()
    b = backend(server)

    async def main() -> None:
        await b.caps()
        await main_call(server, b, [SYSTEM, USER])
        before, evaluated = list(server.slots[0].tokens), server.evaluated
        answer = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=50, lookahead=True)
        assert server.slots[0].tokens == before
        question = rendered(server, [QUESTION], reply=True)
        assert server.evaluated - evaluated <= len(question) + len(server.answer) + 20
        assert answer.usage.cached_tokens is not None
        assert answer.usage.prompt_tokens - answer.usage.cached_tokens <= len(question) + 1
        [name] = server.files
        assert name == "smoothagent-fake-8080-slot0.bin"

    run_virtual(main())


def test_where_slots_cannot_be_copied_the_summary_is_asked_on_the_main_slot() -> None:
    server = FakeLlama(can_save=False)
    b = backend(server)

    async def main() -> Usage:
        await b.caps()
        await main_call(server, b, [SYSTEM, USER])
        answer = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=50, lookahead=True)
        assert answer.text == server.answer
        assert not server.slots[1].tokens
        return await main_call(server, b, [SYSTEM, USER, CALL, RESULT])

    usage = run_virtual(main())
    assert usage.cached_tokens is not None
    assert usage.cached_tokens >= len(rendered(server, [SYSTEM, USER], reply=False))


def test_a_cut_off_summary_says_so_and_a_tool_call_is_one() -> None:
    server = FakeLlama(answer="A long story that does not end here.")
    b = backend(server)

    async def main() -> None:
        cut = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=10, lookahead=True)
        assert (cut.text, cut.finish_reason) == (server.answer[:10], "length")
        server.answer = '<tool_call>{"name": "sed"}</tool_call>'
        call = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=100, lookahead=True)
        assert call.tool_calls
        server.answer = "<think>Hm.</think>Fine."
        thought = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=100, lookahead=True)
        assert thought.text == "Fine."
        endless = await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=9, lookahead=True)
        assert (endless.text, endless.finish_reason) == ("", "length")

    run_virtual(main())


@examples(40)
@given(gaps=st.lists(st.floats(0.02, 1.5), max_size=8), answer=st.text("ab 🎉é", max_size=40))
def test_arrivals_at_any_time_never_change_what_a_summary_says(gaps: list[float], answer: str) -> None:
    server = FakeLlama(answer=answer)
    b = backend(server)
    history: list[Any] = [SYSTEM, USER]

    async def main() -> None:
        await b.caps()
        await main_call(server, b, history)
        job = asyncio.ensure_future(b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=200, lookahead=True))
        warm = asyncio.ensure_future(b.prefill("c", [SYSTEM, QUESTION, CALL, RESULT], PROMPT))
        for gap in gaps:
            await asyncio.sleep(gap)
            history.extend([CALL, RESULT])
            await main_call(server, b, history)
        assert (await job).text == answer
        await warm

    run_virtual(main())
    expected = tokens_of(rendered(server, [SYSTEM, QUESTION, CALL, RESULT], reply=False), special=True)
    assert server.slots[2].tokens == expected
    assert not any(s.busy for s in server.slots)


def test_cancelling_stops_the_request_on_the_server() -> None:
    server = FakeLlama(per_token=1.0)
    b = backend(server)

    async def main() -> None:
        await b.caps()
        for stop in ("task", "cancel"):
            job = asyncio.ensure_future(b.prefill("c", [SYSTEM, USER], PROMPT))
            await asyncio.sleep(20.5)
            assert server.slots[2].busy
            if stop == "task":
                job.cancel()
            else:
                await b.cancel("c")
            with pytest.raises(asyncio.CancelledError):
                await job
            assert not server.slots[2].busy

    run_virtual(main())


@pytest.mark.parametrize("after", [0.3, 0.5, 1.3])
@pytest.mark.parametrize("paced", [True, False])
def test_what_a_request_had_cost_when_it_was_cut_short_is_counted(after: float, paced: bool) -> None:
    server = FakeLlama()
    b = backend(server) if paced else backend(server, pacer=None)

    async def main() -> None:
        await b.caps()
        job = asyncio.ensure_future(b.prefill("c", [SYSTEM, {"role": "user", "content": "x" * 600}], PROMPT))
        await asyncio.sleep(after)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert server.evaluated
        assert b.spent("c") == Usage(server.evaluated)
        b.release("c")
        assert b.spent("c") == Usage()

    run_virtual(main())


def test_a_call_that_the_caller_waits_for_holds_lookahead_work_back() -> None:
    server = FakeLlama(per_token=0.01)
    b = backend(server)

    async def main() -> None:
        await b.caps()
        loop = asyncio.get_running_loop()
        warm = asyncio.ensure_future(b.prefill("c", [SYSTEM, USER], PROMPT))
        await asyncio.sleep(0.5)
        start = loop.time()
        await b.generate("c", [SYSTEM, QUESTION], PROMPT, max_tokens=1, lookahead=False, extends_main=False)
        alone = 0.01 * len(tokens_of(rendered(server, [SYSTEM, QUESTION], reply=True), special=True)) + 0.01
        assert loop.time() - start == pytest.approx(alone, abs=0.001)
        await warm

    run_virtual(main())
    assert b.stats[1].preempted == 1


def test_other_processes_slots_are_seen() -> None:
    server = FakeLlama()
    b = backend(server, slots=[0, 1, 2])

    async def main() -> None:
        await b.caps()
        b.route("c", Stream.MAIN)
        server.slots[3].busy = True
        job = asyncio.ensure_future(b.prefill("c", [SYSTEM, QUESTION], PROMPT))
        await asyncio.sleep(5)
        assert server.evaluated == 0
        server.slots[3].decoded = 1
        await asyncio.sleep(1.0)
        assert server.evaluated > 0
        await job

    run_virtual(main())


def test_a_prompt_that_is_too_long_names_both_numbers() -> None:
    server = FakeLlama(n_ctx=100)
    b = backend(server)

    async def main() -> None:
        with pytest.raises(PromptTooLongError, match=r"\d{3} tokens exceeds the server's context window of 100"):
            await b.prefill("c", [SYSTEM, USER], PROMPT)
        with pytest.raises(PromptTooLongError):
            await b.generate("c", [SYSTEM, USER], PROMPT, max_tokens=5, lookahead=True)

    run_virtual(main())
    assert server.bodies("/completion") == []


def test_a_summary_over_an_image_gives_way_and_leaves_mains_slot_alone() -> None:
    """It has no token ids, so it is one piece: begun anew after the agent's request."""
    server = FakeLlama(per_step=0.1)
    b = backend(server)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}

    async def main() -> None:
        await b.caps()
        assert b.route("c", Stream.MAIN)["extra_body"]["id_slot"] == 0
        job = asyncio.ensure_future(b.generate("c", [SYSTEM, image, USER], PROMPT, max_tokens=50, lookahead=True))
        await asyncio.sleep(0.7)
        assert [s.busy for s in server.slots] == [False, True, False, False]
        b.main_arrived("c")
        await asyncio.sleep(0.01)
        assert not any(s.busy for s in server.slots)
        b.main_first_token("c")
        await asyncio.sleep(5)
        assert not any(s.busy for s in server.slots), "not beside its own decode either"
        b.main_done("c")
        assert (await job).text == server.answer

    run_virtual(main())


def test_copies_that_take_long_are_made_no_more() -> None:
    """All slots stand still meanwhile. A single slow one may have waited for somebody's step."""
    server = FakeLlama(per_copy=3.0)
    b = backend(server)

    async def main() -> None:
        await main_call(server, b, [SYSTEM, USER])
        for _ in range(5):
            assert (await b.generate("c", [SYSTEM, USER, QUESTION], PROMPT, max_tokens=50, lookahead=True)).text

    run_virtual(main())
    assert len([s for s in server.seen if s.path.endswith("restore")]) == 3
    assert "took 6.0 s to copy" in " ".join(run_virtual_caps(b))


def test_images_end_the_prefix() -> None:
    server = FakeLlama()
    b = backend(server)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}

    async def main() -> None:
        assert await b.prefill("c", [image], PROMPT) == Usage()
        await b.prefill("c", [SYSTEM, QUESTION, image], PROMPT)
        assert text_of(server.slots[2].tokens).endswith("Summarize.</>\n")

    run_virtual(main())


def test_warm_false_sends_nothing() -> None:
    server = FakeLlama()
    b = backend(server, warm=False)
    assert run_virtual(b.prefill("c", [SYSTEM, USER], PROMPT)) == Usage()
    assert server.bodies("/completion") == []


@pytest.mark.parametrize(
    ("path", "body"),
    [("/apply-template", {"nothing": 1}), ("/tokenize", {"tokens": "no"}), ("/completion", "<html>")],
)
def test_garbage_is_a_protocol_error(path: str, body: Any) -> None:
    server = FakeLlama()
    b = backend(server)

    async def main() -> None:
        await b.caps()
        server.faults[path] = [(200, body)]
        with pytest.raises(BackendProtocolError):
            await b.prefill("c", [SYSTEM, USER], PROMPT)

    run_virtual(main())


def test_count_is_the_whole_request() -> None:
    server = FakeLlama()
    expected = len(tokens_of(rendered(server, [SYSTEM, USER], reply=True), special=True))
    assert run_virtual(backend(server).count([SYSTEM, USER], PROMPT)) == expected


def test_common_prefix() -> None:
    assert [common([1, 2], [1, 2, 3]), common([], [1]), common([1, 9], [1, 2])] == [2, 0, 1]
