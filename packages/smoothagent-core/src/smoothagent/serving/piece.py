"""One piece of lookahead work: asked for, granted, and cut off when a main request arrives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from smoothagent.errors import BackendError
from smoothagent.serving.costs import Kind


@dataclass(eq=False, slots=True)
class Ticket:
    """A piece that is asked for.

    Attributes:
        conversation: whose work it is.
        kind: what it does.
        least: the fewest tokens that make sense (a block of the server's cache).
        at_rest: it needs the conversation's main slot: never while its main request runs.
        elsewhere: it runs on another server, so it does not lengthen the steps in which main requests decode.
        since: when it was asked for, on the loop's clock.
    """

    conversation: str
    kind: Kind
    least: int
    at_rest: bool
    elsewhere: bool = False
    since: float = 0.0


@dataclass(eq=False, slots=True)
class Grant:
    """Leave to run one piece.

    Attributes:
        conversation: whose work it is.
        kind: what it does.
        tokens: the most the piece may prefill or decode.
        beside_decode: a main request decodes meanwhile, in the same steps.
        elsewhere: it runs on another server.
        preempted: a main request arrived: the piece was cancelled and is to be done again.
        paid: seconds of credit it was let in for.
    """

    conversation: str
    kind: Kind
    tokens: int
    beside_decode: bool
    elsewhere: bool = False
    preempted: bool = False
    paid: float = 0.0
    done_tokens: int = field(default=0, init=False)

    def report(self, tokens: int) -> None:
        """Say how many tokens the piece computed, so that the next one is sized better."""
        self.done_tokens += tokens


class Admission(Protocol):
    """Who lets pieces in; the pacer."""

    async def admit(self, ticket: Ticket) -> Grant:
        """Wait until ``ticket`` may run, and take the place; `finish` gives it back."""
        ...

    def start(self, piece: Piece) -> None:
        """``piece`` is the one in flight."""
        ...

    def finish(self, grant: Grant, seconds: float, *, cut_short: bool) -> None:
        """The piece has ended after ``seconds``."""
        ...


class Piece:
    """One piece, as an async context manager; made by `Pacer.piece`."""

    def __init__(self, admission: Admission, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket
        self._task: asyncio.Task[object] | None = None
        self._grant: Grant | None = None
        self._cancelling = 0
        self._started = 0.0
        self._cut = False

    async def __aenter__(self) -> Grant:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("a piece runs inside a task")
        grant = await self._admission.admit(self._ticket)
        # Nothing is awaited from here to the body, so an arrival finds either no piece or this one.
        self._grant = grant
        self._cancelling = self._task.cancelling()
        self._started = asyncio.get_running_loop().time()
        self._admission.start(self)
        return grant

    def preempt(self) -> None:
        """Cancel the body, as ``asyncio.timeout`` does."""
        if not self._cut and self._task is not None and self._task is not asyncio.current_task():
            self._cut = True
            self._task.cancel()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool:
        assert self._grant is not None
        assert self._task is not None
        try:
            seconds = asyncio.get_running_loop().time() - self._started
        except RuntimeError:  # its loop was closed under it: the pacer has moved on, or will
            return False
        swallow = False
        if self._cut:
            ours = self._task.uncancel() <= self._cancelling
            # The connection may break before the cancellation is seen: that is our doing too.
            swallow = ours and exc_type is not None and issubclass(exc_type, (asyncio.CancelledError, BackendError))
            self._grant.preempted = swallow
        self._admission.finish(self._grant, seconds, cut_short=exc_type is not None)
        return swallow
