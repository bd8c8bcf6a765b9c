"""What must start afresh in a forked child: its parent's threads, loops and locks are not there."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable

_hooks: set[weakref.WeakMethod[Callable[[], None]]] = set()


def after_fork(method: Callable[[], None]) -> None:
    """Call the bound ``method`` in every forked child, for as long as its object lives."""
    _hooks.add(weakref.WeakMethod(method, _hooks.discard))


def _in_child() -> None:
    for hook in tuple(_hooks):
        method = hook()
        if method is not None:
            with contextlib.suppress(Exception):
                method()


# Before modules are taken down: a weak method whose object goes after it says so on stderr.
atexit.register(_hooks.clear)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
