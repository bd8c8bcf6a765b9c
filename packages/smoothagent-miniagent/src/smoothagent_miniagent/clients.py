"""Mini-Agent's LLM clients, known by their shapes: what they send, where to, and how to be part of it.

Nothing of Mini-Agent is imported and nothing of an object of the user's is changed: a request goes through a copy of
the client whose transport is ours. Shapes are those of ``mini_agent/llm/`` (commit d76a4f6).
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from smoothagent import ConfigurationError, Prompt
from smoothagent.prompt import prompt_of

Create = Callable[..., Awaitable[Any]]
"""The method of a vendor's client that makes a request."""


class Kind(Enum):
    """Whose API a client speaks."""

    OPENAI = ("chat", "completions", "create")
    ANTHROPIC = ("messages", "create")
    OTHER = ()


class Server(NamedTuple):
    """How a client reaches its server."""

    url: str
    key: str
    headers: Mapping[str, str]


class Request(NamedTuple):
    """What a client sends besides messages.

    Attributes:
        params: the arguments of the vendor's ``create``.
        prompt: what of them shapes the tokens.
    """

    params: Mapping[str, Any]
    prompt: Prompt


def inner_of(llm: Any) -> Any:
    """The client that makes the requests: ``LLMClient`` has it inside; None where there is none of that kind."""
    for client in (getattr(llm, "_client", None), llm):
        if client is not None and hasattr(client, "_make_api_request") and hasattr(client, "client"):
            return client
    return None


def kind_of(llm: Any) -> Kind:
    """Whose API a client speaks."""
    inner = inner_of(llm)
    if inner is None:
        return Kind.OTHER
    return next((k for k in (Kind.OPENAI, Kind.ANTHROPIC) if callable(_at(inner.client, k.value))), Kind.OTHER)


def server_of(llm: Any) -> Server | None:
    """URL, key and headers of an OpenAI-compatible server; None where only the client object can reach it."""
    inner = inner_of(llm)
    if inner is None or type(inner.client).__name__ != "AsyncOpenAI":
        return None
    client = inner.client
    if not isinstance(client.api_key, str) or not client.api_key:  # one that is fetched anew is not ours to fetch
        return None
    own: Mapping[str, Any] = getattr(client, "_custom_headers", None) or {}
    headers = {str(k): str(v) for k, v in own.items() if k != "User-Agent"}
    return Server(str(client.base_url), client.api_key, headers)


def to_wire_of(llm: Any) -> Callable[[Any], dict[str, Any]] | None:
    """How a client for OpenAI's API writes one message; None for others."""
    if kind_of(llm) is not Kind.OPENAI:
        return None
    convert = inner_of(llm)._convert_messages

    def to_wire(native: Any) -> dict[str, Any]:
        written: Sequence[Mapping[str, Any]] = convert([native])[1]
        # Roles that it does not know it leaves out.
        return dict(written[0]) if written else {"role": native.role, "content": native.content}

    return to_wire


def request_of(llm: Any, tools: Sequence[Any] | None) -> Request:
    """What a client sends with these tools, besides messages: it is asked for a request that goes nowhere.

    Raises:
        ConfigurationError: it waits for something before it makes one.
    """
    sent: dict[str, Any] = {}

    async def nowhere(create: Create, params: dict[str, Any]) -> Any:
        del create
        sent.update(params)

    kind = kind_of(llm)
    if kind is Kind.OTHER:
        return Request({}, Prompt(model=_name(llm), tools=[_definition(tool) for tool in tools or ()]))
    inner = inner_of(rerouted(llm, nowhere))
    asking = inner._make_api_request(*([[], tools] if kind is Kind.OPENAI else [None, [], tools]))
    try:
        asking.send(None)
    except StopIteration:
        pass
    else:
        asking.close()
        raise ConfigurationError(f"{type(inner).__qualname__} waits for something before it makes a request")
    if kind is Kind.OPENAI:
        return Request(sent, prompt_of(sent))
    return Request(sent, Prompt(model=sent.get("model"), tools=[_definition(tool) for tool in tools or ()]))


def rerouted(llm: Any, through: Callable[[Create, dict[str, Any]], Awaitable[Any]], *, retries: bool = True) -> Any:
    """A copy of a client, each of whose requests is made by ``through``.

    Args:
        llm: a client of a known kind.
        through: gets the vendor's ``create`` and its arguments; returns what that returns.
        retries: whether the copy tries again as the client does.
    """
    kind, inner = kind_of(llm), inner_of(llm)
    create: Create = _at(inner.client, kind.value)

    async def made(**params: Any) -> Any:
        return await through(create, params)

    own = copy.copy(inner)
    own.client = _Via(inner.client, kind.value, made)
    if not retries:
        own.retry_config, own.retry_callback = SimpleNamespace(enabled=False), None
    if inner is llm:
        return own
    outer = copy.copy(llm)
    outer._client = own
    return outer


class _Via:
    """An object with another method at a path; all else is the object's own."""

    def __init__(self, real: Any, path: Sequence[str], method: Any) -> None:
        self._real, self._path, self._method = real, path, method

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._real, name)
        if name != self._path[0]:
            return own
        return self._method if len(self._path) == 1 else _Via(own, self._path[1:], self._method)


def with_extras(params: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """A request's arguments, marked as `smoothagent.MainRequest` says; what the client says itself stays."""
    merged = {**extras, **params}
    for name in ("extra_body", "extra_headers"):
        if extras.get(name) and params.get(name):
            merged[name] = {**extras[name], **params[name]}
    return merged


def limited(llm: Any, params: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """A request's arguments for an answer of at most so many tokens."""
    model = str(params.get("model") or "")
    newer = kind_of(llm) is Kind.OPENAI and model.startswith(("o1", "o3", "o4", "gpt-5"))
    return {**params, "max_completion_tokens" if newer else "max_tokens": tokens}


def _at(root: Any, path: Sequence[str]) -> Any:
    for name in path:
        root = getattr(root, name, None)
    return root


def _name(llm: Any) -> str | None:
    model = getattr(llm, "model", None)
    return model if isinstance(model, str) else None


def _definition(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form: Mini-Agent's own objects have a method for it, its ACP server gives Anthropic's form."""
    if not isinstance(tool, dict):
        return dict(tool.to_openai_schema())
    given = cast("dict[str, Any]", tool)
    if given.get("type") == "function":
        return given
    function = {k: v for k, v in given.items() if k != "input_schema"}
    return {"type": "function", "function": {**function, "parameters": given.get("input_schema")}}
