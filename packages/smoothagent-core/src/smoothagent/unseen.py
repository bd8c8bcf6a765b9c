"""Calls of a model that are ours, for adapters that watch a framework's calls."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

_unseen: ContextVar[bool] = ContextVar("smoothagent_unseen", default=False)


@contextlib.contextmanager
def unseen() -> Generator[None]:
    """What is called inside is no call of the agent's: a summary, in the background or not."""
    token = _unseen.set(True)
    try:
        yield
    finally:
        _unseen.reset(token)


def is_unseen() -> bool:
    """Whether a model that is called here is not to be taken for the agent's."""
    return _unseen.get()
