"""HTTP on its way through: who may come in, what is repeated, what is kept, and who hears of whose end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import httpx
import pytest

from agent_server import AgentServer, serving
from gw import STREAM, Body, Running, answered, chunked, http, raw, running, turns, wait_for
from smoothagent import Summarize

QUESTION: Body = {"messages": [{"role": "user", "content": "q"}], "model": "m"}
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize("path", ["/completions", "/responses", "/messages", "/embeddings", "/audio/speech"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_request_whatever_it_asked_for(path: str, streams: bool) -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        return [STREAM, chunked(SAID), 20.0] if streams else [20.0]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway:
        if streams:
            with http() as client, client.stream("POST", gateway.url + path, json={"prompt": "q"}) as response:
                next(response.iter_raw())
        else:
            with http(timeout=0.3) as hasty, pytest.raises(httpx.ReadTimeout):
                hasty.post(gateway.url + path, json={"prompt": "q"})
        wait_for(lambda: server.left == 1)
        wait_for(lambda: gateway.gateway.figures.open == 0)


@pytest.mark.parametrize(
    "garbage",
    [b"HTTP/1.1 abc\r\n\r\n", b"hello", b"\x16\x03\x01\x02\x00", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", b""],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_key_is_told_to_anybody(garbage: bytes, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be read is said to be so, and no more."""
    with raw(lambda head, body: [garbage]) as server:
        more: dict[str, Any] = {"api_key": "sk-SECRET", "token": "the-token", "dialect": "openai"}
        with running(server.url, **more) as gateway, http() as client, caplog.at_level(logging.DEBUG):
            headers = {"authorization": "Bearer the-token"}
            path = "/models" if method == "GET" else "/chat/completions"
            response = client.request(method, gateway.url + path, json=QUESTION, headers=headers)
            assert response.status_code == 502
            assert response.json()["error"]["code"] == "upstream_broken"
        ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("smoothagent"))
        assert "SECRET" not in response.text + ours
        assert "the-token" not in response.text + ours


@pytest.mark.parametrize(
    ("answer", "method", "times"),
    [
        ([b""], "POST", 2),  # closed at the moment it was used again, perhaps
        ([0.6, b""], "POST", 1),  # it has worked on it
        ([b"HTTP/1.1 200 OK\r\ncontent-type: te"], "POST", 1),  # it has answered
        ([b"HTTP/1.1 200 OK\r\ncontent-type: te"], "DELETE", 2),  # which may be repeated, as aiohttp does
        ([b""], "DELETE", 2),
    ],
)
def test_what_is_repeated(answer: list[bytes | float], method: str, times: int) -> None:
    with raw(lambda head, body: answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        path = "/chat/completions" if method == "POST" else "/files/f"
        response = client.request(method, gateway.url + path, json=QUESTION)
        assert response.status_code == 502
        assert len(server.requests) <= times
        assert len(server.requests) == times or method == "DELETE"


def test_a_stream_with_a_length_that_is_not_its_any_more() -> None:
    events = SAID + b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\ndata: [DONE]\n\n'
    with (
        raw(lambda head, body: [answered(events, kind=b"text/event-stream")]) as server,
        running(server.url, dialect="openai") as gateway,
        http() as client,
    ):
        told = client.post(f"{gateway.url}/chat/completions", json={**QUESTION, "stream": True})
        assert told.content == SAID + b"data: [DONE]\n\n"
        asked = {**QUESTION, "stream": True, "stream_options": {"include_usage": True}}
        assert client.post(f"{gateway.url}/chat/completions", json=asked).content == events


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
def test_events_end_in_any_way(end: bytes) -> None:
    said = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}' + end
    events = said + b'data: {"choices":[],"usage":{"prompt_tokens":1}}' + end + b"data: [DONE]" + end

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        return [STREAM, *(chunked(events[i : i + 1]) for i in range(len(events))), b"0\r\n\r\n"]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        told = client.post(f"{gateway.url}/chat/completions", json={**QUESTION, "stream": True})
        assert told.content == said + b"data: [DONE]" + end


