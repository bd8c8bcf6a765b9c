"""A server of the user's own: is it there, what does it serve, how large is its window?"""

from __future__ import annotations

from typing import Any, cast

import httpx

from smoothagent.errors import BackendProtocolError, BackendUnreachableError, ConfigurationError
from smoothagent_bench.run import Server

WINDOW_FIELDS = ("max_model_len", "context_length", "context_window")
"""What servers call a model's window in ``/v1/models``: vLLM and SGLang, then others."""


def find_server(
    base_url: str,
    model: str | None,
    *,
    api_key: str = "none",
    window: int | None = None,
    lookahead_url: str | None = None,
    client: httpx.Client | None = None,
) -> Server:
    """Ask a server what it has.

    Args:
        base_url: its URL; ``/v1`` is added if missing.
        model: the model to use; None: the only one it has.
        api_key: what it asks for.
        window: tokens of context; None: what it says.
        lookahead_url: a second server, for the lookahead work.
        client: for tests.

    Raises:
        BackendUnreachableError: nothing answers there.
        BackendProtocolError: what answers is no OpenAI-compatible server.
        ConfigurationError: it does not have the model, or does not say its window.
    """
    url = _with_v1(base_url)
    with client or httpx.Client(trust_env=False, timeout=20) as http:
        http.headers["Authorization"] = f"Bearer {api_key}"
        entry = _choose(_models(http, url), model, url)
        props = _llama_cpp(http, url.removesuffix("/v1"))
        if lookahead_url is not None:
            _models(http, _with_v1(lookahead_url))  # one that is not there would be done without, and not be missed
    window = window or _window(entry, props)
    if window is None:
        raise ConfigurationError(f"{url} does not say how large the window of {entry['id']} is: pass --window N")
    side = None if lookahead_url is None else _with_v1(lookahead_url)
    known = bool(props) or entry.get("owned_by") in ("llamacpp", "sglang", "vllm")

    def check() -> None:
        """One that has gone is done without by the agents, and its rows would be labelled as measured with it."""
        if side is not None:
            with httpx.Client(trust_env=False, timeout=20, headers={"Authorization": f"Bearer {api_key}"}) as http:
                _models(http, side)

    slots = int(props.get("total_slots", 0))
    return Server(url, str(entry["id"]), window, slots, api_key, side, full_length=known, check=check)


def _with_v1(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _models(http: httpx.Client, url: str) -> list[dict[str, Any]]:
    try:
        answer = http.get(f"{url}/models")
        answer.raise_for_status()
        data = answer.json()["data"]
    except httpx.TransportError as error:
        raise BackendUnreachableError(f"nothing answers at {url}: {error}; is the server running there?") from error
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"--base-url {url} is no URL: {error}") from error
    except httpx.HTTPStatusError as error:
        raise BackendProtocolError(
            f"{url}/models answered {error.response.status_code}: --base-url must be an OpenAI-compatible API, with /v1"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BackendProtocolError(
            f"{url}/models did not answer a list of models: is it an OpenAI-compatible API?"
        ) from error
    return [dict(entry) for entry in data]


def _choose(entries: list[dict[str, Any]], model: str | None, url: str) -> dict[str, Any]:
    names = [str(e.get("id")) for e in entries]
    if model is None and len(entries) == 1:
        return entries[0]
    for entry in entries:
        if model is not None and model == entry.get("id"):
            return entry
    have = ", ".join(names[:8]) or "none"
    wanted = f"{url} has no model {model!r}" if model is not None else f"{url} has {len(entries)} models"
    raise ConfigurationError(f"{wanted}: pass --model with one of {have}")


def _llama_cpp(http: httpx.Client, root: str) -> dict[str, Any]:
    """llama.cpp's properties; empty for any other server."""
    try:
        answer = http.get(f"{root}/props")
        data: object = answer.json() if answer.is_success else {}
    except (httpx.TransportError, ValueError):
        return {}
    return cast("dict[str, Any]", data) if isinstance(data, dict) and "total_slots" in data else {}


def _window(entry: dict[str, Any], props: dict[str, Any]) -> int | None:
    settings = cast("dict[str, Any]", props.get("default_generation_settings") or {})
    if isinstance(settings.get("n_ctx"), int):
        return int(settings["n_ctx"])
    for name in WINDOW_FIELDS:
        if isinstance(entry.get(name), int):
            return int(entry[name])
    return None
