"""When lookahead work may run on a server that has no best-effort class, and how much at once.

::

    a main request of this process      a piece may run
    ------------------------------      -----------------------------------------------
    has arrived, no token yet           never; the piece in flight is cancelled at once
    is decoding                         small, and only as the credit allows
    none (tool time)                    freely, `idle_piece` seconds at a time

Credit bounds what pieces add to the time between tokens: while a main request decodes it grows by
``share / (1 + share)`` seconds a second, so pieces take at most ``share`` times what decoding takes.
Requests of other processes are seen through ``watch``, where the server tells its state.
(ARCHITECTURE.md, "When lookahead work may run, where the server has no classes".)
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from smoothagent.errors import BackendError
from smoothagent.serving.costs import LinearCost

LOOK_AGAIN = 0.05
"""Seconds a look at the server's state stays good, and between looks while someone else waits there."""
SHARED_FOR = 60.0
"""Seconds after a foreign request was seen during which the server counts as shared."""
FIRST_PREFILL, FIRST_DECODE = 16, 2
"""Tokens of the first piece of a kind, when nothing is known of the server's speed."""
LEAST_BESIDE = 4
"""Tokens of a prefill piece beside a decode, whatever it seems to cost: on a busy machine a single token's cost is
mostly noise, and pieces of one token would never get anything done. The credit still bounds how often."""
MOST_TOKENS = 4096


class Kind(StrEnum):
    """What a piece does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COPY = "copy"
    """KV from slot to slot."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of other processes on the server: how many await their first token, how many decode."""

    waiting: int = 0
    decoding: int = 0


@dataclass(slots=True)
class PacerStats:
    """What the pacer did; ``charged`` is in seconds of main decoding time."""

    pieces: int = 0
    preempted: int = 0
    overdue: int = 0
    charged: float = 0.0


@dataclass(eq=False, slots=True)
class _Ticket:
    conversation: str
    kind: Kind
    least: int
    at_rest: bool


@dataclass(eq=False, slots=True)
class Grant:
    """Leave to run one piece.

    Attributes:
        tokens: the most the piece may prefill or decode.
        preempted: a main request arrived: the piece was cancelled and is to be done again.
    """

    kind: Kind
    tokens: int
    beside_decode: bool
    preempted: bool = False
    done_tokens: int = field(default=0, init=False)

    def report(self, tokens: int) -> None:
        """Say how many tokens the piece computed, so that the next one is sized better."""
        self.done_tokens += tokens


