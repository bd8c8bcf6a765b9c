"""What each transformation should give, written naively on plain wire mappings.

Nothing here uses the package's own cuts, counts or views, except the text of a reference to a stored output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from scripted import tokens_of
from smoothagent import OffloadStore
from smoothagent.store import parse_reference, reference_text

Wires = list[dict[str, Any]]


def size(wire: Mapping[str, Any]) -> int:
    """Characters of text and calls, as `scripted.CharCounter` counts."""
    calls = sum(len(c["function"]["name"]) + len(c["function"]["arguments"]) for c in calls_of(wire))
    return len(text_of(wire)) + calls


def calls_of(wire: Mapping[str, Any]) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", wire.get("tool_calls") or [])


def text_of(wire: Mapping[str, Any]) -> str:
    content = wire.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[dict[str, Any]]", content or [])
    return "".join(p.get("text", "") for p in parts if p["type"] == "text")


def total(wires: Sequence[Mapping[str, Any]]) -> int:
    return sum(map(size, wires))


def leading(view: Sequence[Mapping[str, Any]]) -> int:
    """|P|."""
    n = 0
    while n < len(view) and view[n]["role"] in ("system", "developer"):
        n += 1
    return n


def paired(wires: Sequence[Mapping[str, Any]], *, pending: bool = False) -> bool:
    """The law, 4: every result has its call before it, and (unless pending ones may be) every call its result."""
    waiting: dict[str, int] = {}
    for wire in wires:
        for call in calls_of(wire):
            waiting[call["id"]] = waiting.get(call["id"], 0) + 1
        if wire["role"] == "tool":
            if not waiting.get(wire["tool_call_id"]):
                return False
            waiting[wire["tool_call_id"]] -= 1
    return pending or not any(waiting.values())


def safe(view: Sequence[Mapping[str, Any]], cut: int) -> bool:
    """Whether a cut splits no call from its results, nor covers one that waits."""
    return cut >= leading(view) and paired(view[:cut]) and paired(view[cut:], pending=True)


def turns(view: Sequence[Mapping[str, Any]]) -> list[int]:
    """Starts of the completed turns: what lies between the previous turn's results and an assistant message."""
    starts: list[int] = []
    begin = leading(view)
    for i in range(begin, len(view)):
        if view[i]["role"] == "assistant":
            starts.append(begin)
            begin = i + 1
        elif view[i]["role"] == "tool":
            begin = i + 1
    return starts


def latest_user(covered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(m) for m in covered if m["role"] == "user"][-1:]


def dropped(view: Sequence[Mapping[str, Any]], cut: int) -> Wires:
    """P, the latest user message of what is covered, and the tail."""
    lead = leading(view)
    return [*map(dict, view[:lead]), *latest_user(view[lead:cut]), *map(dict, view[cut:])]


def keep_turns(view: Sequence[Mapping[str, Any]], count: int) -> Wires:
    starts = turns(view)
    return dropped(view, starts[-count]) if len(starts) > count else [dict(m) for m in view]


def keep_tokens(view: Sequence[Mapping[str, Any]], budget: int) -> Wires:
    """The most turns that fit ``budget`` tokens, P and the kept user message included; the newest always stays."""
    lead, starts = leading(view), turns(view)
    end = starts[-1] if starts else lead
    while end < len(view) and view[end]["role"] != "assistant":
        end += 1
    end += 1
    while end < len(view) and view[end]["role"] == "tool":
        end += 1
    if starts and end < len(view):
        starts.append(end)  # a turn that has begun
    if total(view) <= budget:
        return [dict(m) for m in view]
    out: Wires = [dict(m) for m in view]
    for start in starts:
        if start > lead:
            out = dropped(view, start)
            if total(out) <= budget:
                break
    return out


def bulky(wire: Mapping[str, Any], min_chars: int) -> bool:
    return wire["role"] == "tool" and len(text_of(wire)) >= min_chars and parse_reference(text_of(wire)) is None


def offload_cut(view: Sequence[Mapping[str, Any]], keep: int) -> int:
    outputs = [i for i, m in enumerate(view) if m["role"] == "tool"]
    if keep == 0:
        return len(view)
    return outputs[-keep] if len(outputs) > keep else leading(view)


def offloaded(view: Sequence[Mapping[str, Any]], keep: int, min_chars: int, store: OffloadStore) -> Wires:
    return offloaded_before(view, offload_cut(view, keep), min_chars, store)


def offloaded_before(view: Sequence[Mapping[str, Any]], cut: int, min_chars: int, store: OffloadStore) -> Wires:
    return [
        {**m, "content": reference_text(store.put(text_of(m)), text_of(m))}
        if i < cut and bulky(m, min_chars)
        else dict(m)
        for i, m in enumerate(view)
    ]


def answer(wires: Sequence[Mapping[str, Any]]) -> str:
    """What the scripted model says: it depends on all but the system messages, and on no id."""
    words = tokens_of([w for w in wires if w["role"] not in ("system", "developer")])
    return f"summary {hashlib.sha256(repr(words).encode()).hexdigest()[:12]}"


def summarized(view: Sequence[Mapping[str, Any]], cut: int, prefix: str, question: str) -> Wires:
    """View(H, c) of a summary with the model's answer."""
    lead = leading(view)
    covered = [dict(m) for m in view[lead:cut]]
    kept = latest_user([m for m in covered if not text_of(m).startswith(prefix)])
    if len(covered) <= len(kept):
        return [dict(m) for m in view]
    said = answer([*covered, {"role": "user", "content": question}])
    return [*map(dict, view[:lead]), {"role": "user", "content": prefix + said}, *kept, *map(dict, view[cut:])]


def summary_cut(view: Sequence[Mapping[str, Any]], limit: int) -> int:
    """The last safe cut whose view has at most ``limit`` tokens."""
    fitting = [c for c in range(leading(view), len(view) + 1) if safe(view, c) and total(view[:c]) <= limit]
    return max(fitting, default=leading(view))
