"""What lookahead cost, what it saved, and when it stops itself.

Costs are what the background asked of the server beyond the agent's own calls. Savings are measured against a
synchronous transformation at the same commit, not against no transformation.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields, replace

from smoothagent.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Money:
    """An amount spent and an amount saved, in ``currency``."""

    spent: float
    saved: float
    currency: str = "USD"

    @property
    def net(self) -> float:
        """Saved minus spent; negative where lookahead cost money."""
        return self.saved - self.spent

    def __str__(self) -> str:
        return f"spent {self.spent:.4f} {self.currency}, saved {self.saved:.4f}, net {self.net:+.4f}"


@dataclass(frozen=True, slots=True)
class PriceTable:
    """What tokens cost.

    Attributes:
        input: ``per`` prompt tokens that had to be computed.
        cached_input: ``per`` prompt tokens found in the cache.
        output: ``per`` generated tokens.
        best_effort_input: the same as ``input`` for background requests, where they are priced apart.
        best_effort_output: the same as ``output`` for background requests.
        currency: printed, never converted.
        per: the number of tokens the prices are for.

    Raises:
        ConfigurationError: a negative price, or ``per`` below 1.
    """

    input: float
    cached_input: float
    output: float
    best_effort_input: float | None = None
    best_effort_output: float | None = None
    currency: str = "USD"
    per: int = 1_000_000

    def __post_init__(self) -> None:
        prices = (self.input, self.cached_input, self.output, self.best_effort_input, self.best_effort_output)
        for price in prices:
            if price is not None and not price >= 0:
                raise ConfigurationError(f"a price of {price!r}: prices are 0 or more, per {self.per} tokens")
        if self.per < 1:
            raise ConfigurationError(f"per={self.per}: prices are for 1 token or more, commonly 1_000_000")


@dataclass(frozen=True, slots=True)
class Budget:
    """When lookahead switches itself off. Limits that are None do not bind.

    Attributes:
        max_background_tokens: tokens that background work may compute (prefilled and generated).
        max_waste_ratio: the share (0–1) of them that may belong to work never committed.
        max_spent: money that background work may cost; needs ``prices``.
        prices: what tokens cost.
        min_background_tokens: the waste ratio is not judged before so many tokens.

    Raises:
        ConfigurationError: a limit that no run could keep, or money without prices.
    """

    max_background_tokens: int | None = None
    max_waste_ratio: float | None = None
    max_spent: float | None = None
    prices: PriceTable | None = None
    min_background_tokens: int = 20_000

    def __post_init__(self) -> None:
        if self.max_background_tokens is not None and self.max_background_tokens < 0:
            raise ConfigurationError(f"max_background_tokens={self.max_background_tokens}: use 0 or more, or None")
        if self.max_waste_ratio is not None and not 0 <= self.max_waste_ratio <= 1:
            raise ConfigurationError(f"max_waste_ratio={self.max_waste_ratio}: a share from 0 to 1, or None")
        if self.max_spent is not None and not self.max_spent >= 0:
            raise ConfigurationError(f"max_spent={self.max_spent}: use 0 or more, or None")
        if self.max_spent is not None and self.prices is None:
            raise ConfigurationError(f"max_spent={self.max_spent} without prices: pass prices=PriceTable(...)")
        if self.min_background_tokens < 0:
            raise ConfigurationError(f"min_background_tokens={self.min_background_tokens}: use 0 or more")

    def spent(self, snapshot: LedgerSnapshot) -> str | None:
        """Why lookahead must stop at these counts, as a sentence; None while it may go on."""
        tokens = snapshot.background_tokens
        if self.max_background_tokens is not None and tokens >= self.max_background_tokens:
            return f"lookahead is off: {tokens} background tokens of max_background_tokens={self.max_background_tokens}"
        if self.max_spent is not None and self.prices is not None:
            money = snapshot.cost(self.prices)
            if money.spent >= self.max_spent:
                return f"lookahead is off: it cost {money.spent:.4f} {money.currency} of max_spent={self.max_spent}"
        if self.max_waste_ratio is not None and tokens >= max(1, self.min_background_tokens):
            ratio = snapshot.waste_ratio
            if ratio > self.max_waste_ratio:
                return (
                    f"lookahead is off: {ratio:.0%} of its {tokens} tokens were never committed, "
                    f"max_waste_ratio={self.max_waste_ratio}"
                )
        return None


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Counts at one moment; all of them only grow.

    Attributes:
        commits: commits of a prepared result.
        late_commits: those of them that came after the hard limit.
        sync_commits: transformations done synchronously, as the built-in does.
        mispredictions: commits at another cut than the one warmed.
        failures: background work that failed.
        prefilled_tokens: prompt tokens that background requests had to compute.
        reused_tokens: prompt tokens that background requests found in the cache.
        generated_tokens: tokens that background requests generated.
        wasted_tokens: prefilled and generated tokens of work that was never committed.
        saved_tokens: tokens cached at commits that a synchronous transformation would have prefilled again.
        saved_output_tokens: generated tokens that a commit used and a synchronous transformation would have
            generated itself.
    """

    commits: int = 0
    late_commits: int = 0
    sync_commits: int = 0
    mispredictions: int = 0
    failures: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    saved_tokens: int = 0
    saved_output_tokens: int = 0

    @property
    def background_tokens(self) -> int:
        """Tokens that background work computed."""
        return self.prefilled_tokens + self.generated_tokens

    @property
    def waste_ratio(self) -> float:
        """The share (0–1) of the background tokens that was never committed; 0 where nothing ran."""
        return min(1.0, self.wasted_tokens / self.background_tokens) if self.background_tokens else 0.0

    def cost(self, prices: PriceTable) -> Money:
        """What the background cost and what its commits saved, by ``prices``."""
        be_input = prices.input if prices.best_effort_input is None else prices.best_effort_input
        be_output = prices.output if prices.best_effort_output is None else prices.best_effort_output
        spent = (
            self.prefilled_tokens * be_input
            + self.reused_tokens * prices.cached_input
            + self.generated_tokens * be_output
        )
        saved = self.saved_tokens * (prices.input - prices.cached_input) + self.saved_output_tokens * prices.output
        return Money(spent / prices.per, saved / prices.per, prices.currency)

    def to_dict(self) -> dict[str, int | float]:
        """All counts and ``waste_ratio``, for JSON."""
        return {**asdict(self), "waste_ratio": self.waste_ratio}


