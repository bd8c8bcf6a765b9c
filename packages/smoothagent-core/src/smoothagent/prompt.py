"""What else shapes the tokens of a request, besides its messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHAPING = (
    *("tool_choice", "parallel_tool_calls", "response_format", "reasoning", "reasoning_effort", "functions"),
    *("chat_template_kwargs", "extra_body", "temperature", "top_p", "seed"),
)
"""Request fields that shape the tokens, or the summary; others (metadata, stop words) may differ from call to call."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything but the messages that decides a request's tokens.

    A prepared result is bound to it: with another model, system text or tools it is dropped.

    Attributes:
        model: the model's name as the server knows it; None leaves it to the backend.
        system: a system text that the framework keeps apart from the messages; sent first.
        tools: OpenAI tool definitions, in the order sent.
        params: further request fields that shape tokens or routing (``chat_template_kwargs``,
            ``extra_body``, ``reasoning_effort``).
        volatile_tail: how many of the last messages a harness rewrites on every call; never warmed.
    """

    model: str | None = None
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    volatile_tail: int = 0

    def digest(self) -> str:
        """A hex digest of all fields but ``volatile_tail``."""
        raw = json.dumps([self.model, self.system, list(self.tools), dict(self.params)], sort_keys=True, default=repr)
        return hashlib.sha256(raw.encode()).hexdigest()[:32]


def prompt_of(params: Mapping[str, Any], added: Mapping[str, Any] | None = None) -> Prompt:
    """What of a Chat Completions call's parameters shapes the tokens.

    Args:
        params: the call's parameters, as the openai client takes them.
        added: what was put into ``extra_body`` to route the call; no part of the prompt.
    """
    added = added or {}
    shaping = {k: params[k] for k in SHAPING if params.get(k) is not None}
    if shaping.get("tool_choice") != "none":
        # Which tool has to be called is no part of the tokens; only without any may a template leave them all out.
        shaping.pop("tool_choice", None)
    extra = dict(shaping.pop("extra_body", None) or {})
    extra = {k: v for k, v in extra.items() if k not in added or added[k] != v}
    if extra:
        shaping["extra_body"] = extra
    return Prompt(model=name_in(params), tools=list(params.get("tools") or ()), params=shaping)


def name_in(params: Mapping[str, Any]) -> str | None:
    """The model's name in a call's parameters."""
    name = params.get("model") or params.get("model_name")
    return name if isinstance(name, str) and name else None
