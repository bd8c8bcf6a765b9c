"""When lookahead work may run on a server that has no best-effort class, and how much at once.

::

    a main request of this process      a piece may run
    ------------------------------      -----------------------------------------------
    has arrived, no token yet           never; the piece in flight is cancelled at once
    is decoding                         small, only as the credit allows, and only if tool time does not suffice
    none (tool time)                    freely, `idle_piece` seconds at a time

Work on a server of its own (``elsewhere``) does not lengthen the steps in which main requests decode, so it runs freely
beside them; where they are prefilled it stands still all the same, since the two servers may share their cores.

Credit bounds what pieces add to the time between tokens. A promoted conversation's work has a larger share, but
only of its own request's time: beside anybody else's it is as careful as before. Requests of other processes
are seen through ``watch``, where the server tells its state.
(docs/serving.md, "Pacing".)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from dataclasses import dataclass
from math import inf

from smoothagent.errors import BackendError, ConfigurationError
from smoothagent.serving.costs import Kind
from smoothagent.serving.credit import Credit
from smoothagent.serving.others import LOOK_AGAIN, Load, Others, Watch
from smoothagent.serving.piece import Grant, Piece, Ticket
from smoothagent.serving.sizes import PieceSizes
from smoothagent.serving.spent import Spent
from smoothagent.serving.wakeups import Wakeups

log = logging.getLogger("smoothagent")

BETWEEN_PIECES = 0.25
"""Seconds after a piece within which the next one of the same work is to be expected."""
LONG_PAUSE = 1.0
"""Seconds of tool time from which on it is taken to be long."""
HOLD = 5.0
"""Seconds that work waits for tool time, where the last one sufficed, before it runs beside a decode after all."""


@dataclass(slots=True)
class PacerStats:
    """What the pacer did; ``charged`` is in seconds of main decoding time."""

    pieces: int = 0
    preempted: int = 0
    overdue: int = 0
    charged: float = 0.0


class Pacer:
    """Admits pieces of lookahead work, one at a time for the whole server.

    The hooks (``main_*``, `promote`, `settle`, `forget`) may be called from any thread; pieces belong
    to the loop that runs them. Time is ``loop.time()`` only.

    Args:
        idle_piece: seconds a piece aims at in tool time; halved while other processes use the server, and at
            most a third of the shortest tool time of late.
        decode_piece: seconds a piece may add beside a decoding main request.
        share: most that pieces add to the time between a main request's tokens, as a fraction.
        promoted_share: the same while only promoted conversations decode, whose own work this is.
        foreign_patience: seconds to wait for another process's prefill before one small piece runs anyway.
        watch: tells the other processes' load; None where the server cannot tell.
    """

    def __init__(
        self,
        *,
        idle_piece: float = 0.15,
        decode_piece: float = 0.06,
        share: float = 0.25,
        promoted_share: float = 1.0,
        foreign_patience: float = 10.0,
        watch: Watch | None = None,
    ) -> None:
        for name, value in {
            "idle_piece": idle_piece,
            "decode_piece": decode_piece,
            "share": share,
            "promoted_share": promoted_share,
        }.items():
            if value <= 0:
                raise ConfigurationError(f"Pacer({name}={value}): it must be above 0, or nothing would ever be warmed")
        self.share = share
        self.promoted_share = promoted_share
        self.watch = watch
        self.foreign_patience = foreign_patience
        self.stats = PacerStats()
        self.spent = Spent()
        self.sizes = PieceSizes(idle_piece, decode_piece)
        self.reset()

    def reset(self) -> None:
        """Forget all requests and pieces, as in a forked child; what was learnt of the server stays."""
        self._lock = threading.RLock()
        self._arrived: Counter[str] = Counter()
        self._decoding: Counter[str] = Counter()
        self._promoted: set[str] = set()
        self._paused_at: float | None = None
        self.sizes.reset()
        self._move_to(None)

    def _move_to(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Pieces are admitted on ``loop`` from now on. What waited on another can be neither woken nor finished."""
        self._wakeups = Wakeups(loop)
        self._others = Others(self.foreign_patience)
        self._credit = Credit()
        self._queue: list[Ticket] = []
        self._granted: Grant | None = None
        self._active: Piece | None = None
        self._asking: asyncio.Future[None] | None = None
        self._reserved = False
        self._pressed = False
        self._worked_at = float("-inf")
        self._paused_at = None

    # -- what the agent does ---------------------------------------------------------------

    def main_arrived(self, conversation: str) -> None:
        """A main request is about to be sent: nothing runs until its first token."""
        with self._lock:
            self._accrue()
            if self._paused_at is not None:
                self.sizes.paused(self._wakeups.now - self._paused_at)
                self._paused_at = None
            # Work was left over when the tool time ended; between two pieces it may not be queued at the moment.
            self._pressed = bool(self._queue or self._granted) or self._wakeups.now < self._worked_at + BETWEEN_PIECES
            self._arrived[conversation] += 1
        self._wakeups.call(self._preempt)

    def main_first_token(self, conversation: str) -> None:
        """The main request answers; from now on it decodes."""
        with self._lock:
            self._accrue()
            if _take(self._arrived, conversation):
                self._decoding[conversation] += 1
        self._wakeups.call(self._wakeups.wake)

    def main_done(self, conversation: str) -> None:
        """The main request has ended, well or not."""
        with self._lock:
            self._accrue()
            _ = _take(self._decoding, conversation) or _take(self._arrived, conversation)
            self._pause_begins()
        self._wakeups.call(self._wakeups.wake)

    def promote(self, conversation: str) -> None:
        """The conversation's work is in a hurry: it goes first and with a larger share, until `settle`."""
        with self._lock:
            self._accrue()
            self._promoted.add(conversation)
        self._wakeups.call(self._wakeups.wake)

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
            self.spent.forget(conversation)
            del self._arrived[conversation], self._decoding[conversation]
            self._pause_begins()
        self._wakeups.call(self._wakeups.wake)

    # -- pieces ----------------------------------------------------------------------------

    def piece(
        self, conversation: str, kind: Kind, *, least: int = 1, at_rest: bool = False, elsewhere: bool = False
    ) -> Piece:
        """``async with pacer.piece(…) as grant``: waits for leave, then runs the body as one piece.

        A main request's arrival cancels the body; the block then ends without an error and with
        ``grant.preempted`` set. A cancellation from elsewhere passes through.

        Args:
            conversation: whose work it is.
            kind: what it does.
            least: the fewest tokens that make sense (a block of the server's cache).
            at_rest: the piece needs the conversation's main slot: never while its main request runs.
            elsewhere: it runs on a server of its own.
        """
        return Piece(self, Ticket(conversation, kind, least, at_rest, elsewhere))

    def begin(self) -> None:
        """Pieces will be admitted on the running loop, whose clock measures tool times from now on."""
        with self._lock:
            if self._wakeups.loop is None:
                self._move_to(asyncio.get_running_loop())

    def has_long_pauses(self) -> bool:
        """Whether tool time is long, and nobody else's: work then is best done where a piece gets all of the server."""
        with self._lock:
            pause = self.sizes.shortest_pause
            return pause is not None and pause >= LONG_PAUSE and not self._others.shared(self._wakeups.now)

    async def clear(self) -> None:
        """Wait until no main request of this process awaits its first token: even small ones would be in its way."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if loop is not self._wakeups.loop:
                    self._move_to(loop)
                if not self._arrived:
                    return
            await self._wakeups.sleep(None)

    async def admit(self, ticket: Ticket) -> Grant:
        """Wait until ``ticket`` may run, and take the place; `finish` gives it back."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop is not self._wakeups.loop:
                self._move_to(loop)
            ticket.since = loop.time()
            self._queue.append(ticket)
        try:
            while True:
                delay = self._delay_in_turn(ticket)
                if delay == 0 and await self._look(ticket):
                    # What was seen may forbid what nothing forbade before.
                    delay = self._delay(ticket, looked=True)
                    if delay == 0:
                        return self._grant(ticket)
                    self._unreserve()
                if delay != 0:
                    await self._wakeups.sleep(delay)
        finally:
            with self._lock:
                if ticket in self._queue:
                    self._queue.remove(ticket)
            self._wakeups.wake()

    def start(self, piece: Piece) -> None:
        """Make ``piece`` the one in flight."""
        with self._lock:
            self._active = piece

    def finish(self, grant: Grant, seconds: float, *, cut_short: bool) -> None:
        """The piece has ended after ``seconds``: charge it, let the next one in."""
        with self._lock:
            self.spent.add(grant.conversation, grant.kind, grant.done_tokens)
            if grant is not self._granted:
                return  # of a loop that is gone
            self._granted = None
            self._worked_at = self._wakeups.now
            self._accrue()
            self.stats.pieces += 1
            self.stats.preempted += grant.preempted
            if not cut_short:
                self.sizes.observe(grant, seconds)
            if grant.beside_decode:
                tokens = grant.tokens if cut_short else grant.done_tokens
                self._credit.charge(self.sizes.added(grant.kind, tokens, seconds) - grant.paid)
                self.stats.charged = self._credit.charged
            self._active = None
            self._reserved = False
        self._wakeups.wake()

    # -- whose turn it is ------------------------------------------------------------------

    def _delay_in_turn(self, ticket: Ticket) -> float | None:
        """Seconds until ``ticket`` may run; 0 now; None until something changes."""
        with self._lock:
            delay = self._delay(ticket)
            if delay != 0:
                return delay
            ahead = [t for t in self._queue if t.conversation in self._promoted] + self._queue
            first = next(t for t in ahead if self._delay(t) == 0)
            return 0 if first is ticket else None

    def _delay(self, ticket: Ticket, *, looked: bool = False) -> float | None:
        """Seconds until ``ticket`` may run if it were alone; ``looked``: the place is its own, and the look fresh."""
        with self._lock:
            if self._arrived or (self._reserved and not looked):
                return None
            if ticket.at_rest and self._decoding[ticket.conversation]:
                return None
            now = self._wakeups.now
            wait = 0.0 if looked else self._others.wait(now)
            if wait > 0:
                return wait
            if ticket.elsewhere or not self._beside_decode:
                return 0
            # Others have not told that they stopped decoding: only another look tells.
            look_in = inf if self._decoding else LOOK_AGAIN if looked else self._others.look_in(now)
            if look_in <= 0:
                return 0
            held = ticket.since + HOLD - now
            if held > 0 and not self._pressed and not self._promoted:
                return min(held, look_in)
            self._pressed = True
            self._accrue()
            return min(self._credit.wait(self._need(ticket), self._share()), look_in)

    async def _look(self, ticket: Ticket) -> bool:
        """Reserve the place and look at the server's state; whether the piece may go now."""
        with self._lock:
            self._reserved = True
            due = self.watch is not None and self._others.look_due(self._wakeups.now)
            # An answer comes between two steps of the server's; a piece elsewhere need not stand still for it, unless
            # somebody is known to wait.
            meanwhile = ticket.elsewhere and not self._others.load.waiting
        try:
            if due and not meanwhile:
                await self._ask()
            elif due and self._asking is None:
                self._asking = asyncio.ensure_future(self._ask())
                self._asking.add_done_callback(self._asked)
        except BaseException:
            self._unreserve()
            raise
        with self._lock:
            allowed = not self._arrived and (not self._others.load.waiting or self._overdue())
        if not allowed:
            self._unreserve()
        return allowed

    async def _ask(self) -> None:
        load: Load | None = None
        if self.watch is not None:
            # A server that cannot tell its state can still do the piece; if not, the piece says so.
            with contextlib.suppress(BackendError):
                load = await self.watch(self._decoding.total())
        with self._lock:
            self._accrue()
            self._others.seen(load or Load(), self._wakeups.now)

    def _asked(self, asking: asyncio.Future[None]) -> None:
        if self._asking is asking:
            self._asking = None
        if not asking.cancelled() and asking.exception() is not None:
            log.debug("the server's state could not be asked: %r", asking.exception())

    def _overdue(self) -> bool:
        overdue = self._others.overdue(self._wakeups.now)
        self.stats.overdue += overdue
        return overdue

    def _unreserve(self) -> None:
        with self._lock:
            self._reserved = False
        self._wakeups.wake()

    # -- how much, and at what price -------------------------------------------------------

    @property
    def _beside_decode(self) -> bool:
        return bool(self._decoding or self._others.load.decoding)

    @property
    def _own_hurry(self) -> bool:
        """Whether the only requests that pieces slow down are those of promoted conversations."""
        return bool(self._promoted) and not self._others.load.decoding and self._decoding.keys() <= self._promoted

    def _share(self) -> float:
        return self.promoted_share if self._own_hurry else self.share

    def _need(self, ticket: Ticket) -> float:
        """Credit a piece beside decoding must find."""
        return self.sizes.need(ticket.kind, ticket.least, self._own_hurry)

    def _accrue(self) -> None:
        cap = max([self.sizes.may_add(self._own_hurry), *(self._need(t) for t in self._queue)])
        idle = not self._arrived and not self._beside_decode
        self._credit.accrue(self._wakeups.now, decoding=self._beside_decode, idle=idle, share=self._share(), cap=cap)

    def _grant(self, ticket: Ticket) -> Grant:
        with self._lock:
            beside = not ticket.elsewhere and (self._beside_decode or self._others.load.waiting > 0)
            if beside:
                size = self.sizes.beside(ticket.kind, ticket.least, self._own_hurry)
            else:
                size = self.sizes.idle(
                    ticket.kind,
                    ticket.least,
                    shared=self._others.shared(self._wakeups.now),
                    elsewhere=ticket.elsewhere,
                    # A copy of main's KV can be made in tool time only, however short that is.
                    decoding=bool(self._decoding) and not any(t.at_rest for t in self._queue),
                )
            grant = Grant(ticket.conversation, ticket.kind, size, beside, elsewhere=ticket.elsewhere)
            if beside:
                # Paid in advance, so that what accrues meanwhile is not lost to the cap; `finish` settles.
                grant.paid = self._need(ticket)
                self._accrue()
                self._credit.charge(grant.paid)
            self._granted = grant
            return grant

    # -- pauses and preemption -------------------------------------------------------------

    def _pause_begins(self) -> None:
        if self._paused_at is None and not self._arrived and not self._decoding and self._wakeups.loop is not None:
            self._paused_at = self._wakeups.now

    def _preempt(self) -> None:
        if self._active is not None and self._arrived:
            self._active.preempt()


def _take(counter: Counter[str], key: str) -> bool:
    if not counter[key]:
        del counter[key]
        return False
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
    return True
