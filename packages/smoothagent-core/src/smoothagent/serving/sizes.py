"""How large a piece of lookahead work may be, and what it costs the main request beside it."""

from __future__ import annotations

from collections import deque

from smoothagent.serving.costs import Kind, PieceCosts
from smoothagent.serving.piece import Grant

FIRST_PREFILL, FIRST_DECODE = 16, 2
"""Tokens of the first piece of a kind, when nothing is known of the server's speed."""
LEAST_BESIDE = 4
"""Tokens of a prefill piece beside a decode, whatever it seems to cost: on a busy machine a single token's cost is
mostly noise, and pieces of one token would never get anything done. The credit still bounds how often."""
MOST_TOKENS = 4096
LONG = 4
"""Times an ordinary piece that one on a server of its own lasts beside a decode."""
PAUSES_KEPT = 8
"""Tool times that are remembered; the shortest of them is what the next one may be."""
SHARE_OF_PAUSE = 1 / 3
"""Of a tool time, the most that one piece takes: the next main request may arrive in the middle of it."""


class PieceSizes:
    """Sizes pieces by time, from what they cost so far.

    Args:
        idle_piece: seconds a piece aims at in tool time.
        decode_piece: seconds a piece may add beside a decoding main request.
    """

    def __init__(self, idle_piece: float, decode_piece: float) -> None:
        self.idle_piece, self.decode_piece = idle_piece, decode_piece
        self._costs, self._elsewhere = PieceCosts(), PieceCosts()
        self.reset()

    def reset(self) -> None:
        """Forget the tool times; what was learnt of the server stays."""
        self._pauses: deque[float] = deque(maxlen=PAUSES_KEPT)

    def observe(self, grant: Grant, seconds: float) -> None:
        """A piece took ``seconds``."""
        costs = self._elsewhere if grant.elsewhere else self._costs
        costs.observe(grant.kind, grant.beside_decode, grant.done_tokens, seconds)

    def paused(self, seconds: float) -> None:
        """A tool time lasted ``seconds``."""
        self._pauses.append(seconds)

    @property
    def shortest_pause(self) -> float | None:
        """Seconds of the shortest tool time of late; None where there was none yet."""
        return min(self._pauses, default=None)

    def may_add(self, own_hurry: bool) -> float:
        """Seconds that one piece may add to a gap between tokens; more where only its own conversation waits."""
        return self.idle_piece if own_hurry else self.decode_piece

    def need(self, kind: Kind, least: int, own_hurry: bool) -> float:
        """Seconds of credit that a piece beside a decode must find."""
        if kind is Kind.COPY:
            return self.decode_piece
        return max(self.may_add(own_hurry), self._costs.added_token(kind) * least)

    def added(self, kind: Kind, tokens: int, seconds: float) -> float:
        """Seconds by which a piece of ``tokens`` that took ``seconds`` delayed the main request beside it."""
        each = self._costs.added_token(kind) if kind is not Kind.COPY else 0.0
        return min(seconds, each * tokens) if each else seconds

    def beside(self, kind: Kind, least: int, own_hurry: bool) -> int:
        """Tokens of a piece beside a decode."""
        each, seconds = self._costs.added_token(kind), self.may_add(own_hurry)
        if kind is Kind.DECODE:
            size = min(FIRST_DECODE * 8, int(seconds / each)) if each else FIRST_DECODE
        else:
            size = max(LEAST_BESIDE, int(seconds / each)) if each else FIRST_PREFILL
        return min(MOST_TOKENS, max(least, size))

    def idle(self, kind: Kind, least: int, *, shared: bool, elsewhere: bool = False, decoding: bool = False) -> int:
        """Tokens of a piece that lengthens nobody's steps.

        Args:
            kind: what it does.
            least: the fewest tokens that make sense.
            shared: other processes use the server, whose requests cannot cancel it.
            elsewhere: it runs on a server of its own.
            decoding: a main request decodes, so that the next one is more than a tool time away.
        """
        if elsewhere and decoding:
            # The longer, the less of it is the round trip; an arrival ends it with the step that is under way.
            seconds = self.idle_piece if shared else LONG * self.idle_piece
        else:
            seconds = min([self.idle_piece, *(p * SHARE_OF_PAUSE for p in self._pauses)])
            if shared:
                seconds = min(seconds, self.idle_piece / 2)
        cost = (self._elsewhere if elsewhere else self._costs).idle(kind)
        tokens = cost.tokens(seconds)
        size = FIRST_DECODE if kind is Kind.DECODE else FIRST_PREFILL
        if tokens is not None:
            # Where the fixed part eats the whole time, tinier pieces would only do worse: up to twice the time is
            # taken.
            size = max(tokens, size, min(cost.balanced, cost.tokens(2 * seconds) or 0))
        return min(MOST_TOKENS, max(least, size))
