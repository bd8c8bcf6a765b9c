"""A wrapped openai client marks, paces and measures each call, and is otherwise the client itself."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from smoothagent import MainRequest, Usage
from smoothagent.request import read_usage
from smoothagent.wrap import merged, wrap


@dataclass
class Host:
    """What a runtime would be told."""

    extras: dict[str, Any] = field(default_factory=dict[str, Any])
    told: list[Any] = field(default_factory=list[Any])
    heard: list[str] = field(default_factory=list[str])

    def request_started(self) -> dict[str, Any]:
        self.told.append("started")
        return self.extras

    def request_first_token(self) -> None:
        self.told.append("first")

    def request_text(self, text: str) -> None:
        """Note."""
        self.heard.append(text)

    def request_opens(self) -> None:
        """Nothing is waited for."""

    def request_may_block(self) -> bool:
        """Nothing is waited for."""
        return False

    def request_usage(self, usage: Usage) -> None:
        self.told.append(usage)

    def request_done(self) -> None:
        self.told.append("done")

    def request(self, call: object = None) -> MainRequest:
        del call
        return MainRequest(self)


USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    "usage": USAGE,
}


def chunk(text: str | None, usage: Any = None, index: int = 0) -> dict[str, Any]:
    choices = [] if text is None else [{"index": index, "delta": {"content": text}, "finish_reason": None}]
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }


def streamed(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n"


@dataclass
class Server:
    """Answers an openai client in-process."""

    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    status: int = 200
    answers: int = 1

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.status != 200:
            return httpx2.Response(self.status, json={"error": {"message": "no"}})
        if body.get("stream"):
            text = [chunk(t, index=i) for t in "hi" for i in range(self.answers)]
            content = streamed(chunk(None), *text, chunk(None, USAGE))
            return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})
        return httpx2.Response(200, json=WHOLE)

    def sync(self) -> OpenAI:
        http: Any = httpx2.Client(transport=httpx2.MockTransport(self))
        return OpenAI(base_url="http://fake/v1", api_key="x", http_client=http, max_retries=0)

    def asynchronous(self) -> AsyncOpenAI:
        http: Any = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return AsyncOpenAI(base_url="http://fake/v1", api_key="x", http_client=http, max_retries=0)


ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
READ = Usage(12, 3, 8)
TOLD = ["started", "first", READ, "done"]


@pytest.mark.parametrize(("answers", "heard"), [(1, "hi"), (2, "h")])
def test_text_is_told_as_it_streams_until_there_are_several_answers(answers: int, heard: str) -> None:
    server, host = Server(answers=answers), Host()
    client: Any = wrap(server.sync(), host.request)
    assert len(list(client.chat.completions.create(**ASK, stream=True))) == 2 + 2 * answers
    assert "".join(host.heard) == heard
    client.close()


def test_the_openai_client() -> None:
    server, host = Server(), Host({"extra_body": {"slot": 1}})
    client: Any = wrap(server.sync(), host.request)
    answer = client.chat.completions.create(**ASK, temperature=0)
    assert answer.choices[0].message.content == "hi"
    assert sorted(map(str, host.told)) == sorted(map(str, TOLD))
    assert (host.told[0], host.told[-1]) == ("started", "done")
    assert server.bodies == [{**ASK, "temperature": 0, "slot": 1}]
    client.close()


def test_the_async_openai_client() -> None:
    """The client's decorators hide that ``create`` is a coroutine function."""

    async def main() -> None:
        server, host = Server(), Host({"extra_body": {"slot": 1}})
        client: Any = wrap(server.asynchronous(), host.request)
        answer = await client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "hi"
        assert (host.told[0], host.told[-1]) == ("started", "done")
        assert READ in host.told
        assert server.bodies == [{**ASK, "slot": 1}]
        await client.close()

    asyncio.run(main())


def test_a_stream_tells_its_first_token_when_it_passes() -> None:
    server, host = Server(), Host()
    with wrap(server.sync(), host.request) as client:
        stream = client.chat.completions.create(**ASK, stream=True)
        assert host.told == ["started"]
        seen: list[tuple[str | None, list[Any]]] = []
        for event in stream:
            text = event.choices[0].delta.content if event.choices else None
            seen.append((text, list(host.told)))
    assert [text for text, _ in seen] == [None, "h", "i", None]
    assert seen[0][1] == ["started"]
    assert seen[1][1] == ["started", "first"]
    assert host.told == ["started", "first", READ, "done"]


