"""What the gateway tells of itself: Prometheus metrics, and the state that its page shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PromCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smoothagent import Ledger
from smoothagent_gateway.sessions import Sessions, Turn

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288)
_SHOWN = 64
"""Conversations that the page shows, the newest."""
_TOKENS = {
    "prefilled_tokens": "Prompt tokens computed ahead",
    "reused_tokens": "Prompt tokens of lookahead requests that the server had cached",
    "generated_tokens": "Tokens of summaries written ahead",
    "wasted_tokens": "Tokens computed ahead that no commit used",
    "saved_tokens": "Prompt tokens that a commit found computed",
    "saved_output_tokens": "Tokens of summaries that a commit found written",
    "mispredictions": "Lookaheads that the conversation did not go on with",
    "failures": "Lookaheads that failed",
}
"""Counts of `smoothagent.LedgerSnapshot`."""


class Figures:
    """Counts over all conversations.

    Args:
        sessions: those there are.
        ledger: what lookahead cost and saved in all of them.
    """

    def __init__(self, sessions: Sessions, ledger: Ledger) -> None:
        self._sessions, self._ledger = sessions, ledger
        self.registry = CollectorRegistry()
        self.open = 0
        self.commits = Counter[str]()
        prefix = "smoothagent_gateway"
        self._requests = PromCounter(
            f"{prefix}_requests", "Requests, by what they were", ["kind", "status"], registry=self.registry
        )
        self._ttft = Histogram(
            f"{prefix}_ttft_seconds",
            "From a completion's arrival to the first that the model said; whole is its end, of one that is no stream",
            ["commit", "answer"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._held = Histogram(
            f"{prefix}_held_seconds",
            "From a completion's arrival until it was sent on",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._context = Histogram(
            f"{prefix}_context_tokens",
            "Prompt tokens of completions, as the server counts them",
            ["commit"],
            buckets=_SIZES,
            registry=self.registry,
        )
        self._cached = PromCounter(
            f"{prefix}_cached_tokens", "Prompt tokens that the server found in its cache", registry=self.registry
        )
        self.registry.register(_Now(self))

    def request(self, kind: str, status: int) -> None:
        """One was answered."""
        self._requests.labels(kind, str(status)).inc()

    def sent(self, seconds: float) -> None:
        """A completion went on to the server, so long after it had come."""
        self._held.observe(seconds)

    def committed(self, kind: str) -> None:
        """A transformation was put in place."""
        self.commits[kind] += 1

    def turn(self, turn: Turn, *, streamed: bool) -> None:
        """A completion was answered."""
        if turn.ttft is not None:
            self._ttft.labels(turn.commit, "stream" if streamed else "whole").observe(turn.ttft)
        if turn.prompt_tokens is not None:
            self._context.labels(turn.commit).observe(turn.prompt_tokens)
        self._cached.inc(max(0, turn.cached_tokens or 0))

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def state(self) -> dict[str, Any]:
        """What the page shows; no text of any message."""
        sessions, ledger = self._sessions.all(), self._ledger.snapshot()
        return {
            "open": self.open,
            "commits": dict(self.commits),
            "ledger": {name: getattr(ledger, name) for name in (*_TOKENS, "late_commits")},
            "known": len(sessions),
            "conversations": [
                {
                    "name": s.name,
                    "named_by_client": s.space.name is not None,
                    "requests": s.requests,
                    "busy": s.busy,
                    "messages": len(s.seen),
                    "turns": [t._asdict() for t in s.turns],
                }
                for s in sessions[: -_SHOWN - 1 : -1]
            ],
        }

    def now(self) -> list[Metric]:
        """What is counted elsewhere."""
        prefix, ledger = "smoothagent_gateway", self._ledger.snapshot()
        conversations = GaugeMetricFamily(
            f"{prefix}_conversations", "Conversations in memory", value=len(self._sessions)
        )
        streams = GaugeMetricFamily(f"{prefix}_open_requests", "Requests under way", value=self.open)
        commits = CounterMetricFamily(f"{prefix}_commits", "Transformations put in place", labels=["kind"])
        for kind in ("hit", "late", "sync"):
            commits.add_metric([kind], self.commits[kind])
        counted = [
            CounterMetricFamily(f"{prefix}_{name}", text, value=getattr(ledger, name)) for name, text in _TOKENS.items()
        ]
        return [conversations, streams, commits, *counted]


class _Now(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> list[Metric]:
        return self._figures.now()
