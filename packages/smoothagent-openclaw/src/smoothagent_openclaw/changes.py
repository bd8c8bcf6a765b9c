"""What of OpenClaw's configuration is changed so that its contexts are ours to keep in bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from smoothagent import ConfigurationError
from smoothagent_openclaw.document import MISSING, Document
from smoothagent_openclaw.places import Original
from smoothagent_openclaw.plugin import ID

API = "openai-completions"
"""The API that the gateway speaks."""
WINDOW = 100_000_000
"""Tokens of a model's context that OpenClaw is told. What is in bounds is what the gateway sends: with the real window
OpenClaw would compact, flush its memory or give up, by a history that no model gets (openclaw.md)."""
_SHARE = 0.75
_COMPACTION = ("agents", "defaults", "compaction")


class Route(NamedTuple):
    """A provider whose requests are to go through the gateway.

    Attributes:
        provider: its name.
        model: of its models, the one that agents use first.
        upstream: its API.
        window: tokens of the model's context.
        answer: tokens of its answers at most.
        windows: where the windows of its models stand.
    """

    provider: str
    model: str
    upstream: str
    window: int
    answer: int
    windows: list[list[str | int]]

    @property
    def hard(self) -> int:
        """Tokens at which contexts are summarized: what a summary and its warming may take is left free."""
        return max(1, min(int(_SHARE * self.window), self.window - 2 * self.answer))


def route_in(document: Document, provider: str | None) -> Route:
    """The provider of the agents' first model, or the one that is given.

    Raises:
        ConfigurationError: it is none whose requests could go through the gateway.
    """
    first = _first_model(document)
    name, model = (provider, None) if provider is not None else _parted(first)
    known = document.get(["models", "providers"])
    providers = cast("dict[str, Any]", known) if isinstance(known, dict) else {}
    if name not in providers:
        there = ", ".join(providers) or "none"
        raise ConfigurationError(
            f"the provider {name!r} of {first!r} is not in models.providers (there: {there}): its API is not "
            "configured here, so that it cannot be changed; add one with api openai-completions, or pass --provider"
        )
    told: dict[str, Any] = providers[name] if isinstance(providers[name], dict) else {}
    api, url = told.get("api"), told.get("baseUrl")
    if api != API:
        raise ConfigurationError(f"the provider {name!r} has the api {api!r}: the gateway speaks {API} alone")
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https"):
        raise ConfigurationError(f"the provider {name!r} has the baseUrl {url!r}: it must be a URL")
    listed = told.get("models")
    models = cast("list[dict[str, Any]]", listed) if isinstance(listed, list) else []
    own = first.partition("/")[2] if model is None and first.startswith(f"{name}/") else model
    chosen = next((m for m in models if m.get("id") == own), models[0] if models else None)
    if chosen is None or not isinstance(chosen.get("contextWindow"), int):
        raise ConfigurationError(
            f"the model {own!r} of the provider {name!r} has no contextWindow in models.providers.{name}.models: add it"
        )
    answer = chosen.get("maxTokens")
    windows: list[list[str | int]] = [
        ["models", "providers", name, "models", i, "contextWindow"] for i in range(len(models))
    ]
    return Route(
        name, str(chosen["id"]), url, chosen["contextWindow"], answer if isinstance(answer, int) else 0, windows
    )


class Plugin(NamedTuple):
    """Our plugin, as OpenClaw is told of it.

    Attributes:
        folder: where it lies.
        provider: the provider whose requests it marks; None for none.
    """

    folder: str
    provider: str | None


def changed(
    document: Document, route: Route, gateway: str, plugin: Plugin | None = None
) -> tuple[Document, list[Original]]:
    """The configuration with which a provider's requests go through a gateway, and what it had before.

    Args:
        document: the configuration.
        route: the provider.
        gateway: the gateway's API.
        plugin: loaded by OpenClaw.
    """
    wanted: list[tuple[list[str | int], Any]] = [
        (["models", "providers", route.provider, "baseUrl"], gateway),
        *((path, WINDOW) for path in route.windows),
        ([*_COMPACTION, "enabled"], False),
        ([*_COMPACTION, "memoryFlush", "enabled"], False),
    ]
    originals = list[Original]()
    lists = list[tuple[list[str | int], Any]]()
    if plugin is not None:
        told = {"gateway": gateway.removesuffix("/v1"), **({"provider": plugin.provider} if plugin.provider else {})}
        wanted.append(([*_COMPACTION, "provider"], ID))
        wanted.append((["plugins", "entries", ID], {"enabled": True, "config": told}))
        lists.append((["plugins", "load", "paths"], plugin.folder))
        if isinstance(document.get(["plugins", "allow"]), list):  # then what is not in it is not loaded
            lists.append((["plugins", "allow"], ID))
    for path, item in lists:
        there = document.get(path)
        if not isinstance(there, list) or item not in there:
            originals.append(Original(path, there is not MISSING, None, item, item=True))
            document = document.append(path, item)
    for path, value in wanted:
        before = document.get(path)
        if before != value:
            originals.append(Original(path, before is not MISSING, None if before is MISSING else before, value))
            document = document.set(path, value)
    return document, originals


def restored(document: Document, originals: list[Original]) -> tuple[Document, list[str]]:
    """The configuration with what was changed put back, and what was left since its user has changed it again."""
    left = list[str]()
    for original in reversed(originals):
        now = document.get(original.path)
        if original.item:
            document = _without_item(document, original)
            continue
        if now is MISSING and not original.existed:
            continue
        if now != original.written:
            left.append(".".join(map(str, original.path)))
        elif original.existed:
            document = document.set(original.path, original.value)
        else:
            document = document.remove(original.path)
            document = _without_empty(document, original.path[:-1])
    return document, left


def _without_item(document: Document, original: Original) -> Document:
    """Without a value that was added to a list; without the list where that was made for it."""
    now = document.get(original.path)
    items = cast("list[Any]", now) if isinstance(now, list) else []
    if original.written in items:
        document = document.remove([*original.path, items.index(original.written)])
        if not original.existed and document.get(original.path) == []:
            document = _without_empty(document.remove(original.path), original.path[:-1])
    return document


def _without_empty(document: Document, path: list[str | int]) -> Document:
    """Without the objects that only held what was taken out."""
    while path and document.get(path) == {}:
        document, path = document.remove(path), path[:-1]
    return document


def _first_model(document: Document) -> str:
    told = document.get(["agents", "defaults", "model"])
    if isinstance(told, Mapping):
        told = cast("Mapping[str, Any]", told).get("primary", MISSING)
    if not isinstance(told, str) or "/" not in told:
        raise ConfigurationError(
            "agents.defaults.model.primary names no model as provider/model: set it, or pass --provider"
        )
    return told


def _parted(name: str) -> tuple[str, str]:
    provider, _, model = name.partition("/")
    return provider, model
