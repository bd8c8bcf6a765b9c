"""SGLang, vLLM and hosted servers: what marks a request, what is learnt from a refusal, what a flag would bring."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.fake_chat import FakeChat
from smoothagent.errors import BackendUnreachableError, ConfigurationError
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Stream, Usage
from smoothagent.serving.costs import Kind
from smoothagent.serving.dialects.textual import common_chars, cut_at, priority_below
from smoothagent.serving.openai import OpenAIBackend
from smoothagent.serving.pacer import Pacer
from virtual_clock import run_virtual

LONG = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look at this file. " * 200}]
QUESTION = [*LONG, {"role": "user", "content": "Summarize."}]
TOOLS = Prompt(tools=[{"type": "function", "function": {"name": "sed"}}], params={"tool_choice": "required", "n": 2})
METRICS = 'vllm:cache_config_info{block_size="32",enable_prefix_caching="True"} 1.0\nvllm:num_requests_running 0.0\n'
CHAT = "/v1/chat/completions"


def backend(server: FakeChat, **kwargs: Any) -> OpenAIBackend:
    return OpenAIBackend(client=server.client(), **kwargs)


def sglang(**info: Any) -> FakeChat:
    on = {"enable_cache_report": True, "page_size": 1, "context_length": 4096}
    return FakeChat(kind="sglang", info={**on, **info}, load=[{"num_reqs": 0, "num_waiting_reqs": 0}])


# -- vLLM --------------------------------------------------------------------------------------


def test_vllm_is_recognised_and_its_settings_read() -> None:
    server = FakeChat(metrics=METRICS)
    caps = run_virtual(backend(server).caps())
    assert (caps.server, caps.prefill, caps.classes, caps.window, caps.notes) == ("vllm", True, False, 2048, ())


def test_vllm_prefix_caching_off_is_said_and_nothing_is_sent() -> None:
    server = FakeChat(metrics=METRICS.replace("True", "False"))
    b = backend(server)
    caps = run_virtual(b.caps())
    assert not caps.prefill
    assert "--enable-prefix-caching" in " ".join(caps.notes)
    assert run_virtual(b.prefill("c", LONG, Prompt())) == Usage()


def test_vllm_prefill_in_pieces_each_found_in_the_cache() -> None:
    server = FakeChat(metrics=METRICS, block=32)
    b = backend(server)

    async def main() -> tuple[Usage, Usage]:
        return await b.prefill("c", LONG, TOOLS), await b.prefill("c", LONG, TOOLS)

    first, again = run_virtual(main())
    bodies = server.bodies(CHAT)
    assert len(bodies) > 3
    assert first.prompt_tokens == len(server.known[-1])
    # A piece's last partial block is computed again with the next one, and no more than that.
    assert server.computed <= first.prompt_tokens + 32 * len(bodies)
    assert again.prompt_tokens == 0, "it is all warm"
    assert all(x["max_tokens"] == 1 and x["add_generation_prompt"] is False for x in bodies)
    assert all("tool_choice" not in x and "n" not in x and x["tools"] for x in bodies)
    assert bodies[0]["continue_final_message"] is True
    assert "continue_final_message" not in bodies[-1]
    assert {x["priority"] for x in bodies} == {1}, "lower numbers first, 0 is everyone else's"
    assert run_virtual(b.caps()).cached_tokens


def test_vllm_refuses_priorities_once() -> None:
    server = FakeChat(metrics=METRICS, refuses={"priority": "Got priority 1 but Priority scheduling is not enabled."})
    b = backend(server)
    run_virtual(b.prefill("c", LONG, Prompt()))
    assert [("priority" in x) for x in server.bodies(CHAT)].count(True) == 1
    assert "--scheduling-policy priority" in " ".join(run_virtual(b.caps()).notes)


def test_vllm_that_reports_no_cached_tokens_is_told_the_flag() -> None:
    server = FakeChat(metrics=METRICS, reports=False)
    b = backend(server)
    run_virtual(b.prefill("c", LONG, Prompt()))
    caps = run_virtual(b.caps())
    assert "--enable-prompt-tokens-details" in " ".join(caps.notes)
    assert not caps.cached_tokens


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_prefixes_that_are_never_found_switch_warming_off(kind: str) -> None:
    """Neither server says so: a miss is told by leaving the field out, as if it were not reported at all."""
    server = FakeChat(metrics=METRICS) if kind == "vllm" else sglang()
    b = backend(server)

    async def main() -> None:
        if kind == "vllm":
            # vLLM tells that it reports with its first hit; SGLang tells in its settings.
            await b.prefill("before", LONG, Prompt())
        server.caches = False
        await b.prefill("c", [*LONG, *LONG, *LONG], Prompt())
        sent = len(server.bodies(CHAT))
        assert await b.prefill("d", LONG, Prompt()) == Usage()
        assert len(server.bodies(CHAT)) == sent

    run_virtual(main())
    caps = run_virtual(b.caps())
    assert not caps.prefill
    assert "not found in the server's prefix cache" in " ".join(caps.notes)


def test_vllm_whose_cache_is_off_from_the_beginning_is_not_only_told_a_flag_that_is_set() -> None:
    server = FakeChat(metrics=METRICS, caches=False)
    b = backend(server)
    run_virtual(b.prefill("c", [*LONG, *LONG], Prompt()))
    assert "--enable-prompt-tokens-details; if that is set, see that prefix caching is on" in " ".join(
        run_virtual(b.caps()).notes
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_summary_is_continued_over_arrivals(kind: str) -> None:
    server = FakeChat(metrics=METRICS) if kind == "vllm" else sglang()
    server.answer = "a rather long answer that takes several pieces to write"
    b = backend(server)

    async def main() -> None:
        await b.caps()
        job = asyncio.ensure_future(b.generate("c", QUESTION, TOOLS, max_tokens=500, lookahead=True))
        for _ in range(4):
            await asyncio.sleep(0.07)
            b.main_arrived("c")
            await asyncio.sleep(0.2)
            b.main_first_token("c")
            await asyncio.sleep(0.3)
            b.main_done("c")
        answer = await job
        assert (answer.text, answer.finish_reason, answer.tool_calls) == (server.answer, "stop", False)
        assert answer.usage.completion_tokens == len(server.answer)

    run_virtual(main())
    assert len(server.bodies(CHAT)) > 2
    choice = "none" if kind == "vllm" else "auto"
    assert {x["tool_choice"] for x in server.bodies(CHAT)} == {choice}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_model_that_reasons_first_is_asked_in_one_go(field: str) -> None:
    server = FakeChat(metrics=METRICS, reasons=True, reasons_as=field)
    answer = run_virtual(backend(server).generate("c", QUESTION, Prompt(), max_tokens=50, lookahead=True))
    assert answer.text == server.answer
    assert not any("continue_final_message" in x for x in server.bodies(CHAT))


@pytest.mark.parametrize("kind", ["vllm", "hosted"])
def test_an_answer_that_just_stops_is_none(kind: str) -> None:
    server = FakeChat(metrics=METRICS, kind=kind, finish=None)
    with pytest.raises(BackendUnreachableError, match="broke off"):
        run_virtual(backend(server).generate("c", QUESTION, Prompt(model="m"), max_tokens=50, lookahead=True))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_no_prefill_ends_before_the_first_user_message(kind: str) -> None:
    """Templates of today refuse a prompt of system text alone."""
    server = FakeChat(metrics=METRICS) if kind == "vllm" else sglang()
    server.needs_user = True
    system = {"role": "system", "content": "You are careful. " * 40}
    b = backend(server)

    async def main() -> None:
        assert (await b.prefill("c", [system, *LONG], Prompt())).prompt_tokens > 0
        # The prompt of a sub-agent whose instruction is not there yet.
        assert (await b.prefill("d", [system], Prompt())).prompt_tokens > 0

    run_virtual(main())
    assert len(server.bodies(CHAT)) > 3


@pytest.mark.parametrize("reports", [True, False])
def test_a_piece_costs_what_it_adds_whether_or_not_the_server_says_what_was_cached(reports: bool) -> None:
    """A warm prefix of thousands of tokens, extended by a hundred at a time."""
    server = FakeChat(metrics=METRICS, reports=reports, per_token=0.005)
    pacer = Pacer()
    b = backend(server, pacer=pacer)
    messages = list(LONG)

    async def main() -> None:
        await b.prefill("c", messages, Prompt())
        for turn in range(20):
            messages.append({"role": "user", "content": f"{turn:4} " + "more of this " * 30})
            usage = await b.prefill("c", messages, Prompt())
            assert usage.prompt_tokens - (usage.cached_tokens or 0) < 200
            for kind in ("idle", "beside"):
                assert getattr(pacer.sizes, kind)(Kind.PREFILL, 16, **KEYS[kind]) < 150

    run_virtual(main())


KEYS: dict[str, dict[str, bool]] = {"idle": {"shared": False}, "beside": {"own_hurry": False}}


def test_large_tools_do_not_make_pieces_of_single_characters() -> None:
    """A template prints the tools with the first piece already, so the whole prompt tells nothing of the text."""
    server = FakeChat(metrics=METRICS)
    tools = Prompt(tools=[{"type": "function", "function": {"name": "sed", "description": "use it " * 6000}}])
    b = backend(server)

    async def main() -> None:
        await b.prefill("c", LONG, tools)
        await b.prefill("c", [*LONG, *LONG, *LONG], tools)

    run_virtual(main())
    assert len(server.bodies(CHAT)) < 60


def test_an_answer_that_calls_a_tool_is_one() -> None:
    server = sglang()
    server.calls = True
    answer = run_virtual(backend(server).generate("c", QUESTION, TOOLS, max_tokens=50, lookahead=True))
    assert answer.tool_calls
    assert answer.text == ""


def test_a_rebuilt_prompt_is_warmed_in_pieces_first() -> None:
    server = FakeChat(metrics=METRICS)
    b = backend(server)
    run_virtual(b.generate("c", QUESTION, Prompt(), max_tokens=50, lookahead=True, extends_main=False))
    assert len([x for x in server.bodies(CHAT) if not x.get("stream")]) > 3


def test_vllm_load_is_read_from_the_metrics() -> None:
    server = FakeChat(metrics=METRICS.replace("running 0.0", 'running{model="m"} 3.0'))
    b = backend(server)

    async def main() -> None:
        await b.caps()
        b.main_arrived("c")
        b.main_first_token("c")
        await b.prefill("c", LONG, Prompt())

    run_virtual(main())
    assert b.stats[1].charged > 0


def test_vllm_counts_by_its_tokenizer() -> None:
    assert run_virtual(backend(FakeChat(metrics=METRICS)).count(LONG, Prompt())) == 7


# -- SGLang ------------------------------------------------------------------------------------


def test_sglang_flags_that_are_missing_are_named() -> None:
    server = sglang(enable_cache_report=False, disable_radix_cache=True)
    caps = run_virtual(backend(server).caps())
    said = " ".join(caps.notes)
    assert caps.server == "sglang"
    assert not caps.prefill
    assert "--enable-cache-report" in said
    assert "--disable-radix-cache" in said
    assert "--enable-priority-scheduling" in said


def test_sglang_without_priorities_is_sent_none() -> None:
    server = sglang()
    b = backend(server)
    run_virtual(b.prefill("c", LONG, Prompt()))
    assert not any("priority" in x or "custom_params" in x for x in server.bodies(CHAT))
    # Older versions take 0 for no limit, and would decode to the end.
    assert all(x["max_tokens"] == 1 and x["rid"] for x in server.bodies(CHAT))
    assert b.route("c", Stream.MAIN) == {}


@pytest.mark.parametrize(
    ("info", "lookahead", "main"),
    [
        ({"default_priority_value": 0}, -1, None),
        ({"default_priority_value": 5, "schedule_low_priority_values_first": True}, 6, None),
        ({}, -1, 0),
    ],
)
def test_sglang_priorities_in_either_polarity(info: dict[str, Any], lookahead: int, main: int | None) -> None:
    server = sglang(enable_priority_scheduling=True, **info)
    b = backend(server)
    run_virtual(b.prefill("c", LONG, Prompt()))
    assert {x["priority"] for x in server.bodies(CHAT)} == {lookahead}
    assert b.route("c", Stream.MAIN).get("extra_body", {}).get("priority") == main


def test_a_cancelled_request_is_aborted_while_its_connection_is_still_open() -> None:
    """SGLang forgets the rid of a request whose connection is closed, and lets it run on for seconds."""

    async def main(kind: str) -> None:
        server = sglang()
        server.per_token = server.per_step = 1.0
        b = backend(server)
        await b.caps()
        if kind == "prefill":
            job: Any = asyncio.ensure_future(b.prefill("c", LONG, Prompt()))
        else:
            job = asyncio.ensure_future(b.generate("c", QUESTION, Prompt(), max_tokens=50, lookahead=True))
        await asyncio.sleep(2)
        [asked] = [x for x in server.seen if x.path == CHAT]
        if kind == "arrival":
            b.main_arrived("c")
            await asyncio.sleep(0.1)
        else:
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
        [abort] = [x for x in server.seen if x.path == "/abort_request"]
        assert abort.body == {"rid": asked.body["rid"]}
        assert server.open_at_abort == [asked.body["rid"]]
        assert asked.broken
        job.cancel()

    for kind in ("prefill", "generate", "arrival"):
        run_virtual(main(kind))


def test_what_has_ended_is_not_aborted() -> None:
    server = sglang()
    b = backend(server)

    async def main() -> None:
        await b.prefill("c", LONG, Prompt())
        await b.cancel("c")

    run_virtual(main())
    assert server.bodies("/abort_request") == []


def test_our_scheduler_gets_class_deadline_promotion_and_abort() -> None:
    server = sglang(internal_states=[{"lookahead": {"version": 1}}])
    server.per_token = 1.0
    b = backend(server)

    async def main() -> None:
        caps = await b.caps()
        assert (caps.classes, caps.promote) == (True, True)
        job = asyncio.ensure_future(b.prefill("c", LONG, Prompt(), deadline=12.5))
        await asyncio.sleep(1)
        b.main_arrived("c")
        await asyncio.sleep(1)
        assert not job.done(), "the server does the pacing"
        [body] = server.bodies(CHAT)
        assert body["custom_params"]["lookahead"] == 1
        assert body["custom_params"]["deadline"] == 12.5
        await b.promote("c")
        number = body["custom_params"]["lookahead_id"]
        assert server.bodies("/set_internal_state") == [{"server_args": {"lookahead_promote": number}}]
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert server.bodies("/abort_request") == [{"rid": body["rid"]}]
        await b.cancel("c")
        await b.promote("c")
        assert len(server.bodies("/abort_request")) == len(server.bodies("/set_internal_state")) == 1

    run_virtual(main())


def test_sglang_count_and_load() -> None:
    server = sglang()
    server.load = None
    b = backend(server)
    run_virtual(b.prefill("c", LONG, Prompt()))
    assert any("does not tell its load" in n for n in run_virtual(b.caps()).notes)
    assert run_virtual(b.count(LONG, Prompt())) == 8


# -- hosted ------------------------------------------------------------------------------------


def test_hosted_endpoints_are_not_warmed_unless_asked() -> None:
    server = FakeChat(kind="hosted")
    b = OpenAIBackend(client=server.client("https://api.openai.com/v1"))
    caps = run_virtual(b.caps())
    assert (caps.server, caps.prefill) == ("openai", False)
    assert "warm=True" in " ".join(caps.notes)
    assert run_virtual(b.prefill("c", LONG, Prompt(model="m"))) == Usage()
    assert {s.path for s in server.seen} == {"/v1/models"}
    b = OpenAIBackend(client=server.client("https://api.openai.com/v1"), warm=True)
    assert run_virtual(b.prefill("c", LONG, Prompt(model="m"))).prompt_tokens > 0
    assert len(server.bodies(CHAT)) == 1


def test_unknown_servers_are_treated_as_hosted() -> None:
    caps = run_virtual(backend(FakeChat(kind="other")).caps())
    assert (caps.server, caps.prefill, caps.classes) == ("openai", False, False)


def test_a_missing_model_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="no model 'x'; it serves 'm'"):
        run_virtual(backend(FakeChat(metrics=METRICS), model="x").caps())
    for server in (sglang(), FakeChat(kind="hosted")):
        with pytest.raises(ConfigurationError, match="no model 'x'; it serves 'm'"):
            run_virtual(backend(server).generate("c", LONG, Prompt(model="x"), max_tokens=5, lookahead=False))


# -- cutting -----------------------------------------------------------------------------------

contents = st.one_of(st.text(max_size=12), st.none(), st.just([{"type": "text", "text": "part"}]))
histories = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": contents}))


@given(histories, st.integers(0, 400))
def test_a_cut_conversation_is_a_prefix(messages: list[Any], chars: int) -> None:
    flat = [str(m["role"]) + (m["content"] if isinstance(m["content"], str) else "") for m in messages]
    out, cut = cut_at(messages, flat, chars)
    assert len(out) <= len(messages)
    assert out[:-1] == messages[: len(out)][:-1]
    if out:
        last, whole = out[-1], messages[len(out) - 1]
        assert last == whole or (cut and str(whole["content"]).startswith(last["content"]))
    if chars >= sum(map(len, flat)):
        assert out == messages


def test_common_characters() -> None:
    assert common_chars(["ab", "cd"], ["ab", "ce"]) == 3
    assert common_chars(["ab"], ["abc", "d"]) == 2
    assert common_chars([], ["abc"]) == 0


@pytest.mark.parametrize(
    ("refuses", "sent"),
    [
        (
            {
                "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead."
            },
            {"max_completion_tokens": 60},
        ),
        ({"temperature": "Unsupported value: 'temperature' does not support 0 with this model."}, {"max_tokens": 60}),
    ],
)
def test_a_model_that_takes_other_parameters_is_asked_in_its_way(refuses: dict[str, str], sent: dict[str, int]) -> None:
    server = FakeChat(kind="hosted", refuses=refuses, refuse_any_value=True)
    b = backend(server)
    for _ in range(2):
        answer = run_virtual(b.generate("c", QUESTION, Prompt(), max_tokens=60, lookahead=True))
        assert answer.text == server.answer
    bodies = server.bodies(CHAT)
    assert len(bodies) == 3, "it is refused once"
    assert not set(refuses) & set(bodies[-1])
    assert sent.items() <= bodies[-1].items()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_lookahead_comes_after_the_agents_own_priority(kind: str) -> None:
    server = FakeChat(metrics=METRICS) if kind == "vllm" else sglang(enable_priority_scheduling=True)
    b = backend(server)
    run_virtual(b.prefill("c", LONG, Prompt(params={"extra_body": {"priority": 5}})))
    assert {x["priority"] for x in server.bodies(CHAT)} == {6 if kind == "vllm" else 4}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_piece_that_ends_inside_a_character_does_not_repeat_for_ever(kind: str) -> None:
    server = FakeChat(metrics=METRICS) if kind == "vllm" else sglang()
    server.answer, server.needs = "🙂 well", 3
    answer = run_virtual(backend(server).generate("c", QUESTION, TOOLS, max_tokens=40, lookahead=True))
    assert answer.text == server.answer
    server.needs = 100
    answer = run_virtual(backend(server).generate("c", QUESTION, TOOLS, max_tokens=40, lookahead=True))
    assert answer.text == ""


def test_polarity() -> None:
    assert priority_below(0, low_first=True) == 1
    assert priority_below(0, low_first=False) == -1
