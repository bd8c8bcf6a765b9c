"""What goes wrong on the way: one clear error each, and a 429 that suspends what runs in the background."""

from __future__ import annotations

import asyncio
import email.utils
import gc
import threading
import time
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from serving.fake_chat import FakeChat
from serving.fake_http import BASE
from serving.fake_llama import FakeLlama
from smoothagent.errors import (
    BackendProtocolError,
    BackendRefusedError,
    BackendUnreachableError,
    ConfigurationError,
    PromptTooLongError,
    RateLimitedError,
)
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Backend, Stream
from smoothagent.serving.connection import Connection, refusal, retry_after, sendable
from smoothagent.serving.openai import OpenAIBackend
from virtual_clock import run_virtual

ASK = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def broken(kind: type[httpx2.RequestError], words: str = "gone") -> httpx2.RequestError:
    return kind(words, request=httpx2.Request("POST", BASE))


def ask(server: FakeChat, **kwargs: Any) -> Any:
    b = OpenAIBackend(client=server.client(), dialect="openai", warm=True, **kwargs)
    return run_virtual(b.prefill("c", ASK, Prompt(model="m")))


def test_a_connection_that_drops_before_an_answer_is_tried_once_more() -> None:
    server = FakeChat(kind="hosted", faults={CHAT: [broken(httpx2.RemoteProtocolError)]})
    assert ask(server).prompt_tokens
    server.faults[CHAT] = [broken(httpx2.ReadError)] * 2
    with pytest.raises(BackendUnreachableError, match="broke during POST http://fake:8080/v1/chat/completions"):
        ask(server)
    assert len(server.bodies(CHAT)) == 4


@pytest.mark.parametrize(
    ("url", "marked"),
    [
        ("https://api.githubcopilot.com/v1", True),
        ("https://api.business.githubcopilot.com/v1", True),
        ("https://githubcopilot.com.example.org/v1", False),
        (BASE, False),
    ],
)
def test_background_requests_are_marked_as_the_agents_where_the_api_lets_one(url: str, marked: bool) -> None:
    server = FakeChat(kind="hosted")
    headers = {"X-Mine": "1"}
    b = OpenAIBackend(client=server.client(url), dialect="openai", warm=True, headers=headers)
    run_virtual(b.prefill("c", ASK, Prompt(model="m")))
    (seen,) = [s for s in server.seen if s.path.endswith("/chat/completions")]
    assert seen.headers["x-mine"] == "1"
    assert seen.headers.get("x-initiator") == ("agent" if marked else None)


def test_nothing_there_names_url_and_remedy() -> None:
    server = FakeChat(kind="hosted", faults={CHAT: [broken(httpx2.ConnectError)]})
    with pytest.raises(BackendUnreachableError, match=r"nothing answers at http://fake:8080/v1.*Start the server or"):
        ask(server)
    assert len(server.bodies(CHAT)) == 1


def test_a_hanging_server_is_given_up_after_the_timeout() -> None:
    server = FakeChat(kind="hosted", faults={CHAT: ["hang"]})

    async def main() -> None:
        b = OpenAIBackend(client=server.client(), dialect="openai", warm=True, timeout=30)
        with pytest.raises(BackendUnreachableError, match="within 30 s"):
            await b.prefill("c", ASK, Prompt(model="m"))
        assert asyncio.get_running_loop().time() == 30

    run_virtual(main())


def test_a_stream_that_falls_silent_is_given_up() -> None:
    server = FakeLlama(per_step=1000)

    async def main() -> None:
        b = OpenAIBackend(client=server.client(), timeout=30)
        with pytest.raises(BackendUnreachableError, match="within 30 s"):
            await b.generate("c", ASK, Prompt(), max_tokens=5, lookahead=True)
        assert not any(s.busy for s in server.slots)

    run_virtual(main())


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ((500, {"error": {"message": "kaputt"}}), BackendRefusedError, "answered 500: .*kaputt"),
        ((200, "<html>hello"), BackendProtocolError, "JSON object was due"),
        ((200, ["no", "object"]), BackendProtocolError, "right server"),
    ],
)
def test_bad_answers(fault: tuple[int, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ask(FakeChat(kind="hosted", faults={CHAT: [fault]}))


def test_the_first_429_suspends_background_calls_and_only_those() -> None:
    server = FakeChat(kind="hosted", faults={CHAT: [(429, {"error": {"message": "slow down"}})]})
    server.headers = {"retry-after": "20"}
    b = OpenAIBackend(client=server.client(), dialect="openai", warm=True)
    prompt = Prompt(model="m")

    async def main() -> None:
        with pytest.raises(RateLimitedError) as first:
            await b.prefill("c", ASK, prompt)
        assert first.value.retry_after == 20
        for _ in range(5):
            with pytest.raises(RateLimitedError, match="suspended for another 20 s"):
                await b.prefill("c", ASK, prompt)
        assert len(server.bodies(CHAT)) == 1
        assert (await b.generate("c", ASK, prompt, max_tokens=50, lookahead=False)).text == server.answer
        await asyncio.sleep(20)
        assert (await b.prefill("c", ASK, prompt)).prompt_tokens

    run_virtual(main())


def test_429s_without_a_time_back_off_further_and_further() -> None:
    server = FakeChat(kind="hosted", faults={CHAT: [(429, "no")] * 9})
    b = OpenAIBackend(client=server.client(), dialect="openai", warm=True)
    waits: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        while not waits or waits[-1] < 300:
            with pytest.raises(RateLimitedError):
                await b.prefill("c", ASK, Prompt(model="m"))
            start = loop.time()
            with pytest.raises(RateLimitedError) as refused:
                await b.prefill("c", ASK, Prompt(model="m"))
            assert refused.value.retry_after is not None
            await asyncio.sleep(refused.value.retry_after)
            waits.append(loop.time() - start)

    run_virtual(main())
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300]


def test_retry_after_in_all_its_forms() -> None:
    assert retry_after({"retry-after": "1.5"}) == 1.5
    assert retry_after({"retry-after-ms": "250"}) == 0.25
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None
    dated = retry_after({"retry-after": email.utils.formatdate(time.time() + 60, usegmt=True)})
    assert dated is not None
    assert 55 < dated <= 61


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8900 in messages).",
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
    ],
)
def test_a_prompt_that_is_too_long_names_both_numbers(message: str) -> None:
    error = refusal("POST /x", 400, {"message": message}, message)
    assert isinstance(error, PromptTooLongError)
    assert "9000 tokens exceeds the server's context window of 8192" in str(error)


