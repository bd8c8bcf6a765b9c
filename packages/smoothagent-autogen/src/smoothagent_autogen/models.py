"""From a model client to the backend that works ahead on its server."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autogen_core.models import ChatCompletionClient, LLMMessage, SystemMessage, UserMessage
from autogen_core.tools import Tool, ToolSchema

from smoothagent import Backend, Prompt
from smoothagent.prompt import prompt_of
from smoothagent.serving.shared import shared_backend
from smoothagent_autogen.aside import AsideBackend, inner_of, seen_by
from smoothagent_autogen.codec import AutoGenCodec, ToWire, openai_form

OPENAI = "autogen_ext.models.openai._openai_client"
"""The module of AutoGen's client for Chat Completions."""


class ServerOf(NamedTuple):
    """How a model client reaches its server."""

    url: str
    key: str
    headers: Mapping[str, str]


def backend_for(client: ChatCompletionClient, *, warm: bool | None = None) -> Backend:
    """The backend for a model client's server; one a server, shared by all who use it in this process.

    AutoGen's OpenAI client is worked for over the official one with its own URL, key and headers, and with the bodies
    that it makes itself (`to_wire_of`, `prompt_for`): so slots, priorities and pacing are used where the server has
    them. For any other the transformation alone runs ahead, unless ``warm`` is True: then it is also asked for one
    token, through the object.

    Args:
        client: the agent's.
        warm: prefill ahead. None: where it costs nothing but time, that is, not at hosted endpoints.
    """
    server = server_of(client)
    if server is None:
        return AsideBackend(client, warm=bool(warm))
    return shared_backend(server.url, server.key, server.headers, warm=warm)


def given_for(backend: Backend | None, client: ChatCompletionClient) -> Backend | None:
    """The backend that the user gave, if it is of the client's server."""
    url, server = getattr(backend, "base_url", None), server_of(client)
    if url is None:
        return backend
    return backend if server is not None and url.rstrip("/") == server.url.rstrip("/") else None


def server_of(client: ChatCompletionClient) -> ServerOf | None:
    """URL, key and headers of an OpenAI-compatible server; None where it is none we may reach.

    Not Azure's, and not one behind the user's own HTTP client, which only the client object can use.
    """
    if not speaks_chat(client):
        return None
    own: Any = inner_of(client)
    openai: Any = own.__dict__.get("_client")
    if openai is None or type(openai).__name__ != "AsyncOpenAI":
        return None
    if dict(getattr(own, "_raw_config", None) or {}).get("http_client") is not None:
        return None
    url, key = str(openai.base_url), openai.api_key
    if not isinstance(key, str) or not key:  # one that is fetched anew is not ours to fetch
        return None
    headers = {str(k): str(v) for k, v in dict(getattr(openai, "_custom_headers", None) or {}).items()}
    headers.pop("User-Agent", None)
    return ServerOf(url, key, headers)


def speaks_chat(client: ChatCompletionClient) -> bool:
    """Whether a client's requests are made by AutoGen's own OpenAI client."""
    made = type(inner_of(client))
    base = next(
        (c for c in made.__mro__ if c.__module__ == OPENAI and c.__name__ == "BaseOpenAIChatCompletionClient"), None
    )
    name = "_process_create_args"
    return base is not None and getattr(made, name, None) is getattr(base, name, None)


def to_wire_of(client: ChatCompletionClient) -> ToWire:
    """How a model client writes one message of its request body."""
    if not speaks_chat(client):
        return openai_form
    own: Any = inner_of(client)
    # There, since the client's class is; who uses other clients need not have it.
    to_oai_type = importlib.import_module(OPENAI).to_oai_type
    merges = not own.model_info.get("multiple_system_messages", False)

    def to_wire(message: LLMMessage) -> dict[str, Any]:
        if merges and isinstance(message, SystemMessage):
            message = SystemMessage(content=message.content.rstrip())
        written: list[Any] = list(
            to_oai_type(
                seen_by(client, [message])[0],
                prepend_name=own._add_name_prefixes,
                model=own._create_args.get("model", "unknown"),
                model_family=own._model_info["family"],
                include_name_in_message=own._include_name_in_message,
            )
        )
        # Claude's form leaves out what is empty.
        return dict(written[0]) if written else AutoGenCodec().decode(message).wire()

    return to_wire


def prompt_for(client: ChatCompletionClient, call: Mapping[str, Any], system: str | None = None) -> Prompt:
    """What of a call shapes the tokens besides its messages: the client's own settings, and what the call adds.

    Args:
        client: the client.
        call: the keyword arguments of its ``create``.
        system: what stands before the conversation.
    """
    tools: Sequence[Tool | ToolSchema] = call.get("tools") or ()
    extra: Mapping[str, Any] = call.get("extra_create_args") or {}
    if speaks_chat(client):
        own: Any = inner_of(client)
        # Some forms look at the last message.
        any_message = [UserMessage(content="-", source="user")]
        made = own._process_create_args(any_message, tools, call.get("tool_choice", "auto"), None, extra)
        params = {**made.create_args, "tools": list(made.tools)}
    else:
        params = {"model": name_of(client), **extra, "tools": [_definition(tool) for tool in tools]}
    prompt = prompt_of(params)
    return Prompt(model=prompt.model, system=system, tools=prompt.tools, params=prompt.params)


def _definition(tool: Tool | ToolSchema) -> dict[str, Any]:
    schema = tool.schema if isinstance(tool, Tool) else tool
    return {"type": "function", "function": dict(schema)}


def same_model(a: ChatCompletionClient, b: ChatCompletionClient) -> bool:
    """Whether two objects are one model on one server, so that one's prompts are warm for the other."""
    if inner_of(a) is inner_of(b):
        return True
    server = server_of(a)
    return server is not None and server == server_of(b) and name_of(a) == name_of(b)


def name_of(client: ChatCompletionClient) -> str | None:
    """The model's name as its server knows it."""
    own: Any = inner_of(client)
    name = dict(getattr(own, "_create_args", None) or {}).get("model")
    return name if isinstance(name, str) else None
