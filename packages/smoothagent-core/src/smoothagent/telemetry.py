"""Spans and metrics by OpenTelemetry's API: no-ops until the application installs an SDK.

::

    the user's trace          traces of our own
    ────────────────          ─────────────────
    agent turn                smoothagent.transform ─┐
    └── smoothagent.commit    smoothagent.prefill  ──┤
             └────────── links ──────────────────────┘

Background spans start from an empty context, so they never become children of the user's current span; the
commit that uses their work links to them. Attributes are numbers and names: no message text, no exception text,
and the session only as a hash. Token counts stay out of ``gen_ai.client.token.usage``, the user's own counter.

Importing this module does not import OpenTelemetry (80 ms); making a `Telemetry` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2s
from typing import TYPE_CHECKING, Literal

from smoothagent.serving.backend import Usage

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram, MeterProvider
    from opentelemetry.trace import Span, SpanContext, TracerProvider

NAME = "smoothagent"
"""The name of our tracer and of our meter."""

Outcome = Literal["hit", "late", "miss", "none"]
"""What the lookahead was worth at a commit, as in ``results.jsonl``."""


def session_hash(session: str) -> str:
    """16 hex digits that stand for a session; the same for the same name everywhere."""
    return blake2s(session.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Work:
    """One span in progress.

    Attributes:
        link: pass it to the `Telemetry.commit` that uses this work.
    """

    def __init__(self, telemetry: Telemetry, span: Span) -> None:
        self._telemetry = telemetry
        self._span = span
        self.link: SpanContext = span.get_span_context()
        self.outcome: Outcome | None = None

    def usage(self, usage: Usage) -> None:
        """Say what a request of this work cost; once per span."""
        reused = usage.cached_tokens or 0
        computed = usage.prompt_tokens - reused
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        if usage.cached_tokens is not None:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        for kind, n in (
            ("prefilled", computed),
            ("reused", reused),
            ("generated", usage.completion_tokens),
        ):
            if n > 0:
                self._telemetry.tokens.add(n, {"smoothagent.tokens.kind": kind})

    def sizes(self, before: int, after: int) -> None:
        """Say how many tokens the view had before and after the transformation."""
        self._span.set_attribute("smoothagent.tokens.before", before)
        self._span.set_attribute("smoothagent.tokens.after", after)

    def ended_as(self, outcome: Outcome) -> None:
        """Say what the lookahead was worth at this commit."""
        self.outcome = outcome
        self._span.set_attribute("smoothagent.lookahead", outcome)


class Telemetry:
    """Our tracer and meter.

    Args:
        tracer_provider: where spans go; None follows the application's global provider, even one set later.
        meter_provider: the same for metrics.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        from opentelemetry import metrics, trace

        self._tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(NAME, meter_provider=meter_provider)
        self.tokens: Counter = meter.create_counter(
            "smoothagent.tokens", unit="{token}", description="Tokens of background work, by kind"
        )
        self._commits: Counter = meter.create_counter(
            "smoothagent.commits", unit="{commit}", description="Commits, by what the lookahead was worth"
        )
        self._duration: Histogram = meter.create_histogram(
            "smoothagent.duration", unit="s", description="Time in transform, prefill and commit"
        )

    @contextmanager
    def transform(self, session: str, *, strategy: str, model: str | None = None) -> Generator[Work]:
        """A background transformation, in a trace of its own."""
        with self._span("transform", session, strategy=strategy, model=model) as work:
            yield work

    @contextmanager
    def prefill(self, session: str, *, model: str | None = None) -> Generator[Work]:
        """A background prefill, in a trace of its own."""
        with self._span("prefill", session, model=model) as work:
            yield work

    @contextmanager
    def commit(
        self, session: str, *, strategy: str, links: Sequence[SpanContext] = (), since: float = 0.0
    ) -> Generator[Work]:
        """A commit, in the user's trace, linked to the background work it uses; it began ``since`` seconds ago."""
        with self._span("commit", session, strategy=strategy, links=links, background=False, since=since) as work:
            yield work
        self._commits.add(1, {"smoothagent.lookahead": work.outcome or "none"})

    @contextmanager
    def _span(
        self,
        name: Literal["transform", "prefill", "commit"],
        session: str,
        *,
        strategy: str | None = None,
        model: str | None = None,
        links: Sequence[SpanContext] = (),
        background: bool = True,
        since: float = 0.0,
    ) -> Generator[Work]:
        from opentelemetry import context, trace

        attributes = {"gen_ai.conversation.id": session_hash(session)}
        if strategy is not None:
            attributes["smoothagent.strategy"] = strategy
        if model is not None:
            attributes["gen_ai.request.model"] = model
        if name == "prefill":
            attributes["gen_ai.operation.name"] = "chat"
        base = context.Context() if background else context.get_current()
        span = self._tracer.start_span(
            f"{NAME}.{name}",
            context=base,
            kind=trace.SpanKind.INTERNAL,
            attributes=attributes,
            links=[trace.Link(link) for link in links if link.is_valid],
            start_time=time.time_ns() - int(since * 1e9) if since else None,
            # An exception's message can hold message text.
            record_exception=False,
            set_status_on_exception=False,
        )
        # Current while it lasts, so that an instrumented HTTP client's spans go below it, not below the user's.
        token = context.attach(trace.set_span_in_context(span, base))
        began = time.monotonic() - since
        error = ""
        try:
            yield Work(self, span)
        except (asyncio.CancelledError, GeneratorExit):
            span.set_attribute("smoothagent.cancelled", True)
            raise
        except BaseException as caught:
            error = type(caught).__qualname__
            span.set_attribute("error.type", error)
            span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            context.detach(token)
            span.end()
            kinds = {"smoothagent.work": name}
            self._duration.record(time.monotonic() - began, {**kinds, "error.type": error} if error else kinds)