def test_an_async_stream_does_too() -> None:
    async def main() -> None:
        server, host = Server(), Host()
        client = wrap(server.asynchronous(), host.request)
        stream = await client.chat.completions.create(**ASK, stream=True)
        texts = [e.choices[0].delta.content async for e in stream if e.choices]
        assert texts == ["h", "i"]
        assert host.told == ["started", "first", READ, "done"]
        await client.close()

    asyncio.run(main())


def test_pieces_of_tool_calls_are_told_as_they_stream() -> None:
    """Adapters warm a sub-agent with what is written of its task."""
    pieces = ['{"task"', ': "look', ' at it"}']

    def answer(request: httpx2.Request) -> httpx2.Response:
        del request
        whole = chunk("")
        deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
        events = [{**whole, "choices": [{**whole["choices"][0], "delta": delta}]} for delta in deltas]
        return httpx2.Response(200, content=streamed(*events), headers={"content-type": "text/event-stream"})

    class Hearing(MainRequest):
        def call(self, delta: Any) -> None:
            heard.append(delta.function.arguments)

    host, heard = Host(), list[str]()
    http: Any = httpx2.Client(transport=httpx2.MockTransport(answer))
    client = OpenAI(base_url="http://fake/v1", api_key="x", http_client=http, max_retries=0)
    with wrap(client, lambda call: Hearing(host)) as wrapped:
        assert len(list(wrapped.chat.completions.create(**ASK, stream=True))) == 3
    assert heard == pieces


def test_what_is_under_beta_is_marked_too() -> None:
    server, host = Server(), Host({"extra_body": {"slot": 1}})
    client: Any = wrap(server.sync(), host.request)
    answer = client.beta.chat.completions.parse(**ASK)
    assert answer.choices[0].message.content == "hi"
    assert (host.told[0], host.told[-1]) == ("started", "done")
    assert [body["slot"] for body in server.bodies] == [1]
    assert client.beta.chat.completions.stream is not None
    client.close()


def test_a_stream_may_be_left_early_and_is_told_over_once() -> None:
    server, host = Server(), Host()
    with wrap(server.sync(), host.request) as client:
        with client.chat.completions.create(**ASK, stream=True) as stream:
            assert not next(stream).choices
            assert next(stream).choices[0].delta.content == "h"
        stream.close()
    assert host.told == ["started", "first", "done"]


def test_a_stream_that_is_dropped_unread_is_over() -> None:
    server, host = Server(), Host()
    client: Any = wrap(server.sync(), host.request)
    stream = client.chat.completions.create(**ASK, stream=True)
    next(stream)
    assert host.told == ["started"]
    del stream
    gc.collect()
    assert host.told[-1] == "done"
    client.close()


def test_usage_that_cannot_be_read_ends_the_request_all_the_same() -> None:
    class Unreadable(Host):
        def request_usage(self, usage: Usage) -> None:
            raise KeyError("a host's bug")

    host = Unreadable()
    client: Any = wrap(Server().sync(), host.request)
    with pytest.raises(KeyError):
        client.chat.completions.create(**ASK)
    assert host.told[-1] == "done"
    client.close()


def test_a_stream_given_up_before_its_first_token_had_none() -> None:
    server, host = Server(), Host()
    with wrap(server.sync(), host.request) as client:
        client.chat.completions.create(**ASK, stream=True).close()
    assert host.told == ["started", "done"]


def test_an_async_stream_may_be_left_early() -> None:
    async def main() -> None:
        server, host = Server(), Host()
        client = wrap(server.asynchronous(), host.request)
        async with await client.chat.completions.create(**ASK, stream=True) as stream:
            async for event in stream:
                if event.choices:
                    break
        await stream.close()
        assert host.told == ["started", "first", "done"]
        await client.close()

    asyncio.run(main())


def test_a_wrapped_client_is_a_context_manager_and_its_copies_are_wrapped() -> None:
    server, host = Server(), Host()
    with wrap(server.sync(), host.request) as client:
        client.with_options(timeout=5).chat.completions.create(**ASK)
        client.copy().chat.completions.create(**ASK)
        assert host.told.count("done") == 2
    assert client.is_closed()

    async def main() -> None:
        async with wrap(server.asynchronous(), host.request) as asynchronous:
            await asynchronous.with_options(timeout=5).chat.completions.create(**ASK)
        assert asynchronous.is_closed()

    asyncio.run(main())
    assert host.told.count("done") == 3


