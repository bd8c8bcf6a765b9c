#!/usr/bin/env python
"""How long the scheduler takes to decide a step: ``uv run scripts/bench_policy.py [--json FILE]``.

64 latency-critical and 256 best-effort requests wait, 32 decode; the median and the 99th percentile of 2,000 decisions,
and beside them those of a plain sum over as many numbers, to tell how quick the machine is.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from smoothagent_sglang.latency import BatchLatency
from smoothagent_sglang.policy import Candidate, Sizes, Waiting, colocated, disaggregated

MODEL = BatchLatency(((1, 0.004), (256, 0.006), (2048, 0.03), (8192, 0.11)), 2e-8, 5e-11)
SIZES = Sizes(chunk=8192, piece=512, page=16)


def timed(work: Callable[[], object], repeats: int = 2000) -> dict[str, float]:
    """Microseconds of one call."""
    times = list[float]()
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    return {"p50_us": round(statistics.median(times), 1), "p99_us": round(times[int(0.99 * repeats)], 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(1)
    waiting = [Waiting(10 + rng.random(), rng.randrange(10, 400), rng.randrange(0, 8000)) for _ in range(64)]
    best_effort = [
        Candidate(rng.random() * 100, rng.randrange(100, 16000), 16 * rng.randrange(0, 500)) for _ in range(256)
    ]
    decodes = [rng.randrange(100, 16000) for _ in range(32)]
    told = {
        "colocated": timed(
            lambda: colocated(MODEL, decodes, waiting, best_effort, 0.0, sizes=SIZES, tbt=0.2, be_step=0.3)
        ),
        "disaggregated": timed(lambda: disaggregated(MODEL, waiting, best_effort, 0.0, sizes=SIZES, be_step=0.3)),
        "plain_sum": timed(lambda: sum(w.tokens for w in waiting) + sum(c.tokens for c in best_effort)),
    }
    print(json.dumps(told, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
