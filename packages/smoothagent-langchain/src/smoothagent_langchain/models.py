"""From a chat model object to the backend that works ahead on its server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from smoothagent import Backend
from smoothagent.serving.shared import shared_backend
from smoothagent_langchain.aside import AsideBackend
from smoothagent_langchain.codec import ToWire, openai_form
from smoothagent_langchain.routed import unrouted

_ONLY_ITS_OWN = ("http_client", "http_async_client", "openai_proxy", "default_query")
"""Fields of a model that change how its server is reached: only the model object itself can."""


def backend_for(model: BaseChatModel, *, warm: bool | None = None) -> Backend:
    """The backend for a chat model's server; one a server, shared by all who use it in this process.

    An OpenAI-compatible model (``ChatOpenAI`` and its subclasses on Chat Completions) is worked for over the official
    client with the model's own URL, key and headers, and with the bodies the model itself makes (`to_wire_of`): so
    slots, priorities and pacing are used where the server has them. For any other model the transformation alone runs
    ahead, unless ``warm`` is True: then it is also asked for one token, through the model object.

    Args:
        model: the agent's model.
        warm: prefill ahead. None: where it costs nothing but time, that is, not at hosted endpoints.
    """
    model = unrouted(model)
    server = _server_of(model)
    if server is None:
        return AsideBackend(model, warm=bool(warm))
    url, key, headers = server
    return shared_backend(url, key, headers, warm=warm)


def given_for(backend: Backend | None, model: BaseChatModel) -> Backend | None:
    """The backend that the user gave, if it is of the model's server; an agent may also call models elsewhere."""
    url = getattr(backend, "base_url", None)
    theirs = url_of(model)
    if url is not None and not speaks_chat(model):
        return None
    same = url is None or theirs is None or url.rstrip("/") == theirs.rstrip("/")
    return backend if same else None


def url_of(model: BaseChatModel) -> str | None:
    """The URL of a model's server, whichever client it is reached with; None where it does not tell."""
    url = getattr(getattr(model, "root_async_client", None), "base_url", None)
    return None if url is None else str(url)


def to_wire_of(model: BaseChatModel) -> ToWire:
    """How a model writes one message of its request body."""
    make = getattr(model, "_get_request_payload", None)
    if make is None or not speaks_chat(model):
        return openai_form

    def to_wire(message: BaseMessage) -> dict[str, Any]:
        return dict(make([message])["messages"][0])

    return to_wire


def same_model(a: BaseChatModel, b: BaseChatModel) -> bool:
    """Whether two objects are one model on one server, so that one's prompts are warm for the other."""
    if a is b:
        return True
    if name_of(a) != name_of(b):
        return False
    server, other = _server_of(a), _server_of(b)
    if server is None or other is None:
        # Behind clients of the user's own; what those add cannot be seen.
        client = getattr(unrouted(a), "root_async_client", None)
        return server is other and client is not None and client is getattr(unrouted(b), "root_async_client", None)
    return server == other


def answers_in_place(model: BaseChatModel, backend: Backend | None = None) -> bool:
    """Whether a question can be put at the end of the conversation: its server is reached with its own prompt."""
    if given_for(backend, model) is not None:
        return speaks_chat(model)
    return _server_of(model) is not None


def speaks_chat(model: BaseChatModel) -> bool:
    """Whether a model speaks OpenAI's Chat Completions."""
    responses = getattr(model, "_use_responses_api", None)
    # Other models (ChatAnthropic) have a payload of that name, too, with another content.
    openai = hasattr(model, "_get_request_payload") and hasattr(model, "root_async_client")
    return openai and not (responses is not None and responses({}))


def name_of(model: BaseChatModel) -> str | None:
    """The model's name as its server knows it."""
    name = getattr(model, "model_name", None) or getattr(model, "model", None)
    return name if isinstance(name, str) else None


def _server_of(model: BaseChatModel) -> tuple[str, str, Mapping[str, str]] | None:
    """URL, key and headers of an OpenAI-compatible Chat Completions server; None where it is none we may reach.

    Not one behind the user's own HTTP client (a proxy, client certificates), which only the model object can use,
    nor one whose key is made anew for each call.
    """
    client = getattr(model, "root_async_client", None)
    if client is None or not speaks_chat(model) or type(client).__name__ != "AsyncOpenAI":
        return None
    if any(getattr(model, field, None) for field in _ONLY_ITS_OWN):
        return None
    key = getattr(client, "api_key", None)
    if not isinstance(key, str) or not key or callable(getattr(model, "openai_api_key", None)):
        return None
    headers = {k: v for k, v in dict(getattr(client, "_custom_headers", {})).items() if isinstance(v, str)}
    more: dict[str, Any] = getattr(model, "model_kwargs", None) or {}
    headers |= {k: v for k, v in dict(more.get("extra_headers") or {}).items() if isinstance(v, str)}
    for field, header in (("organization", "OpenAI-Organization"), ("project", "OpenAI-Project")):
        if isinstance(value := getattr(client, field, None), str):
            headers.setdefault(header, value)
    return str(client.base_url), key, headers