class Pacer:
    """Admits pieces of lookahead work, one at a time for the whole server.

    The hooks (``main_*``, `promote`, `settle`, `forget`) may be called from any thread; pieces belong
    to the loop that runs them. Time is ``loop.time()`` only.

    Args:
        idle_piece: seconds a piece aims at in tool time; halved while other processes use the server.
        decode_piece: seconds a piece may add beside a decoding main request.
        share: most that pieces add to the time between a main request's tokens, as a fraction.
        promoted_share: the same while a promoted conversation is in a hurry.
        foreign_patience: seconds to wait for another process's prefill before one small piece runs anyway.
        watch: tells the other processes' load, given how many requests of this one decode; None where the
            server cannot tell.
    """

    def __init__(
        self,
        *,
        idle_piece: float = 0.15,
        decode_piece: float = 0.06,
        share: float = 0.25,
        promoted_share: float = 0.5,
        foreign_patience: float = 10.0,
        watch: Callable[[int], Awaitable[Load | None]] | None = None,
    ) -> None:
        self.idle_piece = idle_piece
        self.decode_piece = decode_piece
        self.share = share
        self.promoted_share = promoted_share
        self.foreign_patience = foreign_patience
        self.watch = watch
        self.stats = PacerStats()
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: Counter[str] = Counter()
        self._decoding: Counter[str] = Counter()
        self._promoted: set[str] = set()
        self._foreign = Load()
        self._foreign_since: float | None = None
        self._looked_at = float("-inf")
        self._shared_until = float("-inf")
        self._credit = 0.0
        self._credit_at: float | None = None
        self._queue: list[_Ticket] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self._active: Piece | None = None
        self._reserved = False
        self._prefill = LinearCost()
        self._decode_idle = LinearCost()
        self._decode_beside = LinearCost()

    # -- what the agent does ---------------------------------------------------------------

    def main_arrived(self, conversation: str) -> None:
        """A main request is about to be sent: nothing runs until its first token."""
        with self._lock:
            self._accrue()
            self._arrived[conversation] += 1
        self._on_loop(self._preempt)

    def main_first_token(self, conversation: str) -> None:
        """The main request answers; from now on it decodes."""
        with self._lock:
            self._accrue()
            if _take(self._arrived, conversation):
                self._decoding[conversation] += 1
        self._on_loop(self._wake)

    def main_done(self, conversation: str) -> None:
        """The main request has ended, well or not."""
        with self._lock:
            self._accrue()
            _ = _take(self._decoding, conversation) or _take(self._arrived, conversation)
        self._on_loop(self._wake)

    def promote(self, conversation: str) -> None:
        """The conversation's work is in a hurry: it goes first and with a larger share, until `settle`."""
        with self._lock:
            self._accrue()
            self._promoted.add(conversation)
        self._on_loop(self._wake)

    def settle(self, conversation: str) -> None:
        """The hurry is over."""
        with self._lock:
            self._accrue()
            self._promoted.discard(conversation)

    def forget(self, conversation: str) -> None:
        """The conversation is over."""
        with self._lock:
            self._accrue()
            self._promoted.discard(conversation)
            del self._arrived[conversation], self._decoding[conversation]
        self._on_loop(self._wake)

    # -- pieces ----------------------------------------------------------------------------

    def piece(self, conversation: str, kind: Kind, *, least: int = 1, at_rest: bool = False) -> Piece:
        """``async with pacer.piece(…) as grant``: waits for leave, then runs the body as one piece.

        A main request's arrival cancels the body; the block then ends without an error and with
        ``grant.preempted`` set. A cancellation from elsewhere passes through.

        Args:
            conversation: whose work it is.
            kind: what it does.
            least: the fewest tokens that make sense (a block of the server's cache).
            at_rest: the piece needs the conversation's main slot: never while its main request runs.
        """
        return Piece(self, _Ticket(conversation, kind, least, at_rest))

    async def admit(self, ticket: _Ticket) -> Grant:
        """Wait until ``ticket`` may run, and take the place; `finish` gives it back."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._queue.append(ticket)
        try:
            while True:
                delay = self._delay_in_turn(ticket)
                if delay == 0 and await self._look():
                    return self._grant(ticket)
                if delay != 0:
                    await self._sleep(delay)
        finally:
            with self._lock:
                self._queue.remove(ticket)
            self._wake()

    def finish(self, grant: Grant, seconds: float, *, cut_short: bool) -> None:
        """The piece has ended after ``seconds``: charge it, let the next one in."""
        with self._lock:
            self._accrue()
            self.stats.pieces += 1
            self.stats.preempted += grant.preempted
            if grant.beside_decode:
                charge = self._charge(grant, seconds)
                self._credit -= charge
                self.stats.charged += charge
            if not cut_short and grant.kind is not Kind.COPY:
                self._cost(grant.kind, grant.beside_decode).observe(grant.done_tokens, seconds)
            self._active = None
            self._reserved = False
        self._wake()

    def start(self, piece: Piece) -> None:
        """Make ``piece`` the one in flight."""
        with self._lock:
            self._active = piece

    # -- inside ----------------------------------------------------------------------------

    def _busy_share(self) -> float:
        share = self.promoted_share if self._promoted else self.share
        return share / (1 + share)

    @property
    def _beside_decode(self) -> bool:
        return bool(self._decoding or self._foreign.decoding)

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def _accrue(self) -> None:
        now = self._now()
        elapsed, self._credit_at = now - (now if self._credit_at is None else self._credit_at), now
        if self._beside_decode:
            self._credit = min(self._credit + elapsed * self._busy_share(), max(self._credit, self._credit_cap()))
        elif not self._arrived:
            # Tool time hurts nobody: a debt is worked off there, credit is not saved up.
            self._credit = min(self._credit + elapsed, max(self._credit, 0.0))

    def _credit_cap(self) -> float:
        return max([self.decode_piece, *(self._need(t) for t in self._queue)])

    def _need(self, ticket: _Ticket) -> float:
        """Credit a piece beside decoding must find."""
        if ticket.kind is Kind.PREFILL:
            return max(self.decode_piece, self._prefill.seconds(ticket.least))
        if ticket.kind is Kind.DECODE:
            return max(self.decode_piece, self._beside_token() * ticket.least)
        return self.decode_piece

    def _delay_in_turn(self, ticket: _Ticket) -> float | None:
        """Seconds until ``ticket`` may run; 0 now; None until something changes."""
        with self._lock:
            delay = self._delay(ticket)
            if delay != 0:
                return delay
            ahead = [t for t in self._queue if t.conversation in self._promoted] + self._queue
            first = next(t for t in ahead if self._delay(t) == 0)
            return 0 if first is ticket else None

    def _delay(self, ticket: _Ticket) -> float | None:
        if self._reserved or self._arrived:
            return None
        if ticket.at_rest and self._decoding[ticket.conversation]:
            return None
        now = self._now()
        if self._foreign.waiting and now < self._looked_at + LOOK_AGAIN:
            return self._looked_at + LOOK_AGAIN - now
        if self._beside_decode:
            self._accrue()
            missing = self._need(ticket) - self._credit
            # A nanosecond of rounding must not become a second wait.
            return missing / self._busy_share() if missing > 1e-9 else 0
        return 0

    async def _look(self) -> bool:
        """Reserve the place and look at the server's state; whether the piece may go now."""
        with self._lock:
            self._reserved = True
        load: Load | None = None
        try:
            if self.watch is not None and self._now() >= self._looked_at + LOOK_AGAIN:
                load = await self.watch(self._decoding.total())
        except BackendError:
            # A server that cannot tell its state can still do the piece; if not, the piece says so.
            load = None
        except BaseException:
            self._unreserve()
            raise
        with self._lock:
            if self.watch is not None and self._now() >= self._looked_at + LOOK_AGAIN:
                self._take_in(load or Load())
            allowed = not self._arrived and (not self._foreign.waiting or self._overdue())
        if not allowed:
            self._unreserve()
        return allowed

    def _take_in(self, load: Load) -> None:
        self._accrue()
        now = self._now()
        self._foreign, self._looked_at = load, now
        if load.waiting or load.decoding:
            self._shared_until = now + SHARED_FOR
        if not load.waiting:
            self._foreign_since = None
        elif self._foreign_since is None:
            self._foreign_since = now

    def _overdue(self) -> bool:
        since = self._foreign_since
        if since is None or self._now() - since < self.foreign_patience:
            return False
        self._foreign_since = None
        self.stats.overdue += 1
        return True

    def _unreserve(self) -> None:
        with self._lock:
            self._reserved = False
        self._wake()

    def _grant(self, ticket: _Ticket) -> Grant:
        with self._lock:
            beside = self._beside_decode or self._foreign.waiting > 0
            tokens = min(MOST_TOKENS, max(ticket.least, self._size(ticket.kind, beside)))
            return Grant(ticket.kind, tokens, beside)

    def _size(self, kind: Kind, beside: bool) -> int:
        seconds = self.decode_piece if beside else self.idle_piece
        if not beside and self._now() < self._shared_until:
            seconds /= 2
        if kind is Kind.DECODE and beside:
            per_token = self._beside_token()
            return min(FIRST_DECODE * 8, int(seconds / per_token)) if per_token else FIRST_DECODE
        cost = self._cost(kind, beside)
        tokens = cost.tokens(seconds)
        if tokens is None:
            return FIRST_DECODE if kind is Kind.DECODE else FIRST_PREFILL
        if beside:
            return max(tokens, LEAST_BESIDE)
        # Where the fixed part eats the whole time, tinier pieces would only do worse: up to twice the time is taken.
        least = FIRST_DECODE if kind is Kind.DECODE else FIRST_PREFILL
        return max(tokens, least, min(cost.balanced, cost.tokens(2 * seconds) or 0))

    def _cost(self, kind: Kind, beside: bool) -> LinearCost:
        if kind is Kind.DECODE:
            return self._decode_beside if beside else self._decode_idle
        return self._prefill

    def _beside_token(self) -> float:
        """Seconds one more decoded token adds to a main request that decodes in the same batches."""
        both, alone = self._decode_beside, self._decode_idle
        if both.known:
            return max(both.per_token - alone.per_token, both.per_token / 4)
        return alone.per_token

    def _charge(self, grant: Grant, seconds: float) -> float:
        """What the piece cost the main request, which got its own tokens from the same batches."""
        steps = grant.done_tokens if grant.kind is Kind.DECODE else min(1, grant.done_tokens)
        return max(seconds - steps * self._decode_idle.per_token, seconds / 4)

    async def _sleep(self, delay: float | None) -> None:
        """Until something changes, or ``delay`` seconds have passed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = None if delay is None else loop.call_later(delay, _resolve, future)
        self._waiters.add(future)
        try:
            await future
        finally:
            self._waiters.discard(future)
            if timer is not None:
                timer.cancel()

    def _preempt(self) -> None:
        if self._active is not None and self._arrived:
            self._active.preempt()

    def _wake(self) -> None:
        for future in tuple(self._waiters):
            _resolve(future)

    def _on_loop(self, fn: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            fn()
        else:
            loop.call_soon_threadsafe(fn)


class Piece:
    """One piece, as an async context manager; made by `Pacer.piece`."""

    def __init__(self, pacer: Pacer, ticket: _Ticket) -> None:
        self._pacer = pacer
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
        grant = await self._pacer.admit(self._ticket)
        # Nothing is awaited from here to the body, so an arrival finds either no piece or this one.
        self._grant = grant
        self._cancelling = self._task.cancelling()
        self._started = asyncio.get_running_loop().time()
        self._pacer.start(self)
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
        seconds = asyncio.get_running_loop().time() - self._started
        swallow = False
        if self._cut:
            ours = self._task.uncancel() <= self._cancelling
            # The connection may break before the cancellation is seen: that is our doing too.
            swallow = ours and exc_type is not None and issubclass(exc_type, (asyncio.CancelledError, BackendError))
            self._grant.preempted = swallow
        self._pacer.finish(self._grant, seconds, cut_short=exc_type is not None)
        return swallow


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _take(counter: Counter[str], key: str) -> bool:
    if not counter[key]:
        del counter[key]
        return False
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
    return True


class Unpaced:
    """The pacer's face for servers that schedule best-effort work themselves: every piece may be the whole."""

    def __init__(self) -> None:
        self.stats = PacerStats()
        self.watch: Callable[[int], Awaitable[Load | None]] | None = None

    def main_arrived(self, conversation: str) -> None:
        """Nothing to do."""

    def main_first_token(self, conversation: str) -> None:
        """Nothing to do."""

    def main_done(self, conversation: str) -> None:
        """Nothing to do."""

    def promote(self, conversation: str) -> None:
        """Nothing to do."""

    def settle(self, conversation: str) -> None:
        """Nothing to do."""

    def forget(self, conversation: str) -> None:
        """Nothing to do."""

    @contextlib.asynccontextmanager
    async def piece(
        self, conversation: str, kind: Kind, *, least: int = 1, at_rest: bool = False
    ) -> AsyncGenerator[Grant]:
        """Leave for everything at once."""
        del conversation, least, at_rest
        self.stats.pieces += 1
        yield Grant(kind, sys.maxsize, beside_decode=False)


Pacing = Pacer | Unpaced
