"""The server's own count of a conversation, where no usage has told its length lately."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from smoothagent.errors import BackendError
from smoothagent.forks import after_fork
from smoothagent.lookahead import Lookahead
from smoothagent.natives import Snapshot
from smoothagent.serving.backend import Backend
from smoothagent.tokens import EstimateCounter

M = TypeVar("M")
log = logging.getLogger("smoothagent")

_CHANGED = 0.25
"""Change since the last exact count, as a fraction of it, from which on the estimate is worth checking."""
_LEAST = 64
"""Tokens below which a count says more about the template than about text."""


class ServerCount(Generic[M]):
    """Corrects the estimate by asking the server, in the background, at boundaries.

    Usage does the same for nothing, and comes with every call of a wrapped client. It does not come where only the
    hooks are called, and it comes too late for a large tool output that has just arrived.

    Args:
        lookahead: the conversation and the lane.
    """

    def __init__(self, lookahead: Lookahead[M]) -> None:
        self._lookahead = lookahead
        self._asking = False
        self._none = False
        after_fork(self._start_afresh)

    def boundary(self) -> None:
        """Ask where it is time to; called under the lock, never blocks."""
        lookahead, conversation = self._lookahead, self._lookahead.conversation
        if self._asking or self._none or lookahead.backend is None:
            return
        if not isinstance(conversation.counter, EstimateCounter) or conversation.prompt.volatile_tail:
            return
        tokens, known = conversation.tokens, conversation.counted_at
        if tokens < _LEAST or abs(tokens - known) < _CHANGED * known:
            return
        self._asking = True
        conversation.counted_at = tokens  # whatever comes of it, not again before it has changed
        lookahead.lane.spawn(self._ask(lookahead.backend, conversation.snapshot(), tokens, conversation.counted_with))

    async def _ask(self, backend: Backend, snapshot: Snapshot[M], counted: int, factor: float) -> None:
        lookahead, conversation = self._lookahead, self._lookahead.conversation
        try:
            wires = [lookahead.codec.wire(native) for native in snapshot.natives]
            actual = await backend.count(wires, conversation.prompt)
            with lookahead.lock:
                if actual is None:
                    self._none = True
                else:
                    conversation.calibrate(actual, counted, factor)
        except BackendError as error:
            log.debug("session %s: the server did not count: %s", lookahead.session, error)
        except Exception as error:
            # Of a codec or of a backend of the user's own: the estimate stands.
            self._none = True
            log.debug("session %s: the server cannot count: %r", lookahead.session, error)
        finally:
            self._asking = False

    def _start_afresh(self) -> None:
        self._asking = False  # it was asked on the parent's lane
