"""What lookahead requests have really made a server compute, those that were cut short included."""

from __future__ import annotations

from collections import Counter

from smoothagent.serving.backend import Usage
from smoothagent.serving.costs import Kind


class Spent:
    """Tokens by conversation."""

    def __init__(self) -> None:
        self._prefilled: Counter[str] = Counter()
        self._generated: Counter[str] = Counter()

    def add(self, conversation: str, kind: Kind, tokens: int) -> None:
        """A piece has computed or generated ``tokens``."""
        if kind is not Kind.COPY:
            (self._generated if kind is Kind.DECODE else self._prefilled)[conversation] += tokens

    def of(self, conversation: str) -> Usage:
        """Prompt tokens computed and tokens generated so far."""
        return Usage(self._prefilled[conversation], self._generated[conversation])

    def forget(self, conversation: str) -> None:
        """The conversation is over."""
        del self._prefilled[conversation], self._generated[conversation]
