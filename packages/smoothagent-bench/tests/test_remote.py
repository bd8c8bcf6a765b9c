from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from smoothagent import BackendProtocolError, BackendUnreachableError, ConfigurationError
from smoothagent_bench.commands import _without_key  # pyright: ignore[reportPrivateUsage]
from smoothagent_bench.remote import find_server
from smoothagent_bench.run import Server


def client(models: object, props: dict[str, Any] | None = None, *, status: int = 200) -> httpx.Client:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer key"
        if request.url.path == "/v1/models":
            return httpx.Response(status, json=models)
        if request.url.path == "/props" and props is not None:
            return httpx.Response(200, json=props)
        return httpx.Response(404)

    return httpx.Client(transport=httpx.MockTransport(handle))


def find(http: httpx.Client, model: str | None = None, window: int | None = None) -> Server:
    return find_server("http://server", model, api_key="key", window=window, client=http)


def test_vllm_and_sglang_say_their_window() -> None:
    for owner, known in (("vllm", True), ("sglang", True), ("somebody", False)):
        http = client({"data": [{"id": "qwen", "max_model_len": 32_768, "owned_by": owner}]})
        assert find(http) == replace(Server("http://server/v1", "qwen", 32_768, 0, "key"), full_length=known)


def test_a_lookahead_server_that_is_not_there_is_missed_at_once() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "side":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json={"data": [{"id": "qwen", "max_model_len": 32_768}]})

    http = httpx.Client(transport=httpx.MockTransport(handle))
    with pytest.raises(BackendUnreachableError, match="nothing answers at http://side/v1"):
        find_server("http://server", None, lookahead_url="http://side", client=http)


def test_a_key_is_in_no_report() -> None:
    for given in (["--api-key", "sk-1"], ["--api-key=sk-1"], ["--api", "sk-1"], ["--ap=sk-1"]):
        shown = list(_without_key(["--base-url", "http://x/v1", *given, "--agents", "2"]))
        assert "sk-1" not in " ".join(shown)
        assert " ".join(shown).endswith("--agents 2")


def test_llama_cpp_says_its_slots_and_their_window() -> None:
    props = {"total_slots": 4, "default_generation_settings": {"n_ctx": 8_192}}
    assert find(client({"data": [{"id": "smol"}]}, props)) == Server("http://server/v1", "smol", 8_192, 4, "key")


def test_a_window_given_wins() -> None:
    assert find(client({"data": [{"id": "qwen", "max_model_len": 32_768}]}), window=16_384).window == 16_384


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="pass --window N"):
        find(client({"data": [{"id": "gpt"}]}))
    with pytest.raises(ConfigurationError, match="has no model 'x': pass --model with one of a, b"):
        find(client({"data": [{"id": "a"}, {"id": "b"}]}), "x")
    with pytest.raises(ConfigurationError, match="has 2 models: pass --model"):
        find(client({"data": [{"id": "a"}, {"id": "b"}]}))
    with pytest.raises(BackendProtocolError, match="answered 404"):
        find(client({}, status=404))
    with pytest.raises(BackendProtocolError, match="did not answer a list of models"):
        find(client(["html"]))


def test_nobody_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(BackendUnreachableError, match="is the server running there"):
        find(httpx.Client(transport=httpx.MockTransport(refuse)))
