"""What goes wrong ahead of time costs the agent nothing but warmth."""

from __future__ import annotations

import logging
from types import TracebackType

log = logging.getLogger("smoothagent")


class harmless:  # noqa: N801  it reads as a statement does
    """An error inside ``with harmless(what):`` is logged as ``what`` not being warmed, and goes no further.

    A class, since a generator's context costs more than most of what is done inside.

    Args:
        what: what is done there.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        log.warning("%s is not warmed: %r", self._what, error, exc_info=error)
        return True
