"""Whether what is logged may quote messages, and servers that may quote them."""

from __future__ import annotations

_quotes = True


def quote_nothing() -> None:
    """From now on nothing that this process logs quotes a message or a server's words: for who serves others."""
    global _quotes  # noqa: PLW0603  it is the process that has one log
    _quotes = False


def quote_again() -> None:
    """As at first."""
    global _quotes  # noqa: PLW0603
    _quotes = True


def may_quote() -> bool:
    """Whether they may be quoted."""
    return _quotes
