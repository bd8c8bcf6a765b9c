#!/usr/bin/env python3
"""What the hooks cost: microseconds a call by history length, and a commit's re-verification.

    uv run scripts/bench_hooks.py

Targets: a hook that does not commit <= 200 µs at 1,000 known messages and flat in their number;
a freshly parsed history <= 10 ms per 1,000 messages; a commit's re-verification <= 20 ms.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from smoothagent import (
    KeepRecent,
    LookaheadRuntime,
    LookaheadStrategy,
    Offload,
    OffloadStore,
    OpenAIBackend,
    Pipeline,
    SlidingWindow,
    Summarize,
)

LENGTHS = (100, 1_000, 4_000)
REPEATS = 60
NEVER = 10**9
NOWHERE = "http://127.0.0.1:9/v1"
"""The discard port: nothing answers, so that what the hooks start costs little beside them."""

Wire = dict[str, Any]


def history(length: int) -> list[Wire]:
    """A conversation of tool calls with ~500 characters a message."""
    out: list[Wire] = [{"role": "system", "content": "s" * 200}]
    while len(out) < length:
        call = {"id": f"c{len(out)}", "type": "function", "function": {"name": "sed", "arguments": '{"a": 1}'}}
        out.append({"role": "user", "content": f"step {len(out)}"})
        out.append({"role": "assistant", "content": "a" * 300, "tool_calls": [call]})
        out.append({"role": "tool", "tool_call_id": call["id"], "content": "x y " * 120})
    return out


def strategies(folder: str) -> dict[str, Callable[[], LookaheadStrategy]]:
    """Strategies whose triggers are out of reach."""
    store = OffloadStore(folder)

    def offload() -> Offload:
        return Offload(NEVER, store=store, allow_unreadable=True)

    return {
        "summarize": lambda: Summarize(NEVER),
        "offload": offload,
        # Outputs that are never worth moving: nothing is ever prepared, so every boundary asks again.
        "offload, short": lambda: Offload(NEVER, store=store, allow_unreadable=True, min_chars=NEVER),
        "keep-recent": lambda: KeepRecent(10**5, at_turns=10**6),
        "sliding-window": lambda: SlidingWindow(10**6),
        "pipeline": lambda: Pipeline(offload(), Summarize(NEVER)),
    }


def measure(strategy: LookaheadStrategy, length: int) -> tuple[float, float, float]:
    """Medians: seconds of a commit hook, of a boundary hook, and of a commit hook on a freshly parsed history."""
    runtime: LookaheadRuntime[Wire] = LookaheadRuntime(strategy, backend=OpenAIBackend(NOWHERE, "m"))
    messages = history(length)
    runtime.on_commit(messages)
    commits: list[float] = []
    boundaries: list[float] = []
    for _ in range(REPEATS):
        messages.append({"role": "user", "content": "more"})
        commits.append(timed(lambda: runtime.on_commit(messages)))
        messages.append({"role": "assistant", "content": "ok"})
        boundaries.append(timed(lambda: runtime.on_segment_boundary(messages)))
    fresh: list[float] = []
    for _ in range(7):
        parsed: list[Wire] = json.loads(json.dumps(messages))
        fresh.append(timed(lambda parsed=parsed: runtime.on_commit(parsed)))
    runtime.close()
    return statistics.median(commits), statistics.median(boundaries), statistics.median(fresh)


def reverification(length: int) -> float:
    """Median seconds of a commit hook that drops most of the history: verified anew and spliced."""
    taken: list[float] = []
    for _ in range(7):
        runtime: LookaheadRuntime[Wire] = LookaheadRuntime(KeepRecent(5, at_turns=length // 3))
        messages = history(length)
        runtime.on_segment_boundary(messages)
        taken.append(timed(lambda runtime=runtime, messages=messages: runtime.on_commit(messages)))
        assert runtime.last_commit is not None
        runtime.close()
    return statistics.median(taken)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> int:
    """Print the table."""
    out = sys.stdout.write
    logging.getLogger("smoothagent").setLevel(logging.ERROR)  # that nothing answers
    out(f"{'strategy':16}" + "".join(f"{n:>9} msgs: commit/boundary µs, fresh ms" for n in LENGTHS) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in strategies(folder).items():
            cells = [measure(make(), n) for n in LENGTHS]
            out(f"{name:16}" + "".join(f"{c * 1e6:>21.0f} /{b * 1e6:5.0f},{f * 1e3:10.1f}" for c, b, f in cells) + "\n")
    out(f"commit with re-verification at 1000 messages: {reverification(1000) * 1e3:.1f} ms\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