def test_too_long_without_numbers_is_still_too_long() -> None:
    error = refusal("POST /x", 400, None, "Prompt is too long")
    assert isinstance(error, PromptTooLongError)


def test_lone_surrogates_do_not_break_a_request() -> None:
    server = FakeChat(kind="hosted")
    b = OpenAIBackend(client=server.client(), dialect="openai", warm=True)
    bad = [{"role": "user", "content": "a\ud800b\0"}]
    run_virtual(b.prefill("c", bad, Prompt(model="m")))
    run_virtual(b.generate("c", bad, Prompt(model="m"), max_tokens=5, lookahead=True))
    assert [x["messages"][0]["content"] for x in server.bodies(CHAT)] == ["a\ufffdb\0"] * 2
    assert sendable(("a", 1, None)) == ["a", 1, None]


def test_a_wrong_url_is_said_before_anything_else() -> None:
    server = FakeChat(kind="other", faults={"/v1/models": [(404, "nothing here")]})
    with pytest.raises(BackendProtocolError, match=r"does not speak the OpenAI API.*ends in /v1"):
        run_virtual(OpenAIBackend(client=server.client()).caps())
    server.faults["/v1/models"] = [(200, {"hello": "world"})]
    with pytest.raises(BackendProtocolError, match="without a list of models"):
        run_virtual(OpenAIBackend(client=server.client()).caps())


def test_caps_are_asked_for_until_they_come_once() -> None:
    server = FakeLlama(faults={"/v1/models": [(503, {"error": {"message": "Loading model"}})]})
    b = OpenAIBackend(client=server.client())

    async def main() -> None:
        with pytest.raises(BackendRefusedError, match=r"503.*Loading model"):
            await b.caps()
        await asyncio.gather(b.caps(), b.caps(), b.caps())
        assert len([s for s in server.seen if s.path == "/props"]) == 2

    run_virtual(main())


def test_a_named_dialect_that_does_not_fit_is_an_error() -> None:
    for name, server in (("sglang", FakeLlama()), ("llama.cpp", FakeChat()), ("vllm", FakeLlama())):
        with pytest.raises(BackendProtocolError, match="leave dialect='auto'"):
            run_virtual(OpenAIBackend(client=server.client(), dialect=name).caps())


def test_the_backend_is_a_backend() -> None:
    backend: Backend = OpenAIBackend("http://x/v1")
    assert backend.route("c", Stream.MAIN) == {}


def test_impossible_settings() -> None:
    with pytest.raises(ConfigurationError, match="needs a server"):
        OpenAIBackend()
    with pytest.raises(ConfigurationError, match=r"unknown dialect 'ollama'.*llama\.cpp"):
        OpenAIBackend("http://x/v1", dialect="ollama")
    with pytest.raises(ConfigurationError, match="timeout"):
        Connection("http://x/v1", None, "x", 0)


def test_the_own_client_is_closed_and_a_given_one_is_not() -> None:
    server = FakeLlama()
    given = server.client()
    b = OpenAIBackend(client=given)

    async def main() -> None:
        await b.caps()
        await b.aclose()
        assert not given.is_closed()
        own = Connection("http://127.0.0.1:9/v1", None, "x", 1)
        with pytest.raises(BackendUnreachableError):
            await own.get("/models")
        await own.aclose()
        await given.close()

    asyncio.run(main())


def test_one_that_is_dropped_unclosed_closes_its_clients() -> None:
    async def main() -> None:
        link = Connection("http://127.0.0.1:9/v1", None, "x", 5.0)
        client = link._open()  # pyright: ignore[reportPrivateUsage]
        assert not client.is_closed()
        del link
        gc.collect()
        await asyncio.sleep(0.1)
        assert client.is_closed()

    asyncio.run(main())


def test_closing_closes_the_clients_of_other_loops_on_theirs() -> None:
    link = Connection("http://127.0.0.1:9/v1", None, "x", 5.0)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def opened() -> AsyncOpenAI:
        return link._open()  # pyright: ignore[reportPrivateUsage]

    there = asyncio.run_coroutine_threadsafe(opened(), loop).result(5)

    async def main() -> None:
        here = link._open()  # pyright: ignore[reportPrivateUsage]
        await link.aclose()
        assert here.is_closed()
        assert there.is_closed()

    asyncio.run(main())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()
