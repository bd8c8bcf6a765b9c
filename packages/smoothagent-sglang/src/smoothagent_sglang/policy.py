"""Which lookahead work a step may carry (paper, section 4, Algorithms 1 and 2). Pure: no clock, no SGLang.

Latency-critical (LC) requests are the server's to schedule, as it always does; these functions say how much
best-effort (BE) prefill may go beside them. The paper's algorithms as printed are here, too (``literal``); the default
departs from them in what was measured to matter:

- Algorithm 1 counts the LC chunks twice, in the queue's expected time and in the batch's. By default a piece is
  admitted on what it adds to the batch.
- Algorithm 2 bounds the time between tokens and nothing else, so that BE work joins an LC request's own prefill and
  delays its first token. By default it does so only within that request's slack, and ``be_step`` bounds every step
  with BE work, on an idle server too: it is the longest that a request which arrives meanwhile waits for it.
- A piece is as large as fits, not of one size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from smoothagent_sglang.latency import BatchLatency, Load, chunk, decode

HEADS = 4
"""Candidates that a step looks at: each costs a search in the prefix cache."""


class Waiting(NamedTuple):
    """An LC request that waits for its prefill, or for the rest of it.

    Attributes:
        deadline: when its first token is due, seconds on the server's clock: arrival + SLO.
        tokens: still to be prefilled.
        prefix: cached before them.
    """

    deadline: float
    tokens: int
    prefix: int = 0


class Candidate(NamedTuple):
    """A BE request that could have a piece in this step.

    Attributes:
        urgency: the lower, the sooner it is its turn (`urgency`).
        tokens: still to be prefilled.
        prefix: cached before them.
    """

    urgency: float
    tokens: int
    prefix: int = 0


class Piece(NamedTuple):
    """A part of a candidate's prefill: which one, and how many tokens."""

    candidate: int
    tokens: int


class Sizes(NamedTuple):
    """How large pieces may be.

    Attributes:
        chunk: tokens of a step's prefill at most (SGLang's ``chunked_prefill_size``).
        piece: tokens of a piece at most.
        least: tokens below which none is worth a step, unless it is the last.
        page: a piece that is not the last ends on a multiple of this (SGLang's ``page_size``).
    """

    chunk: int
    piece: int
    least: int = 16
    page: int = 1


class Decision(NamedTuple):
    """What a step carries.

    Attributes:
        decodes: how many of the decodes.
        waiting: how many of the LC requests have a chunk in it.
        pieces: of BE requests, in the order of their admission.
        load: of the whole step.
    """

    decodes: int
    waiting: int
    pieces: list[Piece]
    load: Load


def urgency(
    model: BatchLatency, candidate: Candidate, deadline: float, arrival: float, sizes: Sizes, aging: float = 0.0
) -> float:
    """The order of BE requests: least laxity first, which is what time is left before one must run alone.

    All laxities fall alike as time goes by, so the order needs no clock: this changes only as a request is prefilled.

    Args:
        model: the server's.
        candidate: what is left of the request.
        deadline: when it is to be ready, the predicted commit; seconds on the server's clock.
        arrival: when it came.
        sizes: of its pieces.
        aging: seconds of laxity that a second of waiting is worth.
    """
    alone = model.whole(candidate.tokens, candidate.prefix, sizes.piece)
    return deadline - alone + aging * arrival