def test_a_part_of_an_event_is_passed_on_when_its_stream_breaks_off() -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        return [STREAM, chunked(SAID), chunked(b"data: {")]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        parts = list[bytes]()
        with (
            client.stream("POST", f"{gateway.url}/chat/completions", json={**QUESTION, "stream": True}) as response,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            parts += response.iter_raw()
        assert b"".join(parts) in (SAID + b"data: {", SAID, b"")  # what httpx gives out before it fails is its own
        assert not gateway.gateway.sessions.all()[0].busy


def test_a_server_that_does_not_know_what_only_the_gateway_asks_for() -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        if b"stream_options" in body:
            return [answered(b'{"error":"extra fields not permitted"}', status=b"422 Unprocessable Entity")]
        return [STREAM, chunked(SAID), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        call = {**QUESTION, "stream": True}
        for _ in range(2):
            assert client.post(f"{gateway.url}/chat/completions", json=call).content == SAID + b"data: [DONE]\n\n"
        assert len(server.requests) == 3, "it is not asked for again"
        asks = {**call, "stream_options": {"include_usage": True}}
        assert client.post(f"{gateway.url}/chat/completions", json=asks).status_code == 422, "its client's own"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"}, 200),
        ({"origin": "http://127.0.0.1:8090"}, 200),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://localhost.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"host": "127.0.0.2"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "evil.example"}, 421),
    ],
)
def test_a_page_of_another_site_spends_nothing_here(headers: dict[str, str], status: int) -> None:
    with (
        raw(lambda head, body: [answered(b"{}")]) as server,
        running(server.url, dialect="openai") as gateway,
        http() as client,
    ):
        for method, path in (("POST", "/chat/completions"), ("POST", "/completions"), ("GET", "/models")):
            response = client.request(method, gateway.url + path, json=QUESTION, headers=headers)
            assert response.status_code == status


def test_headers_keep_their_bytes() -> None:
    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url, dialect="openai") as gateway:
        host, _, port = gateway.root.removeprefix("http://").partition(":")
        body = json.dumps(QUESTION).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\nx-title: é ü\r\n\r\n"
        ).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert "x-title: é ü".encode() in server.requests[0][0].lower()


def test_a_body_that_only_the_server_can_read() -> None:
    import gzip

    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url, dialect="openai") as gateway:
        packed = gzip.compress(json.dumps(QUESTION).encode())
        with http() as client:
            headers = {"content-encoding": "gzip", "content-type": "application/json"}
            response = client.post(f"{gateway.url}/chat/completions", content=packed, headers=headers)
        assert response.status_code == 200
        assert server.requests[0][1] == packed


@pytest.mark.parametrize(
    "path", ["/chat/completions/", "//v1/chat/completions", "/openai/deployments/m/chat/completions"]
)
def test_completions_are_known_below_any_path(path: str) -> None:
    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url, dialect="openai") as gateway:
        with http() as client:
            url = (gateway.url if path.startswith("/chat") else gateway.root) + path
            assert "x-smoothagent-conversation" in client.post(url, json=QUESTION).headers
        assert path.encode() in server.requests[0][0]


