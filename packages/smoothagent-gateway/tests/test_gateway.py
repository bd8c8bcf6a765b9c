"""Conversations through the gateway: recognised, committed, warm; everything else untouched; nothing lost."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from agent_server import AgentServer, serving
from gw import STREAM, Body, Running, answered, chunked, http, raw, running, turns, wait_for, window
from smoothagent import ConfigurationError, LookaheadRuntime, Offload, OffloadStore, Summarize
from smoothagent_gateway import Settings

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}},
    }
]


QUESTION: list[Body] = [{"role": "system", "content": "S"}, {"role": "user", "content": "the task"}]


def summary() -> Summarize:
    return Summarize(700, keep=200, max_tokens=60)


def talk(
    gateway: Running | None,
    url: str,
    number: int,
    *,
    streams: bool = True,
    messages: list[Body] | None = None,
    tail: bool = False,
    headers: dict[str, str] | None = None,
) -> tuple[list[Body], list[httpx.Headers]]:
    """An agent of the openai client's that looks so many times; its history, and the headers of its answers."""
    messages = [*QUESTION] if messages is None else messages
    heads = list[httpx.Headers]()
    with OpenAI(base_url=url, api_key="x", max_retries=0, http_client=http()) as client:
        create: Any = client.chat.completions.with_raw_response.create
        for i in range(number):
            sent = [*messages, {"role": "user", "content": f"now {i}"}] if tail else messages
            given = create(model="m", messages=sent, tools=TOOLS, stream=streams, extra_headers=headers)
            heads.append(given.headers)
            text, made = _streamed(given.parse()) if streams else _whole(given.parse())
            messages.append({"role": "assistant", "content": text, "tool_calls": made})
            if gateway is not None:
                gateway.idle()
            messages.append({"role": "tool", "tool_call_id": made[0]["id"], "content": f"{i} {'r' * 200}"})
    return messages, heads


def _streamed(stream: Any) -> tuple[str, list[Body]]:
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or ()]
    return "".join(delta.content or "" for delta in deltas), calls


def _whole(completion: Any) -> tuple[str, list[Body]]:
    message = completion.choices[0].message
    return message.content or "", [call.model_dump() for call in message.tool_calls or ()]


def commits(heads: list[httpx.Headers]) -> list[tuple[int, str]]:
    return [(i, h["x-smoothagent-commit"]) for i, h in enumerate(heads) if h["x-smoothagent-commit"] != "none"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tail", [False, True])
def test_an_agent_with_another_base_url_has_lookahead(streams: bool, tail: bool) -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway:
        messages, heads = talk(gateway, gateway.url, 14, streams=streams, tail=tail)
        made = commits(heads)
        assert len(made) >= 3
        assert {kind for _, kind in made} == {"hit"}
        assert len({h["x-smoothagent-conversation"] for h in heads}) == 1
        for i, _ in made:
            sent = server.main[i]["messages"]
            at = next(n for n, b in enumerate(server.bodies) if b is server.main[i])
            prefill = [b for b in server.bodies[:at] if b in server.prefills][-1]
            ahead = prefill["messages"]
            assert ahead == sent[: len(ahead)]
            assert len(sent) - len(ahead) <= 1 + tail, "all but the newest result, and what is rewritten on every call"
            assert prefill["tools"] == TOOLS
        # What the agent has is all it has ever said.
        assert len(messages) == 2 + 2 * 14


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_sent_is_what_the_synchronous_strategy_gives(streams: bool) -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway:
        messages, _ = talk(gateway, gateway.url, 14, streams=streams)
        runtime = LookaheadRuntime[Body](window, lookahead=False)
        for i, body in enumerate(server.main):
            assert body["messages"] == runtime.on_commit(messages[: 2 + 2 * i])
        runtime.close()


def test_nobody_waits_for_a_summary() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url, summary) as gateway:
        _, heads = talk(gateway, gateway.url, 20)
        made = commits(heads)
        assert made
        assert {kind for _, kind in made} == {"hit"}
        for i, _ in made:
            assert "SUMMARY" in json.dumps(server.main[i]["messages"])
            before = server.bodies[: next(n for n, b in enumerate(server.bodies) if b is server.main[i])]
            assert before[-1] not in server.summaries


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_is_byte_for_byte_the_servers(streams: bool, asks: bool) -> None:
    """Usage that only the gateway wants is taken out again, be the answer cut as it will."""
    events = [
        *(
            f'data: {{"choices":[{{"index":0,"delta":{{"content":"{t}"}}}}],"x":1}}\n\n'.encode()
            for t in ("a", "b", "ü")
        ),
        b': a comment\n\nevent: more\r\ndata: {"choices":[]}\r\n\r\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    ]
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
    done = b"data: [DONE]\n\n"
    whole = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"abc"},"finish_reason":"stop"}],"y":[1.0]}'

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        call = json.loads(body)
        if not call.get("stream"):
            return [answered(whole)]
        asked = "include_usage" in body.decode()
        stream = b"".join([*events, usage if asked else b"", done])
        return [STREAM, *(chunked(stream[i : i + 7]) for i in range(0, len(stream), 7)), chunked(b"")]

    call: Body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "stream": streams, "odd": {"a": [1.5]}}
    if asks:
        call["stream_options"] = {"include_usage": True}
    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        direct = client.post(f"{server.url}/chat/completions", json=call)
        through = client.post(f"{gateway.url}/chat/completions", json=call)
        assert through.content == direct.content
        assert through.status_code == 200
        assert through.headers["content-type"] == direct.headers["content-type"]
        *_, (_, body) = server.requests
        sent = json.loads(body)
        assert sent.pop("stream_options", None) == ({"include_usage": True} if streams else None) or asks
        assert sent == {k: v for k, v in call.items() if k != "stream_options"}
        state = client.get(f"{gateway.root}/smoothagent/state").json()
        [turn] = state["conversations"][0]["turns"]
        assert turn["prompt_tokens"] == (7 if streams else None)


