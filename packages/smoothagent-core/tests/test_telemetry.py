"""Spans and metrics: whose trace they are in, what they say, and what they never say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from smoothagent.serving.backend import Usage
from smoothagent.telemetry import Telemetry, session_hash


class Recorded:
    """A telemetry whose spans and metrics stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.telemetry = Telemetry(self.provider, MeterProvider([self.reader]))

    def span(self, name: str) -> ReadableSpan:
        (found,) = (s for s in self.exporter.get_finished_spans() if s.name == name)
        return found

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        metrics = (m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics if m.name == name)
        return {
            tuple(sorted((p.attributes or {}).items())): getattr(p, "value", None) or getattr(p, "count", None)
            for m in metrics
            for p in m.data.data_points
        }


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_background_spans_are_nobody_s_children(recorded: Recorded) -> None:
    tracer = recorded.provider.get_tracer("user")
    with tracer.start_as_current_span("turn") as turn:
        with recorded.telemetry.transform("s", strategy="summarize", model="m") as transform:
            pass
        with recorded.telemetry.prefill("s", model="m") as prefill, tracer.start_as_current_span("POST"):
            pass
        assert trace.get_current_span() is turn
        with recorded.telemetry.commit("s", strategy="summarize", links=[transform.link, prefill.link]) as commit:
            commit.ended_as("hit")
    user, warm, sent, swap = map(recorded.span, ("turn", "smoothagent.prefill", "POST", "smoothagent.commit"))
    assert recorded.span("smoothagent.transform").parent is None
    assert warm.parent is None
    assert warm.context is not None
    assert user.context is not None
    assert warm.context.trace_id != user.context.trace_id
    assert sent.parent is not None
    assert sent.parent.span_id == warm.context.span_id, "an instrumented client's span goes below ours"
    assert swap.parent is not None
    assert swap.parent.span_id == user.context.span_id
    assert [link.context for link in swap.links] == [transform.link, prefill.link]


def test_says_tokens_and_the_session_only_as_a_hash(recorded: Recorded) -> None:
    with recorded.telemetry.prefill("alice@example.org", model="smollm2") as work:
        work.usage(Usage(prompt_tokens=1000, completion_tokens=1, cached_tokens=900))
    with recorded.telemetry.transform("alice@example.org", strategy="summarize") as work:
        work.usage(Usage(prompt_tokens=50, completion_tokens=0))
        work.sizes(2417, 1301)
    assert recorded.span("smoothagent.prefill").attributes == {
        "gen_ai.conversation.id": session_hash("alice@example.org"),
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "smollm2",
        "gen_ai.usage.input_tokens": 1000,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 900,
    }
    assert recorded.span("smoothagent.transform").attributes == {
        "gen_ai.conversation.id": session_hash("alice@example.org"),
        "smoothagent.strategy": "summarize",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 0,
        "smoothagent.tokens.before": 2417,
        "smoothagent.tokens.after": 1301,
    }
    kinds = {dict(k)["smoothagent.tokens.kind"]: v for k, v in recorded.points("smoothagent.tokens").items()}
    assert kinds == {"prefilled": 150, "reused": 900, "generated": 1}


def test_commits_and_durations_are_counted(recorded: Recorded) -> None:
    for outcome in ("hit", "hit", "late"):
        with recorded.telemetry.commit("s", strategy="x") as work:
            work.ended_as(outcome)
    with recorded.telemetry.commit("s", strategy="x"):
        pass
    assert recorded.points("smoothagent.commits") == {
        (("smoothagent.lookahead", "hit"),): 2,
        (("smoothagent.lookahead", "late"),): 1,
        (("smoothagent.lookahead", "none"),): 1,
    }
    assert recorded.points("smoothagent.duration") == {(("smoothagent.work", "commit"),): 4}


def test_a_failure_is_named_without_its_text(recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="secret text"), recorded.telemetry.prefill("s"):
        raise ValueError("secret text")
    span = recorded.span("smoothagent.prefill")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "ValueError"
    assert not span.events
    assert "secret" not in span.to_json()


async def cancelled(telemetry: Telemetry) -> None:
    with telemetry.prefill("s"):
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)


def test_cancellation_is_no_error_and_not_swallowed(recorded: Recorded) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled(recorded.telemetry))
    span = recorded.span("smoothagent.prefill")
    assert span.status.status_code is trace.StatusCode.UNSET
    assert (span.attributes or {})["smoothagent.cancelled"] is True


def test_without_an_sdk_nothing_happens() -> None:
    telemetry = Telemetry()
    with telemetry.prefill("s") as work:
        work.usage(Usage(10, 1, 5))
    with telemetry.commit("s", strategy="x", links=[work.link]) as commit:
        commit.ended_as("miss")
    assert not work.link.is_valid


def test_importing_is_cheap() -> None:
    code = "import sys, smoothagent.telemetry; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_session_hash() -> None:
    assert session_hash("a") == session_hash("a") != session_hash("b")
    assert len(session_hash("lone \ud800")) == 16