def test_each_clients_own_key_is_sent_with_what_is_prepared_for_it() -> None:
    """And the server's slots and pacing are shared out by one for all of them."""
    keys = set[bytes]()

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        call = json.loads(body or b"{}")
        if head.startswith(b"GET /v1/models"):
            return [answered(b'{"object":"list","data":[{"id":"m","max_model_len":100000}]}')]
        if head.startswith(b"GET /version"):
            return [answered(b'{"version":"0.30.0"}')]
        if head.startswith(b"GET "):
            return [answered(b"{}", status=b"404 Not Found")]
        if call.get("max_tokens") == 1 or "Summarize" in str(call.get("messages", [{}])[-1].get("content")):
            keys.update(line for line in head.split(b"\r\n") if line.lower().startswith((b"authorization", b"api-key")))
        message = {"role": "assistant", "content": "said"}
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": 1, "total_tokens": 1}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return [answered(json.dumps({"choices": choices, "usage": usage}).encode())]

    with (
        raw(answer, all_of_it=True) as server,
        running(server.url, lambda: Summarize(700, keep=200, max_tokens=60)) as gateway,
        http() as client,
    ):
        for headers in ({"authorization": "Bearer one"}, {"api-key": "two"}):
            for number in range(1, 12):
                call = {"model": "m", "messages": turns(number)}
                response = client.post(f"{gateway.url}/chat/completions", json=call, headers=headers)
                assert response.status_code == 200
                gateway.idle()
        assert len(gateway.gateway.sessions) == 2
    assert b"authorization: bearer one" in {k.lower() for k in keys}
    assert b"api-key: two" in {k.lower() for k in keys}


@pytest.mark.parametrize("status", [b"999 Odd", b"042 Odd"])
def test_a_status_that_http_does_not_have(status: bytes) -> None:
    with (
        raw(lambda head, body: [answered(b"{}", status=status)]) as server,
        running(server.url, dialect="openai") as gateway,
        http() as client,
    ):
        response = client.post(f"{gateway.url}/chat/completions", json=QUESTION)
        assert response.status_code == 502


def test_refusals_are_counted(running_gateway: Running) -> None:
    with http() as client:
        assert client.post(f"{running_gateway.url}/chat/completions", content=b"{").status_code == 400
        assert client.get(f"{running_gateway.url}/models").status_code == 502
        text = client.get(f"{running_gateway.root}/smoothagent/metrics").text
    assert 'requests_total{kind="completion",status="400"} 1.0' in text
    assert 'requests_total{kind="other",status="502"} 1.0' in text


@pytest.fixture
def running_gateway() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(f"http://127.0.0.1:{port}/v1", dialect="openai") as gateway:
        yield gateway


def test_no_text_is_logged_where_warming_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    """Nor where the server quotes what it was sent."""

    class Quoting(AgentServer):
        def usage(self, body: dict[str, Any]) -> dict[str, Any]:
            return {**super().usage(body), "prompt_tokens_details": {"cached_tokens": 0}}

    with (
        serving(Quoting(turns=100)) as server,
        caplog.at_level(logging.DEBUG, logger="smoothagent"),
        running(server.url) as gateway,
        http() as client,
    ):
        for number in range(1, 20):
            messages = turns(number, "SECRET" * 40)
            call = {"model": "m", "messages": messages}
            client.post(f"{gateway.url}/chat/completions", json=call)
            gateway.idle()
            server.fail = [400] if number % 3 else []
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("usage", ["1e400", "-5", "9" * 400, '"x"', "[1]", "true", "null"])
@pytest.mark.parametrize("streams", [False, True])
def test_counts_that_cannot_be_cost_nobody_an_answer(usage: str, streams: bool) -> None:
    counts = (
        f'{{"prompt_tokens":{usage},"completion_tokens":{usage},"prompt_tokens_details":{{"cached_tokens":{usage}}}}}'
    )
    said = '{"choices":[{"index":0,"%s":{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":%s}'

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        if not streams:
            return [answered((said % ("message", counts)).encode())]
        event = b"data: " + (said % ("delta", counts)).encode() + b"\n\n"
        return [STREAM, chunked(event), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        for number in (1, 2):
            call = {"messages": turns(number), "stream": streams}
            response = client.post(f"{gateway.url}/chat/completions", json=call)
            assert response.status_code == 200
            assert b'"content":"a"' in response.content
        assert len(gateway.gateway.sessions) == 1


def test_a_gateway_in_a_process_leaves_its_other_event_loops_alone() -> None:
    """uvicorn before 0.36 makes uvloop the whole process's, which a library must not."""

    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__

    before = asyncio.run(name())
    with serving(AgentServer()) as server, running(server.url):
        assert asyncio.run(name()) == before
    assert asyncio.run(name()) == before