def test_a_request_that_needs_no_change_goes_on_byte_for_byte() -> None:
    body = b'{"messages" : [ {"role":"user","content":"\\u00fc \\ud800"} ],"model":"m", "temperature": 1e0}'
    with (
        raw(lambda head, body: [answered(b'{"choices":[]}')]) as server,
        running(server.url, dialect="openai") as gateway,
        http() as client,
    ):
        client.post(f"{gateway.url}/chat/completions", content=body, headers={"x-mine": "1"})
        head, sent = server.requests[-1]
        assert sent == body
        assert b"x-mine: 1" in head


def test_a_stream_is_not_held_up() -> None:
    """A piece is with the client before the next one is sent."""
    goes_on = threading.Event()
    first = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'

    def answer(head: bytes, body: bytes) -> Any:
        yield STREAM
        yield chunked(first)
        assert goes_on.wait(30)
        yield chunked(b"data: [DONE]\n\n")
        yield chunked(b"")

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        call = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        with client.stream("POST", f"{gateway.url}/chat/completions", json=call) as response:
            chunks = response.iter_raw()
            assert next(chunks) == first
            goes_on.set()
            assert b"".join(chunks) == b"data: [DONE]\n\n"


def test_everything_else_passes_through() -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        line = head.split(b"\r\n")[0]
        return [answered(line + b"|" + body, status=b"418 Teapot", kind=b"text/odd", more=b"x-theirs: 1\r\n")]

    with raw(answer) as server, running(server.url) as gateway, http() as client:
        for method, path, content in (
            ("GET", "/v1/models?a=b%20c", b""),
            ("POST", "/v1/embeddings", b"\x00\xff" * 1000),
            ("DELETE", "/v1/files/f%2Fg", b""),
            ("GET", "/health", b""),
            ("GET", "/v1/chat/completions", b""),
            ("PUT", "/", b"x"),
        ):
            response = client.request(method, f"{gateway.root}{path}", content=content)
            assert response.status_code == 418
            assert response.content == f"{method} {path} HTTP/1.1|".encode() + content
            assert response.headers["x-theirs"] == "1"
            assert response.headers["content-type"] == "text/odd"


