"""What stands between the plain loop and its model in each mode: nothing, a runtime, or a delegation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from smoothagent import CommitReport, Delegation, Ledger, LookaheadRuntime, MainRequest, Usage
from smoothagent_bench.record import Row
from smoothagent_bench.tokens import Wire

LOOKAHEAD = {"lookahead": "hit", "late": "late", "sync": "miss"}
"""How a row names a commit's kind, where lookahead is on."""

WARM = 0.9
"""Share of a sub-agent's prompt that must be cached for its start to count as a hit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a turn's commit hook.

    Attributes:
        commit: the request is the first with a transformed context.
        lookahead: ``hit``, ``late``, ``miss`` or ``none``.
        known_tokens: tokens of the new view known at the last boundary.
        waited_s: time spent waiting for a lookahead in flight.
    """

    commit: bool = False
    lookahead: str = "none"
    known_tokens: int | None = None
    waited_s: float = 0.0


class Side(Protocol):
    """The hooks of Listing 2, for one mode."""

    async def commit(self, messages: list[Wire]) -> list[Wire]:
        """Before the model call: the messages to send."""
        ...

    def request(self) -> MainRequest:
        """Around the model call."""
        ...

    def boundary(self, messages: Sequence[Wire]) -> None:
        """After a segment."""
        ...

    def outcome(self, cached_tokens: int | None) -> Outcome:
        """What the turn's commit was, asked once, after its reply."""
        ...

    def settle(self, row: Row) -> Row:
        """The row with the background work since the last one."""
        ...

    async def aclose(self) -> None:
        """Free what the server holds."""
        ...


class Untouched:
    """Mode ``none``: the conversation as it is, in a fixed slot where the server has slots."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    async def commit(self, messages: list[Wire]) -> list[Wire]:
        """The same messages."""
        return messages

    def request(self) -> MainRequest:
        """Routed to the slot."""
        return MainRequest(_FixedSlot(self._slot))

    def boundary(self, messages: Sequence[Wire]) -> None:
        """Nothing to prepare."""

    def outcome(self, cached_tokens: int | None) -> Outcome:
        """Never a commit."""
        del cached_tokens
        return Outcome()

    def settle(self, row: Row) -> Row:
        """No background work."""
        return row

    async def aclose(self) -> None:
        """Nothing to free."""


class WithRuntime:
    """Modes ``sync`` and ``lookahead``: the core's runtime.

    Attributes:
        runtime: the runtime.
        meter: counts its background work.
    """

    def __init__(self, runtime: LookaheadRuntime[Wire]) -> None:
        self.runtime = runtime
        self.meter = Meter(runtime.ledger)
        self._seen: CommitReport | None = None

    async def commit(self, messages: list[Wire]) -> list[Wire]:
        """The runtime's view."""
        return await self.runtime.aon_commit(messages)

    def request(self) -> MainRequest:
        """Marked and routed by the runtime."""
        return self.runtime.main_request()

    def boundary(self, messages: Sequence[Wire]) -> None:
        """Tell the runtime."""
        self.runtime.on_segment_boundary(messages)

    def outcome(self, cached_tokens: int | None) -> Outcome:
        """From the runtime's report, where there is a new one."""
        del cached_tokens
        report = self.runtime.last_commit
        if report is None or report is self._seen:
            return Outcome()
        self._seen = report
        lookahead = LOOKAHEAD[report.kind] if self.runtime.lookahead else "none"
        return Outcome(True, lookahead, report.known_tokens or None, report.waited)

    def settle(self, row: Row) -> Row:
        """Add the ledger's new counts."""
        return self.meter.settle(row)

    async def aclose(self) -> None:
        """Close the runtime."""
        await self.runtime.aclose()


class SubAgent:
    """The sub-agent's turns: the first is the commit of the delegation.

    Args:
        delegation: what prepared its prompt.
        parent: the main agent's side, whose ledger counts for both.
        known_tokens: tokens of its first prompt.
    """

    def __init__(self, delegation: Delegation[Wire], parent: WithRuntime, known_tokens: int) -> None:
        self._delegation, self._parent = delegation, parent
        self._known: int | None = known_tokens

    async def commit(self, messages: list[Wire]) -> list[Wire]:
        """Its context is never transformed again."""
        return messages

    def request(self) -> MainRequest:
        """Routed to the sub-agent's own stream."""
        return self._delegation.main_request()

    def boundary(self, messages: Sequence[Wire]) -> None:
        """Nothing is prepared for it."""

    def outcome(self, cached_tokens: int | None) -> Outcome:
        """A commit at its first turn, judged by what was cached."""
        known, self._known = self._known, None
        if known is None:
            return Outcome()
        lookahead = "none"
        if self._parent.runtime.lookahead:
            warm = (cached_tokens or 0) >= WARM * known
            lookahead = "hit" if warm else "late" if self._delegation.prefilled_tokens else "miss"
        return Outcome(True, lookahead, known)

    def settle(self, row: Row) -> Row:
        """Add the ledger's new counts; a start that was not warm in time is a late commit."""
        settled = self._parent.settle(row)
        return replace(settled, late_commits=settled.late_commits + (row.lookahead == "late"))

    async def aclose(self) -> None:
        """Close the delegation, then the parent."""
        await self._delegation.aclose()
        await self._parent.aclose()


class Meter:
    """Differences of a ledger's counters from row to row."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last = ledger.snapshot()

    def settle(self, row: Row) -> Row:
        """The row with what was counted since the last one added."""
        now, last = self._ledger.snapshot(), self._last
        self._last = now
        return replace(
            row,
            background_prefilled=row.background_prefilled + now.prefilled_tokens - last.prefilled_tokens,
            background_generated=row.background_generated + now.generated_tokens - last.generated_tokens,
            wasted=row.wasted + now.wasted_tokens - last.wasted_tokens,
            late_commits=row.late_commits + now.late_commits - last.late_commits,
            mispredictions=row.mispredictions + now.mispredictions - last.mispredictions,
            failures=row.failures + now.failures - last.failures,
        )


class _FixedSlot:
    """A request's host that only routes."""

    def __init__(self, slot: int | None) -> None:
        self._slot = slot

    def request_opens(self) -> None:
        pass

    def request_may_block(self) -> bool:
        return False

    def request_started(self) -> dict[str, Any]:
        return {} if self._slot is None else {"extra_body": {"id_slot": self._slot}}

    def request_first_token(self) -> None:
        pass

    def request_text(self, text: str) -> None:
        pass

    def request_usage(self, usage: Usage) -> None:
        pass

    def request_done(self) -> None:
        pass
