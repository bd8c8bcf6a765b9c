"""The core's strategies by the names that a file or a command line has for them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from smoothagent import (
    ConfigurationError,
    CutStrategy,
    KeepRecent,
    LookaheadStrategy,
    Offload,
    OffloadStore,
    Pipeline,
    SlidingWindow,
    Summarize,
)

KINDS: dict[str, type[CutStrategy]] = {
    "offload": Offload,
    "keep-recent": KeepRecent,
    "sliding-window": SlidingWindow,
    "summarize": Summarize,
}
"""`Isolate` is not among them: of a sub-agent nothing passes here before it begins."""


def strategy_of(
    tables: Sequence[Mapping[str, Any]], store: OffloadStore | None
) -> tuple[Callable[[], LookaheadStrategy], OffloadStore | None]:
    """What makes a strategy of tables ``{"kind": "summarize", "hard": 24000, …}``; several are a pipeline.

    Args:
        tables: each with its kind and the arguments of its class.
        store: for `Offload`.

    Returns:
        The factory, and the store, where one is needed.

    Raises:
        ConfigurationError: an unknown kind or argument, or an impossible value.
    """
    if not tables:
        raise ConfigurationError("the pipeline of strategies is empty: name at least one")
    if any(table.get("kind") == "offload" for table in tables):
        store = store or OffloadStore()
    checked = [_checked(table, store) for table in tables]

    def make() -> LookaheadStrategy:
        stages = [cls(**arguments) for cls, arguments in checked]
        return stages[0] if len(stages) == 1 else Pipeline(*stages)

    make()  # impossible values are told now
    return make, store


def _checked(table: Mapping[str, Any], store: OffloadStore | None) -> tuple[type[CutStrategy], dict[str, Any]]:
    given = dict(table)
    kind = given.pop("kind", None)
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ConfigurationError(f"strategy kind {kind!r}: choose from {', '.join(KINDS)}")
    if cls is Offload:
        given["store"] = store
    known = inspect.signature(cls).parameters
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ConfigurationError(f"strategy {kind}: unknown arguments {', '.join(unknown)}: use {', '.join(known)}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in given]
    if missing:
        raise ConfigurationError(f"strategy {kind}: it needs {', '.join(missing)}")
    for name, value in given.items():
        wanted = _type_of(known[name].annotation)
        if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
            raise ConfigurationError(f"strategy {kind}: {name}={value!r}: it must be of type {wanted.__name__}")
    return cls, given


def _type_of(annotation: object) -> type | None:
    """The type of an argument as its signature says it, where that is a plain one."""
    names = {"int": int, "int | None": int, "bool": bool, "str": str}
    return cast("type | None", names.get(str(annotation)))


def made_with(strategy: LookaheadStrategy, upstream: str) -> str:
    """A digest of what a commit depends on besides its history: the strategy, its limits and store, and the server."""
    return hashlib.sha256(json.dumps([upstream, _described(strategy)], sort_keys=True).encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    if isinstance(value, LookaheadStrategy):
        plain = {k: _described(v) for k, v in vars(value).items() if not k.startswith("_") and k not in ("main", "la")}
        return {"class": type(value).__qualname__, **{k: v for k, v in plain.items() if v is not None}}
    if isinstance(value, tuple | list):
        return [_described(v) for v in cast("Sequence[Any]", value)]
    if isinstance(value, OffloadStore):
        return value.location
    return value if isinstance(value, str | int | float | bool) else None
