"""Telling the server of the agent's own call: its slot, its priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel

from smoothagent.wrap import merged

_CLIENTS = ("client", "async_client", "root_client", "root_async_client")
_CALLS = frozenset({"create", "parse", "stream"})
_INSIDE = frozenset({"beta", "chat", "completions", "with_raw_response"})


class Routed:
    """An openai client, or a part of one, whose requests carry more."""

    def __init__(self, target: Any, extras: Mapping[str, Any]) -> None:
        self._target, self._extras = target, extras

    @property
    def target(self) -> Any:
        """The client itself."""
        return self._target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in _INSIDE:
            return Routed(value, self._extras)
        return self._with_extras(value) if name in _CALLS else value

    def _with_extras(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **merged(kwargs, dict(self._extras)))

        return called


def unrouted(model: BaseChatModel) -> BaseChatModel:
    """The model as it was before `routed`: the way there is one call's, and no part of it."""
    clients = {name: getattr(model, name, None) for name in _CLIENTS}
    found: dict[str, Any] = {}
    for name, client in clients.items():
        while isinstance(client, Routed):
            client = found[name] = client.target
    return model.model_copy(update=found) if found else model


def routed(model: BaseChatModel, extras: Mapping[str, Any]) -> BaseChatModel:
    """The model with clients that add ``extras`` to each request; the user's own values win.

    In the clients and not in the model's fields: those are the key of the user's LLM cache and stand in traces. And on
    the model, not in the call's settings, which a fallback model would get too.
    """
    if not extras:
        return model
    clients = {name: getattr(model, name, None) for name in _CLIENTS}
    return model.model_copy(update={k: Routed(v, extras) for k, v in clients.items() if v is not None})