def test_an_upstream_below_another_path() -> None:
    seen = list[bytes]()

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        seen.append(head.split(b" ")[1])
        return [answered(b"{}")]

    with (
        raw(answer) as server,
        running(server.url.replace("/v1", "/api/v1/"), dialect="openai") as gateway,
        http() as client,
    ):
        client.get(f"{gateway.url}/models")
        client.get(f"{gateway.root}/health")
        client.post(f"{gateway.url}/chat/completions", json={"messages": [{"role": "user", "content": "q"}]})
    assert seen == [b"/api/v1/models", b"/api/health", b"/api/v1/chat/completions"]


# ---- faults ------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_the_request_upstream() -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        if b"stream" not in body:
            return [20.0]
        return [STREAM, chunked(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'), 20.0]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        call: Body = {"messages": [{"role": "user", "content": "q"}]}
        with client.stream("POST", f"{gateway.url}/chat/completions", json={**call, "stream": True}) as response:
            next(response.iter_raw())
        wait_for(lambda: server.left == 1)
        with pytest.raises(httpx.ReadTimeout), http(timeout=0.3) as hasty:
            hasty.post(f"{gateway.url}/chat/completions", json=call)
        wait_for(lambda: server.left == 2)
        with pytest.raises(httpx.ReadTimeout), http(timeout=0.3) as hasty:
            hasty.get(f"{gateway.url}/models")
        wait_for(lambda: server.left == 2 + (b"GET" in server.requests[-1][0] and 1))
        wait_for(lambda: gateway.gateway.figures.open == 0)
        assert not any(s.busy for s in gateway.gateway.sessions.all())


@pytest.mark.parametrize("streams", [False, True])
def test_an_upstream_that_dies_in_the_middle_dies_for_the_client(streams: bool) -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        if streams:
            return [STREAM, chunked(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')]
        return [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        call = {"messages": turns(2), "stream": streams}
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                client.post(f"{gateway.url}/chat/completions", json=call)
        assert not any(s.busy for s in gateway.gateway.sessions.all())
        assert len(gateway.gateway.sessions) == 1, "the second try is the same conversation"


def test_an_upstream_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(f"http://127.0.0.1:{port}/v1") as gateway, http() as client:
        for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
            response = client.request(method, gateway.url + path, json={"messages": turns(1)})
            assert response.status_code == 502
            error = response.json()["error"]
            assert error["code"] == "upstream_unreachable"
            assert f"127.0.0.1:{port}" in error["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_what_the_upstream_refuses_is_refused_as_it_says(streams: bool) -> None:
    told = b'{"error":{"message":"slow down","code":"rate"}}'

    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        return [answered(told, status=b"429 Too Many Requests", more=b"retry-after: 17\r\n")]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        response = client.post(f"{gateway.url}/chat/completions", json={"messages": turns(1), "stream": streams})
        assert (response.status_code, response.content, response.headers["retry-after"]) == (429, told, "17")
        assert len(server.requests) == 1, "the gateway repeats nothing"


@pytest.mark.parametrize(
    "garbage", [b"not json", b"\xff\xfe", b"[]", b'{"choices":7}', b'{"choices":[7]}', b"", b"{" * 5000]
)
@pytest.mark.parametrize("streams", [False, True])
def test_garbage_passes_through(garbage: bytes, streams: bool) -> None:
    def answer(head: bytes, body: bytes) -> list[bytes | float]:
        if not streams:
            return [answered(garbage)]
        return [STREAM, chunked(b"data: " + garbage + b"\n\n"), chunked(b"data: [DONE]\n\n"), chunked(b"")]

    with raw(answer) as server, running(server.url, dialect="openai") as gateway, http() as client:
        for number in (2, 3, 4):
            response = client.post(
                f"{gateway.url}/chat/completions", json={"messages": turns(number), "stream": streams}
            )
            assert response.status_code == 200
            assert response.content == (b"data: " + garbage + b"\n\ndata: [DONE]\n\n" if streams else garbage)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "not JSON"),
        (b'{"messages": [}', 400, "line 1, column 15"),
        (b"\xff\xfe", 400, "not"),
        (b"[" * 200_000, 400, "nested too deeply"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, 400, "nested too deeply"),
        (b"[]", 400, "a JSON list"),
        (b'"x"', 400, "a JSON str"),
        (b"1" * 10_000, 400, "a JSON float"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, status: int, says: str) -> None:
    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url) as gateway, http() as client:
        response = client.post(f"{gateway.url}/chat/completions", content=body)
        assert response.status_code == status
        assert says in response.json()["error"]["message"]
        assert not server.requests


@pytest.mark.parametrize(
    "call",
    list[Any](
        [
            {},
            {"messages": []},
            {"messages": "x"},
            {"messages": [1]},
            {"messages": [{"content": "no role"}]},
            {"messages": [{"role": 7, "content": {}}]},
            {"messages": [{"role": "tool", "tool_call_id": "none", "content": "x"}]},
            {
                "messages": [{"role": "user", "content": "q"}],
                "tools": "x",
                "model": 7,
                "n": "many",
                "stream_options": [],
            },
            {"messages": [{"role": "assistant", "tool_calls": "x"}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]},
            {"messages": [{"role": "user", "content": [7, {"type": "image_url", "image_url": None}]}]},
            {"messages": [{"role": "user", "content": "q\u0000\ud800"}], "stream": "yes"},
        ]
    ),
)
def test_what_only_the_server_can_judge_goes_on_as_it_is(call: Body) -> None:
    told = b'{"error":{"message":"I do not like that"}}'
    with (
        raw(lambda head, body: [answered(told, status=b"400 Bad Request")]) as server,
        running(server.url, dialect="openai") as gateway,
        http() as client,
    ):
        body = json.dumps(call).encode()
        response = client.post(f"{gateway.url}/chat/completions", content=body)
        assert (response.status_code, response.content) == (400, told)
        assert json.loads(server.requests[-1][1]) == call


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    with (
        raw(lambda head, body: [answered(b'{"choices":[]}')]) as server,
        running(server.url, dialect="openai", max_body_bytes=2**20) as gateway,
        http() as client,
    ):
        with pytest.raises((httpx.WriteError, httpx.ReadError, AssertionError)):  # noqa: PT012  either is an end
            response = client.post(f"{gateway.url}/chat/completions", content=b'"' + b"x" * (50 * 2**20) + b'"')
            assert response.status_code != 413
        assert not server.requests
        small = client.post(f"{gateway.url}/chat/completions", json={"messages": turns(1)})
        assert small.status_code == 200


def test_nothing_that_is_said_is_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "xyzzy-7"
    caplog.set_level(logging.DEBUG)
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        talk(gateway, gateway.url, 8, messages=[{"role": "user", "content": secret}])
        client.post(f"{gateway.url}/chat/completions", content=b'{"messages": "' + secret.encode())
        client.post(
            f"{gateway.url}/chat/completions",
            json={"messages": [{"role": "tool", "tool_call_id": secret, "content": secret}]},
        )
        shown = (
            client.get(f"{gateway.root}/smoothagent/state").text
            + client.get(f"{gateway.root}/smoothagent/metrics").text
        )
    assert secret not in shown
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("smoothagent")]
    assert secret not in "".join(ours)
    assert secret not in "".join(capfd.readouterr())


# ---- whose conversation ------------------------------------------------------------------------


def test_two_clients_with_one_history_do_not_meet() -> None:
    """At once, and one after the other; each goes on with its own."""
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway:
        begun, _ = talk(gateway, gateway.url, 9)
        one, two = list(begun), list(begun)
        one[-1] = {**one[-1], "content": "one"}
        two[-1] = {**two[-1], "content": "two"}

        def go(messages: list[Body]) -> None:
            talk(None, gateway.url, 5, messages=messages)

        both = [threading.Thread(target=go, args=(messages,)) for messages in (one, two)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        gateway.idle()
        for mine, theirs in (("one", "two"), ("two", "one")):
            told = [
                json.dumps(b["messages"]) for b in server.main if f'"content": "{mine}"' in json.dumps(b["messages"])
            ]
            assert told
            assert not any(f'"content": "{theirs}"' in t for t in told)
        # Both have what the first nine turns had become, and not what these were.
        assert all(len(b["messages"]) < 20 for b in server.main)


def test_the_same_history_at_once_is_two_conversations() -> None:
    release = threading.Event()

    def answer(head: bytes, body: bytes) -> Any:
        if b"POST" in head:
            release.wait(30)
        yield answered(b'{"choices":[{"index":0,"message":{"role":"assistant","content":"x"}}]}')

    with raw(answer) as server, running(server.url, dialect="openai") as gateway:
        names = list[str]()

        def ask() -> None:
            with http() as client:
                response = client.post(f"{gateway.url}/chat/completions", json={"messages": turns(3)})
                names.append(response.headers["x-smoothagent-conversation"])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.requests) == 3)
        release.set()
        for thread in threads:
            thread.join()
        assert len(set(names)) == 3


def test_an_edited_history_is_what_it_says() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway:
        messages, _ = talk(gateway, gateway.url, 9)
        edited = [messages[0], {"role": "user", "content": "another task"}, *messages[2:]]
        talk(gateway, gateway.url, 1, messages=list(edited))
        sent = server.main[-1]["messages"]
        runtime = LookaheadRuntime[Body](window, lookahead=False)
        assert sent == runtime.on_commit(edited)
        runtime.close()
        # One whose last question is asked in other words goes on.
        asked = [*messages[:-1], {**messages[-1], "content": "other words"}]
        talk(gateway, gateway.url, 1, messages=asked)
        assert server.main[-1]["messages"][-1]["content"] == "other words"
        assert len(server.main[-1]["messages"]) < len(messages)


def test_a_header_names_a_conversation() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway:
        _, one = talk(gateway, gateway.url, 2, headers={"X-Session-Id": "a"})
        _, two = talk(gateway, gateway.url, 2, headers={"X-Session-Id": "b"})
        names = [{h["x-smoothagent-conversation"] for h in heads} for heads in (one, two)]
        assert [len(n) for n in names] == [1, 1]
        assert names[0] != names[1]


def test_keys_keep_conversations_apart_and_go_on() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        seen = set[str]()
        for key in ("a", "b"):
            response = client.post(
                f"{gateway.url}/chat/completions",
                json={"messages": turns(1), "model": "m"},
                headers={"authorization": f"Bearer {key}"},
            )
            seen.add(response.headers["x-smoothagent-conversation"])
        assert len(seen) == 2
        assert len(server.main) == 2


@pytest.mark.parametrize("strategy", [window, summary])
def test_a_restart_goes_on(tmp_path: Path, strategy: Any) -> None:
    state = tmp_path / "deep" / "state.sqlite"
    with serving(AgentServer(turns=100)) as server:
        with running(server.url, strategy, state=state) as gateway:
            messages, before = talk(gateway, gateway.url, 8)
            while not commits(before[-1:]):
                messages, after = talk(gateway, gateway.url, 1, messages=messages)
                before += after
        summaries = len(server.summaries)
        last = server.main[-1]["messages"]
        with running(server.url, strategy, state=state) as gateway:
            messages, after = talk(gateway, gateway.url, 1, messages=messages)
            sent = server.main[-1]["messages"]
            assert sent[: len(last)] == last, "the prefix goes on as it was"
            assert len(sent) - len(last) == 2
            assert len(server.summaries) == summaries, "nothing is summarized anew"
            assert {h["x-smoothagent-conversation"] for h in [*before, *after]} == {
                before[0]["x-smoothagent-conversation"]
            }
    assert state.stat().st_mode & 0o077 == 0
    assert state.parent.stat().st_mode & 0o077 == 0


def test_a_state_that_cannot_be_written_costs_a_restart_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url, state=tmp_path / "s.sqlite") as gateway:
        talk(gateway, gateway.url, 2)
        file: Any = gateway.gateway._records._file  # pyright: ignore[reportPrivateUsage]
        file._writing.submit(file._writer.execute, "PRAGMA query_only=ON").result()
        _, heads = talk(gateway, gateway.url, 12, messages=[{"role": "user", "content": "another"}])
        assert len(commits(heads)) >= 2
    told = [r.getMessage() for r in caplog.records if "could not be written" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("what", ["folder", "text", "newer"])
def test_a_state_that_is_none_is_refused(tmp_path: Path, what: str) -> None:
    import sqlite3

    state = tmp_path / "state"
    if what == "folder":
        state.mkdir()
    elif what == "text":
        state.write_text("hello, this is no database at all, but a text of some length" * 20)
    else:
        with sqlite3.connect(state) as database:
            database.execute("PRAGMA user_version=99")
        database.close()
    with pytest.raises(ConfigurationError, match="--state"), running("http://127.0.0.1:9/v1", state=state):
        pass


def test_what_is_kept_is_bounded() -> None:
    with serving(AgentServer(turns=1000)) as server, running(server.url, conversations=5) as gateway, http() as client:
        for i in range(20):
            client.post(f"{gateway.url}/chat/completions", json={"messages": [{"role": "user", "content": f"q{i}"}]})
        assert len(gateway.gateway.sessions) <= 5
    with (
        serving(AgentServer(turns=1000)) as server,
        running(server.url, memory_bytes=100_000) as gateway,
        http() as client,
    ):
        for i in range(20):
            text = f"q{i} " * 10_000
            client.post(f"{gateway.url}/chat/completions", json={"messages": [{"role": "user", "content": text}]})
        kept = gateway.gateway.sessions.all()
        assert kept
        assert sum(s.size for s in kept) <= 100_000


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway:
        messages, _ = talk(gateway, gateway.url, 6)
        for now in (0.0, 4e9):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            messages, heads = talk(gateway, gateway.url, 3, messages=messages)
            assert len({h["x-smoothagent-conversation"] for h in heads}) == 1
        assert len(gateway.gateway.sessions) == 1


# ---- who may come in ---------------------------------------------------------------------------


def test_with_a_token_only_who_has_it_comes_in() -> None:
    with (
        raw(lambda head, body: [answered(b"{}")]) as server,
        running(server.url, token="t0k", api_key="upstream-key") as gateway,
        http() as client,
    ):
        for headers in (
            {},
            {"authorization": "Bearer no"},
            {"authorization": "Basic t0k"},
            {"authorization": "Bearer t0ké"},
        ):
            for path in ("/v1/models", "/v1/chat/completions", "/smoothagent/state", "/smoothagent/metrics", "/health"):
                raw_headers = {k: v.encode() for k, v in headers.items()}
                response = client.get(gateway.root + path, headers=raw_headers)  # pyright: ignore[reportArgumentType]
                assert response.status_code == 401
                assert "token" in response.json()["error"]["message"]
        assert not server.requests
        assert client.get(f"{gateway.root}/smoothagent").status_code == 200, "the page itself holds nothing"
        response = client.get(f"{gateway.url}/models", headers={"authorization": "bearer t0k"})
        assert response.status_code == 200
        head = server.requests[-1][0].lower()
        assert b"authorization: bearer upstream-key" in head
        assert b"t0k" not in head


def test_without_one_names_that_lead_here_are_refused() -> None:
    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url) as gateway, http() as client:
        port = gateway.root.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            assert client.get(f"{gateway.url}/models", headers={"host": host}).status_code == 421
        for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST:1"):
            assert client.get(f"{gateway.url}/models", headers={"host": host}).status_code == 200
        assert len(server.requests) == 4


def test_a_gateway_for_everybody_wants_a_token() -> None:
    with pytest.raises(ConfigurationError, match="token"):
        Settings("http://127.0.0.1:9/v1", window, host="0.0.0.0")
    Settings("http://127.0.0.1:9/v1", window, host="0.0.0.0", token="t")


# ---- what it tells -----------------------------------------------------------------------------


def test_metrics_and_state_say_what_was_done() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        _, heads = talk(gateway, gateway.url, 14)
        hits = len(commits(heads))
        text = client.get(f"{gateway.root}/smoothagent/metrics").text
        assert f'smoothagent_gateway_commits_total{{kind="hit"}} {hits}.0' in text
        assert 'smoothagent_gateway_requests_total{kind="completion",status="200"} 14.0' in text
        assert f'smoothagent_gateway_ttft_seconds_count{{answer="stream",commit="hit"}} {hits}.0' in text
        assert "smoothagent_gateway_open_requests 0.0" in text
        state = client.get(f"{gateway.root}/smoothagent/state").json()
        [one] = state["conversations"]
        assert one["requests"] == 14
        assert state["ledger"]["prefilled_tokens"] > 0
        assert state["ledger"]["saved_tokens"] > 0
        assert len(one["turns"]) == len(server.main)
        for turn in one["turns"]:
            assert turn["prompt_tokens"] > 0
            assert turn["ttft"] > 0
        assert "conversation" in client.get(f"{gateway.root}/smoothagent").text


def test_an_offloaded_output_is_read_through_the_gateway(tmp_path: Path) -> None:
    output = "line\n" * 400
    tools = [{"type": "function", "function": {"name": "read_offloaded"}}]

    def offload() -> Offload:
        return Offload(300, keep=1, store=OffloadStore(tmp_path))

    with (
        serving(AgentServer(turns=100)) as server,
        running(server.url, offload, store=OffloadStore(tmp_path)) as gateway,
        http() as client,
    ):
        call: Body = {"messages": turns(4, output), "model": "m"}
        client.post(f"{gateway.url}/chat/completions", json=call)
        assert server.main[-1]["messages"] == call["messages"], "an agent that could not read it has it all"
        response = client.post(f"{gateway.url}/chat/completions", json={**call, "tools": tools})
        assert response.headers["x-smoothagent-commit"] == "sync"
        sent = json.dumps(server.main[-1]["messages"])
        ref = sent.partition('ref=\\"')[2].partition("\\")[0]
        page = client.get(f"{gateway.root}/smoothagent/offloaded/{ref}?limit=100000")
        assert page.text.partition("\n")[2] == f"0 {output}"
        assert "copy the ref" in client.get(f"{gateway.root}/smoothagent/offloaded/none").text
    with raw(lambda head, body: [answered(b"{}")]) as server, running(server.url) as gateway, http() as client:
        assert client.get(f"{gateway.root}/smoothagent/offloaded/x").status_code == 404


def test_many_at_once_each_get_their_own() -> None:
    with serving(AgentServer(turns=10_000)) as server, running(server.url) as gateway:

        async def one(client: AsyncOpenAI, i: int) -> set[str]:
            messages: list[Any] = [{"role": "user", "content": f"task {i}"}]
            names = set[str]()
            for turn in range(8):
                given = await client.chat.completions.with_raw_response.create(
                    model="m", messages=messages, stream=True
                )
                names.add(given.headers["x-smoothagent-conversation"])
                async for _ in await _parsed(given):
                    pass
                messages += [{"role": "assistant", "content": f"{i} {turn}"}, {"role": "user", "content": f"more {i}"}]
            return names

        async def main() -> list[set[str]]:
            limits = httpx.Limits(max_connections=None)
            async with AsyncOpenAI(
                base_url=gateway.url,
                api_key="x",
                max_retries=0,
                http_client=httpx.AsyncClient(limits=limits, timeout=60),
            ) as client:
                return await asyncio.gather(*(one(client, i) for i in range(20)))

        names = asyncio.run(main())
        assert all(len(n) == 1 for n in names)
        assert len({name for n in names for name in n}) == 20
        gateway.idle()
        for body in server.main:
            whose = {str(m["content"]).split()[-1] for m in body["messages"] if m["role"] == "user"}
            whose |= {str(m["content"]).split()[0] for m in body["messages"] if m["role"] == "assistant"}
            assert len(whose) == 1, "nobody has another's messages"


async def _parsed(given: Any) -> Any:
    return given.parse()


def test_without_lookahead_it_transforms_at_the_trigger() -> None:
    with serving(AgentServer(turns=100)) as server, running(server.url, lookahead=False) as gateway:
        _, heads = talk(gateway, gateway.url, 9)
        assert {kind for _, kind in commits(heads)} == {"sync"}
        assert not server.prefills


def test_a_window_of_one_agent_costs_no_other_a_slot() -> None:
    """A title asked for beside the conversation is one of its own, and ends nobody's."""
    with serving(AgentServer(turns=100)) as server, running(server.url) as gateway, http() as client:
        messages, before = talk(gateway, gateway.url, 7)
        title = {
            "model": "m",
            "messages": [{"role": "system", "content": "Name this."}, {"role": "user", "content": "x"}],
        }
        client.post(f"{gateway.url}/chat/completions", json=title)
        _, after = talk(gateway, gateway.url, 7, messages=messages)
        assert {h["x-smoothagent-conversation"] for h in before} == {h["x-smoothagent-conversation"] for h in after}
        assert {kind for _, kind in commits(after)} == {"hit"}
