"""What else shapes the tokens of a request, besides its messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