def test_errors_come_through_and_end_the_request() -> None:
    server, host = Server(status=400), Host()
    with wrap(server.sync(), host.request) as client, pytest.raises(APIStatusError):
        client.chat.completions.create(**ASK)
    assert host.told == ["started", "done"]

    async def main() -> None:
        asynchronous = wrap(server.asynchronous(), host.request)
        with pytest.raises(APIStatusError):
            await asynchronous.chat.completions.create(**ASK)
        await asynchronous.close()

    asyncio.run(main())
    assert host.told == ["started", "done"] * 2


class Broken:
    """A stream that breaks after some chunks, sync and async."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def __iter__(self) -> Iterator[Any]:
        for text in self.texts:
            yield SimpleNamespace(choices=[text], usage=None)
        raise ConnectionError("gone")

    async def __aiter__(self) -> AsyncIterator[Any]:
        for text in self.texts:
            yield SimpleNamespace(choices=[text], usage=None)
        raise ConnectionError("gone")

    def __next__(self) -> Any:
        raise ConnectionError("gone")


def giving(answer: Any) -> Callable[..., Any]:
    def create(**_: Any) -> Any:
        return answer

    return create


def fake(create: Callable[..., Any]) -> Any:
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), models="models")


@pytest.mark.parametrize("texts", [(), ("a",)])
def test_a_stream_that_breaks_says_no_first_token_it_did_not_have(texts: tuple[str, ...]) -> None:
    host = Host()
    stream = wrap(fake(giving(Broken(*texts))), host.request).chat.completions.create(stream=True)
    with pytest.raises(ConnectionError):
        list(stream)
    assert host.told == ["started", *(["first"] if texts else []), "done"]


def test_next_on_a_stream_that_breaks() -> None:
    host = Host()
    stream = wrap(fake(giving(Broken())), host.request).chat.completions.create(stream=True)
    with pytest.raises(ConnectionError):
        next(stream)
    assert host.told == ["started", "done"]


def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    """As instrumentation that wraps an async client leaves it."""

    async def answered(**_: Any) -> Any:
        return SimpleNamespace(usage=None)

    def spanned(**kwargs: Any) -> Any:
        return answered(**kwargs)

    async def main() -> None:
        host = Host()
        client = wrap(fake(spanned), host.request)
        await client.chat.completions.create(model="m")
        assert host.told == ["started", "first", "done"]

    asyncio.run(main())


def test_everything_else_is_the_clients_own() -> None:
    client = fake(giving(None))
    assert wrap(client, Host().request).models == "models"
    with pytest.raises(AttributeError):
        _ = wrap(client, Host().request).nothing


def test_a_cancelled_call_ends_its_request() -> None:
    async def main() -> None:
        host = Host()

        async def for_ever(**_: Any) -> None:
            await asyncio.Event().wait()

        call = asyncio.ensure_future(wrap(fake(for_ever), host.request).chat.completions.create())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert host.told == ["started", "done"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("mine", "extras", "sent"),
    [
        ({}, {"extra_body": {"a": 1}}, {"extra_body": {"a": 1}}),
        ({"extra_body": {"b": 2}}, {"extra_body": {"a": 1}}, {"extra_body": {"a": 1, "b": 2}}),
        ({"extra_body": {"a": 2}}, {"extra_body": {"a": 1}}, {"extra_body": {"a": 2}}),
        ({"extra_body": None}, {"extra_body": {"a": 1}}, {"extra_body": {"a": 1}}),
        ({"priority": 0}, {"priority": 5}, {"priority": 0}),
        ({"x": 1}, {}, {"x": 1}),
    ],
)
def test_the_callers_own_values_win(mine: dict[str, Any], extras: dict[str, Any], sent: dict[str, Any]) -> None:
    before = dict(mine)
    assert merged(mine, extras) == sent
    assert mine == before


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (None, None),
        (Usage(1, 2, 3), Usage(1, 2, 3)),
        (USAGE, READ),
        ({"prompt_tokens": 5}, Usage(5, 0, None)),
        ({"prompt_tokens": 5, "completion_tokens": None, "prompt_tokens_details": None}, Usage(5, 0, None)),
        ({"prompt_tokens": "many"}, None),
        (SimpleNamespace(prompt_tokens=4, completion_tokens=1, prompt_tokens_details=None), Usage(4, 1, None)),
        ({}, None),
    ],
)
def test_usage_is_read_from_whatever_a_client_reports(usage: Any, read: Usage | None) -> None:
    assert read_usage(usage) == read
    host = Host()
    with host.request() as request:
        request.usage(usage)
        request.first_token()
        request.first_token()
    assert host.told == ["started", *([read] if read is not None else []), "first", "done"]
