"""Scheduling as the paper prints it, and as an exhaustive search has it: slow, and plain enough to be believed."""

from __future__ import annotations

from collections.abc import Sequence

from smoothagent_sglang.latency import BatchLatency, Load
from smoothagent_sglang.policy import HEADS, Candidate, Piece, Sizes, Waiting


def batch_seconds(model: BatchLatency, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
    """Eq. 1, summed token by token. ``chunks``: (tokens, prefix)."""
    tokens = len(decodes) + sum(q for q, _ in chunks)
    pairs = sum(prefix + 1 + i for q, prefix in chunks for i in range(q))
    return model.gemm(tokens) + model.decode * sum(decodes) + model.prefill * pairs


def in_order(candidates: Sequence[Candidate]) -> list[int]:
    """Places of the candidates, the most urgent first."""
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].urgency, i))


def server_chunks(waiting: Sequence[Waiting], sizes: Sizes) -> list[tuple[int, int]]:
    """The LC chunks of the next step."""
    chunks, room = list[tuple[int, int]](), sizes.chunk
    for one in waiting:
        if room:
            chunks.append((min(room, one.tokens), one.prefix))
            room -= chunks[-1][0]
    return chunks


def printed_disaggregated(
    model: BatchLatency, waiting: Sequence[Waiting], candidates: Sequence[Candidate], now: float, sizes: Sizes
) -> list[Piece]:
    """Algorithm 1."""
    p, s_min = 0.0, float("inf")
    for r in waiting:
        done = 0
        while done < r.tokens:
            n = min(sizes.chunk, r.tokens - done)
            p += batch_seconds(model, [], [(n, r.prefix + done)])
            done += n
        s_min = min(s_min, r.deadline - now - p)
    budget = max(0.0, s_min)
    chunks, pieces = server_chunks(waiting, sizes), list[Piece]()
    for i in in_order(candidates):
        c = (min(candidates[i].tokens, sizes.piece), candidates[i].prefix)
        if batch_seconds(model, [], [*chunks, c]) > budget:
            break
        chunks.append(c)
        pieces.append(Piece(i, c[0]))
    return pieces


def printed_colocated(
    model: BatchLatency,
    decodes: Sequence[int],
    waiting: Sequence[Waiting],
    candidates: Sequence[Candidate],
    sizes: Sizes,
    tbt: float,
) -> tuple[int, int, list[Piece]]:
    """Algorithm 2."""
    running, chunks, pieces = list[int](), list[tuple[int, int]](), list[Piece]()
    for length in decodes:
        if batch_seconds(model, [*running, length], chunks) > tbt:
            break
        running.append(length)
    for one in waiting:
        c = (min(one.tokens, sizes.chunk), one.prefix)
        if batch_seconds(model, running, [*chunks, c]) > tbt:
            break
        chunks.append(c)
    lc = len(chunks)
    for i in in_order(candidates):
        c = (min(candidates[i].tokens, sizes.piece), candidates[i].prefix)
        if batch_seconds(model, running, [*chunks, c]) > tbt:
            break
        chunks.append(c)
        pieces.append(Piece(i, c[0]))
    return len(running), lc, pieces


def widest_pieces(
    model: BatchLatency, load: Load, candidates: Sequence[Candidate], limit: float, sizes: Sizes
) -> list[Piece]:
    """Every size is tried, the largest first."""
    pieces, room = list[Piece](), sizes.chunk - load.tokens
    if model.estimate(load) >= limit:
        return pieces
    for i in in_order(candidates)[:HEADS]:
        one = candidates[i]
        for n in range(min(one.tokens, sizes.piece, room), 0, -1):
            if n < one.tokens and ((one.prefix + n) % sizes.page or n < sizes.least):
                continue
            pairs = n * one.prefix + n * (n + 1) // 2
            more = Load(load.tokens + n, load.context, load.pairs + pairs)
            if model.estimate(more) <= limit:
                pieces.append(Piece(i, n))
                load, room = more, room - n
                break
        else:
            break
    return pieces
