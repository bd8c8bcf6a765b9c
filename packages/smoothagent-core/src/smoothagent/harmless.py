"""What goes wrong ahead of time costs the agent nothing but warmth."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

log = logging.getLogger("smoothagent")


@contextlib.contextmanager
def harmless(what: str) -> Generator[None]:
    """An error inside is logged as ``what`` not being warmed, and goes no further."""
    try:
        yield
    except Exception as error:
        log.warning("%s is not warmed: %r", what, error, exc_info=error)