_COUNTERS = tuple(f.name for f in fields(LedgerSnapshot))


class Ledger:
    """Thread-safe counters of one conversation, or of all those whose ``parent`` it is.

    Args:
        budget: when to stop; None never stops.
        parent: counts everything this ledger counts; its budget binds here too.
    """

    def __init__(self, budget: Budget | None = None, *, parent: Ledger | None = None) -> None:
        self.budget = budget
        self.parent = parent
        self._lock = threading.Lock()
        self._counts = LedgerSnapshot()

    def add(
        self,
        *,
        commits: int = 0,
        late_commits: int = 0,
        sync_commits: int = 0,
        mispredictions: int = 0,
        failures: int = 0,
        prefilled_tokens: int = 0,
        reused_tokens: int = 0,
        generated_tokens: int = 0,
        wasted_tokens: int = 0,
        saved_tokens: int = 0,
        saved_output_tokens: int = 0,
    ) -> None:
        """Count, all at once, here and in every parent (`LedgerSnapshot` says what each means).

        Raises:
            ConfigurationError: a negative count; nothing is counted then.
        """
        given = locals()
        added = {name: given[name] for name in _COUNTERS if given[name]}
        for name, value in added.items():
            if not value > 0:
                raise ConfigurationError(f"{name}={value!r}: counts only grow")
        ledger: Ledger | None = self
        while ledger is not None:
            with ledger._lock:
                counts = ledger._counts
                ledger._counts = replace(counts, **{n: getattr(counts, n) + v for n, v in added.items()})
            ledger = ledger.parent

    def snapshot(self) -> LedgerSnapshot:
        """The counts now."""
        return self._counts

    def allows(self) -> bool:
        """Whether background work may start."""
        return self.why_off is None

    @property
    def why_off(self) -> str | None:
        """Why background work may not start, as a sentence for the user; None while it may."""
        ledger: Ledger | None = self
        while ledger is not None:
            why = ledger.budget.spent(ledger._counts) if ledger.budget is not None else None
            if why is not None:
                return why
            ledger = ledger.parent
        return None
