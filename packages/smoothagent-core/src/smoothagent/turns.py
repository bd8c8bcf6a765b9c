"""Safe cuts: where a history may be split without separating a call from its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smoothagent.message import Message, leading_system

Answer = tuple[int, int]
"""(index of the message with the call, index of the call in it)."""


def answers(history: Sequence[Message]) -> list[Answer | None]:
    """For each message, the call it answers; None for all but tool results.

    Ids may be minted anew every turn, so the nearest earlier call with the id that is still open counts. A result with
    an id that no open call has answers the nearest call without one: some servers give calls none, and the framework
    puts another in its place.
    """
    open_calls: dict[str, list[Answer]] = {}
    out: list[Answer | None] = []
    for i, message in enumerate(history):
        for k, call in enumerate(message.tool_calls):
            open_calls.setdefault(call.id, []).append((i, k))
        found: Answer | None = None
        if message.role == "tool":
            waiting = open_calls.get(message.tool_call_id or "") or open_calls.get("")
            if waiting:
                found = waiting.pop()
        out.append(found)
    return out


def pending(history: Sequence[Message]) -> int:
    """Number of calls without a result yet."""
    return sum(len(m.tool_calls) for m in history) - sum(a is not None for a in answers(history))


def safe_cuts(history: Sequence[Message]) -> list[int]:
    """All cuts c with |P| <= c <= len(history) that split no call from its results, ascending.

    A call without a result yet keeps every later cut unsafe: it may be warmed, never dropped.
    """
    links = answers(history)
    last_result: dict[int, int] = {}
    answered: dict[int, int] = {}
    for i, link in enumerate(links):
        if link is not None:
            last_result[link[0]] = i
            answered[link[0]] = answered.get(link[0], 0) + 1
    lead = leading_system(history)
    cuts: list[int] = [lead]
    open_until = -1
    for i, message in enumerate(history):
        if message.tool_calls:
            if answered.get(i, 0) < len(message.tool_calls):
                break
            open_until = max(open_until, last_result[i])
        if i + 1 > lead and i >= open_until:
            cuts.append(i + 1)
    return cuts


def last_safe_cut(cuts: Iterable[int], at_most: int) -> int | None:
    """The largest safe cut <= ``at_most``, or None."""
    best = None
    for cut in cuts:
        if cut > at_most:
            break
        best = cut
    return best


def turn_starts(history: Sequence[Message]) -> list[int]:
    """Where each turn begins: at an assistant message that follows other messages' end.

    A *turn* is one model call with its tool results; the user message before a call belongs to
    the turn of that call, so a window that starts at a turn begins with what it answers.
    """
    starts: list[int] = []
    lead = leading_system(history)
    begin = lead
    for i in range(lead, len(history)):
        if history[i].role != "assistant":
            continue
        starts.append(begin)
        end = i + 1
        while end < len(history) and history[end].role == "tool":
            end += 1
        begin = end
    if begin < len(history):
        starts.append(begin)
    return starts