def slack(model: BatchLatency, waiting: Sequence[Waiting], now: float, sizes: Sizes) -> float:
    """Seconds by which the LC queue, in the server's own order, may be held up; infinite where none waits.

    Below 0 where one of them is late whatever is done. (Algorithm 1, lines 5 to 11.)
    """
    ahead, least = 0.0, math.inf
    gemm, prefill, step = model.gemm, model.prefill, sizes.chunk
    full = gemm(step)
    for deadline, tokens, prefix in waiting:
        # `BatchLatency.whole`, written out: this runs for the whole queue at every step.
        steps, rest = divmod(tokens, step)
        ahead += steps * full + gemm(rest) + prefill * (tokens * prefix + tokens * (tokens + 1) // 2)
        left = deadline - ahead
        if left < least:
            least = left
    return least - now


def next_chunks(waiting: Iterable[Waiting], sizes: Sizes) -> tuple[int, Load]:
    """How many LC requests have a chunk in the next step, and what they bring: the server's own, up to ``chunk``."""
    count, room, pairs = 0, sizes.chunk, 0
    for _, rest, prefix in waiting:
        if room <= 0:
            break
        tokens = min(rest, room)
        pairs += tokens * prefix + tokens * (tokens + 1) // 2
        room -= tokens
        count += 1
    return count, Load(sizes.chunk - room, 0, pairs)


def disaggregated(
    model: BatchLatency,
    waiting: Sequence[Waiting],
    candidates: Sequence[Candidate],
    now: float,
    *,
    sizes: Sizes,
    be_step: float,
    literal: bool = False,
) -> Decision:
    """A step of a prefill server (Algorithm 1).

    Args:
        model: the server's.
        waiting: the LC queue, in the order of the server's own policy.
        candidates: BE requests, in any order.
        now: seconds on the server's clock.
        sizes: of chunks and pieces.
        be_step: w, the most seconds that BE work may add to a step.
        literal: as printed.
    """
    budget = max(0.0, slack(model, waiting, now, sizes))
    count, load = next_chunks(waiting, sizes)
    if literal:
        pieces, load = _whole_pieces(model, load, candidates, budget, sizes)
        return Decision(0, count, pieces, load)
    limit = model.estimate(load) + min(budget, be_step)
    pieces, load = _fitting_pieces(model, load, candidates, limit, sizes, sizes.chunk - load.tokens)
    return Decision(0, count, pieces, load)


def colocated(
    model: BatchLatency,
    decodes: Sequence[int],
    waiting: Sequence[Waiting],
    candidates: Sequence[Candidate],
    now: float,
    *,
    sizes: Sizes,
    tbt: float,
    be_step: float,
    mixed: bool = True,
    literal: bool = False,
) -> Decision:
    """A step of a server that prefills and decodes (Algorithm 2).

    Args:
        model: the server's.
        decodes: lengths of the running requests, which the server decodes all of.
        waiting: the LC queue, in the order of the server's own policy.
        candidates: BE requests, in any order.
        now: seconds on the server's clock.
        sizes: of chunks and pieces.
        tbt: δ, the longest time between tokens in seconds.
        be_step: w, the longest step with BE work in seconds.
        mixed: decodes and prefill share a step; else a piece stands between two decode steps, and both count for δ.
        literal: as printed.
    """
    if literal:
        return _printed(model, decodes, waiting, candidates, sizes, tbt)
    running = Load(len(decodes), sum(decodes), 0)
    count, chunks = next_chunks(waiting, sizes)
    spare = slack(model, waiting, now, sizes)
    together, limit = bound(model, running, chunks, spare, tbt=tbt, be_step=be_step, mixed=mixed)
    room = sizes.chunk - chunks.tokens
    pieces, load = _fitting_pieces(model, together, candidates, limit, sizes, room)
    if not mixed and not load.tokens:
        load = running
    return Decision(len(decodes), count, pieces, load)


def bound(
    model: BatchLatency, running: Load, chunks: Load, spare: float, *, tbt: float, be_step: float, mixed: bool
) -> tuple[Load, float]:
    """What a step has before any BE work, and the seconds that it may take with it.

    Args:
        model: the server's.
        running: its decodes.
        chunks: LC prefill in it.
        spare: seconds by which the LC queue may be held up; infinite where none waits.
        tbt: δ.
        be_step: w.
        mixed: as `colocated` has it.
    """
    together = running.plus(chunks) if mixed else chunks
    limit = be_step
    if running.tokens:
        limit = min(limit, tbt if mixed else tbt - model.estimate(running))
    if spare < math.inf:
        limit = min(limit, model.estimate(together) + max(0.0, spare))
    return together, limit


def _printed(
    model: BatchLatency,
    decodes: Sequence[int],
    waiting: Sequence[Waiting],
    candidates: Sequence[Candidate],
    sizes: Sizes,
    tbt: float,
) -> Decision:
    """Algorithm 2 to the letter: everything is admitted in order while the batch keeps the bound."""
    load, admitted = Load(), [0, 0]
    for place, offered in enumerate(
        ((decode(length) for length in decodes), (chunk(min(w.tokens, sizes.chunk), w.prefix) for w in waiting))
    ):
        for one in offered:
            if model.estimate(load.plus(one)) > tbt:
                break
            load = load.plus(one)
            admitted[place] += 1
    pieces, load = _whole_pieces(model, load, candidates, tbt, sizes)
    return Decision(admitted[0], admitted[1], pieces, load)


def heads(candidates: Sequence[Candidate]) -> list[int]:
    """The candidates that a step looks at, the most urgent first."""
    return sorted(range(len(candidates)), key=[c[0] for c in candidates].__getitem__)[:HEADS]


def _whole_pieces(
    model: BatchLatency, load: Load, candidates: Sequence[Candidate], limit: float, sizes: Sizes
) -> tuple[list[Piece], Load]:
    """The paper's: candidates in order, each a piece of full size, until one does not fit."""
    pieces = list[Piece]()
    for place, one in sorted(enumerate(candidates), key=lambda pair: (pair[1].urgency, pair[0])):
        tokens = min(one.tokens, sizes.piece)
        more = load.plus(chunk(tokens, one.prefix))
        if model.estimate(more) > limit:
            break
        pieces.append(Piece(place, tokens))
        load = more
    return pieces, load


def _fitting_pieces(
    model: BatchLatency, load: Load, candidates: Sequence[Candidate], limit: float, sizes: Sizes, room: int
) -> tuple[list[Piece], Load]:
    """The most urgent candidates, each with a piece as large as fits, until one finds no room."""
    pieces = list[Piece]()
    if model.estimate(load) >= limit:
        return pieces, load
    for place in heads(candidates):
        one = candidates[place]
        tokens = fitting(model, load, one, limit, sizes, room)
        if not tokens:
            break
        pieces.append(Piece(place, tokens))
        load = load.plus(chunk(tokens, one.prefix))
        room -= tokens
    return pieces, load


def fitting(model: BatchLatency, load: Load, one: Candidate, limit: float, sizes: Sizes, room: int) -> int:
    """Tokens of the largest piece with which the step keeps its limit; 0 where none does that is worth it."""
    most, least = min(one.tokens, sizes.piece, room), min(one.tokens, max(sizes.least, 1))
    page, prefix = sizes.page, one.prefix
    before, gemm, prefill = load.tokens, model.gemm, model.prefill
    left = limit - model.decode * load.context - prefill * load.pairs

    def fits(tokens: int) -> bool:
        return gemm(before + tokens) + prefill * (tokens * prefix + tokens * (tokens + 1) // 2) <= left

    if most == one.tokens and fits(most):
        return most
    # The time rises with the size, so that the largest that fits is found by halving; sizes that end on a page.
    low, high = 0, (prefix + min(most, one.tokens - 1)) // page - prefix // page
    while low < high:
        middle = (low + high + 1) // 2
        if fits((prefix // page + middle) * page - prefix):
            low = middle
        else:
            high = middle - 1
    tokens = (prefix // page + low) * page - prefix if low else 0
    return tokens if tokens >= least else 0
