"""What other processes do on the same server, as far as the server tells."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

LOOK_AGAIN = 0.05
"""Seconds a look at the server's state stays good, and between looks while someone else waits there."""
LOOK_ALONE = 0.25
"""The same where nobody else was seen for a while: a look takes a step of the server's time."""
SHARED_FOR = 60.0
"""Seconds after a foreign request was seen during which the server counts as shared."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of other processes on the server: how many await their first token, how many decode."""

    waiting: int = 0
    decoding: int = 0


Watch = Callable[[int], Awaitable[Load | None]]
"""Tells the other processes' load, given how many requests of this one decode; None: it cannot be told."""


class Others:
    """The last look at the server, and how long one has been waiting for others.

    Args:
        patience: seconds to wait for another process's prefill before one small piece runs anyway.
    """

    def __init__(self, patience: float) -> None:
        self.load = Load()
        self._patience = patience
        self._looked_at = float("-inf")
        self._shared_until = float("-inf")
        self._waiting_since: float | None = None

    def look_in(self, now: float) -> float:
        """Seconds until the last look is too old to go by."""
        return self._looked_at + (LOOK_AGAIN if self.shared(now) else LOOK_ALONE) - now

    def look_due(self, now: float) -> bool:
        """Whether the last look is too old to go by."""
        return self.look_in(now) <= 0

    def shared(self, now: float) -> bool:
        """Whether others were seen lately."""
        return now < self._shared_until

    def seen(self, load: Load, now: float) -> None:
        """A look has shown ``load``."""
        self.load, self._looked_at = load, now
        if load.waiting or load.decoding:
            self._shared_until = now + SHARED_FOR
        if not load.waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def wait(self, now: float) -> float:
        """Seconds until another look may help, while someone else awaits a first token; else 0."""
        return max(0.0, self._looked_at + LOOK_AGAIN - now) if self.load.waiting else 0.0

    def overdue(self, now: float) -> bool:
        """Whether one has waited for others for long enough; begins to wait anew if so."""
        since = self._waiting_since
        if since is None or now - since < self._patience:
            return False
        self._waiting_since = None
        return True
