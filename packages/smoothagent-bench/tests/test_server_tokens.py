from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fake_tokens import FakeRenderer
from smoothagent import BackendProtocolError, BackendUnreachableError, Message, Prompt, ToolCall
from smoothagent_bench.tokens import ServerTokens, open_tokens, wire_message

Answer = Callable[[str, dict[str, Any]], httpx.Response]


def server(answer: Answer) -> httpx.Client:
    def handle(request: httpx.Request) -> httpx.Response:
        return answer(request.url.path, json.loads(request.content))

    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(handle))


def render(messages: list[dict[str, Any]]) -> str:
    """A template like SmolLM2's, whose tokens are the words."""
    return " ".join(f"< {m['role']} {m['content']} >" for m in messages) + " < assistant"


def llama_cpp(path: str, body: dict[str, Any]) -> httpx.Response:
    if path == "/apply-template":
        return httpx.Response(200, json={"prompt": render(body["messages"])})
    if path == "/tokenize":
        return httpx.Response(200, json={"tokens": body["content"].split()})
    return httpx.Response(404)


def vllm(path: str, body: dict[str, Any]) -> httpx.Response:
    if path != "/tokenize":
        return httpx.Response(404)
    text = render(body["messages"]) if "messages" in body else body["prompt"]
    return httpx.Response(200, json={"count": len(text.split())})


def hosted(path: str, body: dict[str, Any]) -> httpx.Response:
    if path != "/v1/chat/completions":
        return httpx.Response(404, text="not here")
    return httpx.Response(200, json={"usage": {"prompt_tokens": len(render(body["messages"]).split())}})


def test_counts_are_exact_whatever_the_message() -> None:
    history = [
        Message("system", "be kind to everybody"),
        Message("user", "read it"),
        Message("assistant", "I read", (ToolCall("c1", "bash", "{}"),)),
        Message("tool", "a b c", tool_call_id="c1"),
        Message("user", "go on now please"),
    ]
    whole = len(render([m.wire() for m in history]).split())
    for dialect in (llama_cpp, vllm):
        with server(dialect) as http:
            tokens = open_tokens(http, "m", sample="x")
            assert sum(map(tokens.count, history)) + tokens.fixed(Prompt()) == whole


def test_each_message_is_asked_for_once() -> None:
    renderer = FakeRenderer()
    tokens = ServerTokens(renderer)
    message = Message("user", "hello")
    assert tokens.count(message) == tokens.count(Message("user", "hello"))
    asked = renderer.asked
    tokens.count_wire([{"role": "user", "content": "hello"}] * 50)
    assert renderer.asked == asked


def test_the_system_text_a_prompt_carries_is_counted() -> None:
    tokens = ServerTokens(FakeRenderer())
    assert tokens.fixed(Prompt(system="x" * 40)) == tokens.fixed(Prompt()) + 15


def test_a_server_without_tokenizer_is_calibrated_by_its_usage() -> None:
    with server(hosted) as http:
        tokens = open_tokens(http, "m", sample="word " * 200)
        # Letters are weighed at the sample's five a token; 4 tokens around each message.
        assert tokens.text("word " * 100) == 100
        assert 100 <= tokens.count(Message("user", "word " * 100)) <= 106


def test_errors_are_clear() -> None:
    def broken(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(500, text="out of memory") if path.startswith("/v1") else httpx.Response(404)

    with server(broken) as http, pytest.raises(BackendProtocolError, match="out of memory"):
        open_tokens(http, "m", sample="x")

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    nobody = httpx.Client(base_url="http://server", transport=httpx.MockTransport(refuse))
    with nobody, pytest.raises(BackendUnreachableError, match="is the server running"):
        open_tokens(nobody, "m", sample="x")


def test_wire_messages_are_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    read = wire_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert read == Message("assistant", None, (ToolCall("c", "bash", "{}"),))
