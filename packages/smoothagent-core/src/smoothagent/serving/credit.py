"""Credit: what lookahead work may still add to the time between a main request's tokens."""

from __future__ import annotations


class Credit:
    """Seconds of a decoding main request that pieces may take.

    Grows by ``share / (1 + share)`` seconds a second while a main request decodes, so that pieces, which are
    charged what they add, stretch its decoding to at most ``1 + share`` times.
    """

    def __init__(self) -> None:
        self.charged = 0.0
        self._seconds = 0.0
        self._at: float | None = None

    def accrue(self, now: float, *, decoding: bool, idle: bool, share: float, cap: float) -> None:
        """Take in the time since the last call, during which nothing changed.

        Args:
            now: seconds on the pacer's clock.
            decoding: a main request was decoding.
            idle: no main request was there at all.
            share: the share in force.
            cap: most that is saved up.
        """
        elapsed, self._at = now - (now if self._at is None else self._at), now
        if decoding:
            self._seconds = min(self._seconds + elapsed * share / (1 + share), max(self._seconds, cap))
        elif idle:
            # Tool time hurts nobody: a debt is worked off there, credit is not saved up.
            self._seconds = min(self._seconds + elapsed, max(self._seconds, 0.0))

    def charge(self, seconds: float) -> None:
        """A piece has added ``seconds``."""
        self._seconds -= seconds
        self.charged += seconds

    def wait(self, need: float, share: float) -> float:
        """Seconds of decoding until ``need`` is there."""
        missing = need - self._seconds
        # A nanosecond of rounding must not become a second wait.
        return missing * (1 + share) / share if missing > 1e-9 else 0.0
