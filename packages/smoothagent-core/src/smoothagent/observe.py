"""What the runtime says and books: logs, ledger, fidelity, spans. Never any message text."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smoothagent.fidelity import Fidelity, Request, first_difference
from smoothagent.ledger import Ledger
from smoothagent.message import Message
from smoothagent.prompt import Prompt
from smoothagent.record import CommitReport
from smoothagent.serving.backend import Backend, Caps, Usage
from smoothagent.strategy import LookaheadStrategy
from smoothagent.telemetry import Outcome, Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

log = logging.getLogger("smoothagent")

_OUTCOMES: dict[str, Outcome] = {"lookahead": "hit", "late": "late", "sync": "miss"}

_told: weakref.WeakKeyDictionary[Backend, set[str]] = weakref.WeakKeyDictionary()
"""What was said of each server."""
_IDLE_BOUNDARIES = 50
"""Boundaries without anything to prepare after which it is said why, once."""


class Observer:
    """Books one conversation; called under the runtime's lock.

    Attributes:
        fidelity: whether warm-ups hit.
        telemetry: spans and metrics.
        ahead: lookahead is on, so that a transformation on the critical path is a miss.
    """

    def __init__(self, session: str, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.session = session
        self.ledger = ledger
        self.fidelity = Fidelity()
        self.telemetry = Telemetry()
        self.ahead = True
        self._clock = clock
        self._said: set[str] = set()
        self._pending: CommitReport | None = None
        self._warmed: tuple[Message, ...] = ()
        self._sent_at: float | None = None
        self._requests = self._pending_since = 0
        self._ttft: float | None = None
        self._idle = 0
        self._reports = False

    def say_once(self, topic: str, sentence: str) -> None:
        """A warning, once a conversation and topic."""
        if topic not in self._said:
            self._said.add(topic)
            log.warning("session %s: %s", self.session, sentence)

    def boundary(self, strategy: LookaheadStrategy, *, wanted: bool, lookahead: bool) -> None:
        """Say why there is never anything to do, once."""
        if wanted or not lookahead:
            self._idle = 0
            return
        self._idle += 1
        if self._idle == _IDLE_BOUNDARIES and "idle" not in self._said:
            self._said.add("idle")
            why = self.ledger.why_off or (
                f"{strategy.tokens} tokens, trigger {strategy.hard}" if strategy.hard else "its trigger was never near"
            )
            log.info("session %s: nothing to prepare in %d segments: %s", self.session, self._idle, why)

    def server_known(self, caps: Caps, backend: Backend | None) -> None:
        """Say what the server lacks: once, and not in every conversation with it."""
        self.fidelity.server = caps.server
        self._reports = self._reports or caps.cached_tokens
        notes = list(caps.notes)
        if not caps.prefill:
            notes.append(f"the server ({caps.server}) is not warmed, the transformation alone runs ahead")
        for note in notes:
            if _is_new(backend, note):
                self.say_once(note, note)

    def spliced(
        self,
        report: CommitReport,
        strategy: str,
        warmed: Sequence[Message],
        generated: int,
        *,
        links: Sequence[SpanContext] = (),
        since: float = 0.0,
    ) -> None:
        """A commit was made; its story ends with the usage of the next request.

        Args:
            report: what is known of it.
            strategy: whose it is.
            warmed: the messages that were warmed for it.
            generated: tokens that were generated for it ahead of time.
            links: spans of that work.
            since: seconds since the hook was called.
        """
        self._settle()
        if report.kind == "sync":
            self.ledger.add(sync_commits=1)
        else:
            self.ledger.add(commits=1, late_commits=int(report.kind == "late"), saved_output_tokens=generated)
        with self.telemetry.commit(self.session, strategy=strategy, links=links, since=since) as work:
            work.sizes(report.before_tokens, report.after_tokens)
            work.ended_as(_OUTCOMES[report.kind] if self.ahead else "none")
        self._pending, self._warmed = report, tuple(warmed)
        self._pending_since = self._requests

    def committed(self, report: CommitReport | None, seconds: float, waited: float) -> None:
        """How long the hook took that made the pending commit."""
        if report is not None and report is self._pending and not report.seconds:
            report.seconds, report.waited = seconds, waited

    def request_opens(self) -> None:
        """The agent's own call is about to be made: what it waits for before it is sent, it waits for."""
        self._sent_at, self._ttft = self._clock(), None

    def request_started(self) -> None:
        """It is about to be sent."""
        self._requests += 1

    def first_token(self) -> None:
        """Its first token is there."""
        if self._sent_at is not None:
            self._ttft = self._clock() - self._sent_at

    def usage(self, usage: Usage, view: Sequence[Message]) -> None:
        """The usage of the first request after a commit tells what the warm-up was worth."""
        report = self._pending
        if report is None:
            return
        if self._requests > self._pending_since + 1:
            self._settle()  # the request that followed the commit told no usage; an ordinary one says nothing of it
            return
        if usage.cached_tokens is not None:
            self._reports = True
        elif self._reports:
            # Servers that report cached tokens leave the field out where they found none.
            usage = replace(usage, cached_tokens=0)
        report.cached_tokens, report.ttft = usage.cached_tokens, self._ttft
        if report.kind != "sync":
            self._judge(report, usage, view)
        self._settle()

    def wasted(self, tokens: int) -> None:
        """Tokens of work that will not be committed."""
        self.ledger.add(wasted_tokens=tokens)

    def closing(self) -> None:
        """The conversation ends."""
        self._settle()

    def _judge(self, report: CommitReport, usage: Usage, view: Sequence[Message]) -> None:
        # What both views begin with a synchronous transformation would have found cached, too.
        self.ledger.add(saved_tokens=max(0, (usage.cached_tokens or 0) - report.shared_tokens))
        warmed = Request([m.wire() for m in self._warmed], Prompt())
        actual = Request([m.wire() for m in view], Prompt())
        sentence = self.fidelity.observe_commit(
            report.warmed_tokens, usage.cached_tokens, first_difference(warmed, actual)
        )
        if sentence is not None:
            log.warning("session %s: %s", self.session, sentence)

    def _settle(self) -> None:
        report, self._pending = self._pending, None
        if report is not None:
            log.info("session %s: %s", self.session, report.sentence())


def _is_new(backend: Backend | None, note: str) -> bool:
    while (target := getattr(backend, "target", None)) is not None:  # one conversation's, or one client's, way to it
        backend = target
    try:
        told = _told.setdefault(backend, set()) if backend is not None else set[str]()
    except TypeError:  # one of the user's that cannot be a key: every conversation says it
        return True
    new = note not in told
    told.add(note)
    return new
