"""vLLM: block-granular prefix cache, priorities with lower numbers first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smoothagent.errors import BackendProtocolError, BackendRefusedError, ConfigurationError, RateLimitedError
from smoothagent.serving import chat
from smoothagent.serving.backend import Caps
from smoothagent.serving.connection import Connection
from smoothagent.serving.dialects.base import Ask, Options, mapping, rows, whole
from smoothagent.serving.dialects.textual import Textual, named_priority, priority_below
from smoothagent.serving.others import Load

DEFAULT_PRIORITY = 0
DEFAULT_BLOCK = 16


class VLLM(Textual):
    """Dialect of vLLM."""

    server = "vllm"
    continues = True

    def __init__(self, link: Connection, options: Options, served: Sequence[str]) -> None:
        super().__init__(link, options, served)
        self.least = DEFAULT_BLOCK
        self._window: int | None = None
        self._priorities = True
        self._metrics = False

    async def probe(self) -> None:
        """Read window and cache settings; whether priorities are on only a request can tell."""
        if "version" not in mapping(await self.link.get("~/version")):
            raise BackendProtocolError(f"GET {self.link.root}/version names no vLLM version")
        models = rows(mapping(await self.link.get("/models")).get("data"))
        wanted = self.options.model
        if wanted is not None and wanted not in self.served:
            raise ConfigurationError(
                f"the server at {self.link.base_url} has no model {wanted!r}; it serves "
                + (", ".join(map(repr, self.served)) or "no model at all")
            )
        named = [m for m in models if wanted in (None, m.get("id"))]
        self._window = whole(named[0].get("max_model_len")) if named else None
        try:
            text = str(await self.link.get("~/metrics"))
        except BackendRefusedError:
            text = ""
        self._metrics = "vllm:num_requests_running" in text
        if not self._metrics:
            self.notes["blind"] = (
                "vLLM: no metrics, so other clients' requests are not seen when lookahead work is paced. Start "
                "without --disable-log-stats."
            )
        self._read_cache_settings(text)

    def _read_cache_settings(self, metrics: str) -> None:
        info = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
        settings = dict(re.findall(r'(\w+)="([^"]*)"', info.group(1))) if info else {}
        if settings.get("block_size", "").isdigit():
            self.least = max(1, int(settings["block_size"]))
        if settings.get("enable_prefix_caching") == "False":
            self.hits = False
            self.notes["cache"] = (
                "vLLM: prefix caching is off, so nothing can be warmed. Start with --enable-prefix-caching."
            )

    def caps(self) -> Caps:
        """What is known now."""
        notes = dict(self.notes)
        if self.reports_cached is False or (self.reports_cached is None and self.stats.prefills > 1):
            notes["report"] = (
                "vLLM: cached tokens were not reported where there should be some. Start with "
                "--enable-prompt-tokens-details; if that is set, see that prefix caching is on."
            )
        return Caps(
            server=self.server,
            prefill=self.options.warm is not False and self.hits,
            tokenize=True,
            cached_tokens=bool(self.reports_cached),
            window=self._window,
            notes=tuple(notes.values()),
        )

    async def load(self, own: int) -> Load | None:
        """Running and waiting requests out of the metrics; which of the running ones decode they do not tell."""
        if not self._metrics:
            return None
        text = str(await self.link.get("~/metrics"))
        running, waiting = (_gauge(text, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
        return Load(waiting=waiting, decoding=max(0, running - own))

    def marks(self, ask: Ask) -> dict[str, Any]:
        """A priority behind everyone else's, until the server refuses priorities."""
        if not self._priorities:
            return {}
        return {"priority": priority_below(named_priority(ask.prompt, DEFAULT_PRIORITY), low_first=True)}

    def open_ended(self, *, cut: bool) -> dict[str, Any]:
        """The generation prompt is left away, and a cut message stays open."""
        return {"add_generation_prompt": False, **({"continue_final_message": True} if cut else {})}

    def learn(self, error: BackendRefusedError) -> bool:
        """Priorities are refused unless the scheduler uses them."""
        if self._priorities and "priority" in error.words.lower():
            self._priorities = False
            self.notes["priority"] = (
                "vLLM: priorities are off, so lookahead work is only paced from here. Start with "
                "--scheduling-policy priority."
            )
            return True
        return super().learn(error)

    async def count(self, ask: Ask) -> int | None:
        """``/tokenize`` with messages."""
        fields = chat.fields(ask.prompt, sampling=False)
        body = {**fields, "model": self.model(ask.prompt), "messages": list(ask.messages)}
        try:
            return whole((await self.link.post("~/tokenize", body)).get("count"))
        except RateLimitedError:
            raise
        except BackendRefusedError:
            return None


def _gauge(metrics: str, name: str) -> int:
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", metrics, re.MULTILINE)
    return int(sum(map(float, values)))
