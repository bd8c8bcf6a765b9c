"""From an LLM object to the backend that works ahead on its server."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.tools import BaseTool

from smoothagent import Backend, Prompt
from smoothagent.prompt import prompt_of
from smoothagent.serving.shared import shared_backend
from smoothagent_llamaindex.aside import AsideBackend
from smoothagent_llamaindex.codec import ToWire, openai_form

_OPENAI = "llama_index.llms.openai.base"
"""The module of LlamaIndex's own LLM for Chat Completions, which most others are made of."""
_ITS_OWN = ("_get_client", "_get_aclient", "_chat", "_achat", "_stream_chat", "_astream_chat")
"""Where a class that overrides one of these, its requests are not those that we would make."""


class ServerOf(NamedTuple):
    """How an LLM reaches its server."""

    url: str
    key: str
    headers: Mapping[str, str]


def backend_for(llm: LLM, *, warm: bool | None = None) -> Backend:
    """The backend for an LLM's server; one a server, shared by all who use it in this process.

    An OpenAI-compatible LLM (``OpenAI``, ``OpenAILike`` and what is made of them, on Chat Completions) is worked for
    over the official client with the LLM's own URL, key and headers, and with the bodies that the LLM itself makes
    (`to_wire_of`, `prompt_for`): so slots, priorities and pacing are used where the server has them. For any other the
    transformation alone runs ahead, unless ``warm`` is True: then it is also asked for one token, through the object.

    Args:
        llm: the agent's.
        warm: prefill ahead. None: where it costs nothing but time, that is, not at hosted endpoints.
    """
    server = server_of(llm)
    if server is None:
        return AsideBackend(llm, warm=bool(warm))
    return shared_backend(server.url, server.key, server.headers, warm=warm)


def given_for(backend: Backend | None, llm: LLM) -> Backend | None:
    """The backend that the user gave, if it is of the LLM's server."""
    url, server = getattr(backend, "base_url", None), server_of(llm)
    if url is None:
        return backend
    return backend if server is not None and url.rstrip("/") == server.url.rstrip("/") else None


def server_of(llm: LLM) -> ServerOf | None:
    """URL, key and headers of an OpenAI-compatible Chat Completions server; None where it is none we may reach.

    Not one behind the user's own client (a proxy, client certificates), which only the LLM object can use.
    """
    if not speaks_chat(llm):
        return None
    own: Any = llm
    if own._http_client is not None or own._async_http_client is not None:
        return None
    url, key = str(own.api_base or ""), str(own.api_key or "")
    for client in (own._aclient, own._client):
        # One that the user gave may lead elsewhere.
        theirs = getattr(client, "base_url", url)
        if str(theirs).rstrip("/") != url.rstrip("/") or getattr(client, "api_key", key) not in (key, None, ""):
            return None
    if not url or not key:
        return None
    headers = {str(k): str(v) for k, v in dict(own.default_headers or {}).items()}
    more: dict[str, Any] = dict(own.additional_kwargs or {})
    headers |= {str(k): str(v) for k, v in dict(more.get("extra_headers") or {}).items()}
    return ServerOf(url, key, headers)


def speaks_chat(llm: LLM) -> bool:
    """Whether an LLM's calls are those of LlamaIndex's own OpenAI class, to Chat Completions."""
    openai = next((c for c in type(llm).__mro__ if c.__module__ == _OPENAI and c.__name__ == "OpenAI"), None)
    if openai is None or not llm.metadata.is_chat_model:
        return False
    return all(getattr(type(llm), name, None) is getattr(openai, name, None) for name in _ITS_OWN)


def to_wire_of(llm: LLM) -> ToWire:
    """How an LLM writes one message of its request body."""
    if not speaks_chat(llm):
        return openai_form
    # There, since the LLM's class is; who uses other LLMs need not have it.
    to_openai_message_dict = importlib.import_module("llama_index.llms.openai.utils").to_openai_message_dict
    model = getattr(llm, "model", None)

    def to_wire(message: ChatMessage) -> dict[str, Any]:
        return dict(to_openai_message_dict(message, model=model))

    return to_wire


def prompt_for(llm: LLM, params: Mapping[str, Any]) -> Prompt:
    """What of a call shapes the tokens besides its messages: the LLM's own settings, and what the call adds.

    Args:
        llm: the LLM.
        params: the keyword arguments of its ``chat``.
    """
    if speaks_chat(llm):
        own: Any = llm
        return prompt_of(own._get_model_kwargs(**params))
    return prompt_of({"model": name_of(llm), **params, "tools": _as_mappings(params.get("tools"))})


def _as_mappings(tools: object) -> list[dict[str, Any]]:
    """Whatever an LLM calls its tools, as the core reads them: by name."""
    made: list[dict[str, Any]] = []
    if isinstance(tools, Mapping):  # Bedrock's
        tools = tools.get("tools")
    for tool in tools if isinstance(tools, (list, tuple)) else ():
        if isinstance(tool, Mapping):
            made.append(dict(tool.get("toolSpec", tool)))
        elif isinstance(tool, BaseTool):
            made.append(tool.metadata.to_openai_tool(skip_length_check=True))
        else:  # Google's declare several functions in one
            declared = getattr(tool, "function_declarations", None) or [tool]
            made += [{"name": str(getattr(one, "name", one)), "definition": repr(one)} for one in declared]
    return made


def same_model(a: LLM, b: LLM) -> bool:
    """Whether two objects are one model on one server, so that one's prompts are warm for the other."""
    if a is b:
        return True
    if name_of(a) != name_of(b):
        return False
    server = server_of(a)
    return server is not None and server == server_of(b)


def name_of(llm: LLM) -> str | None:
    """The model's name as its server knows it."""
    name = getattr(llm, "model", None) or llm.metadata.model_name
    return name if isinstance(name, str) else None
