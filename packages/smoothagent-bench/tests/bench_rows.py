"""Rows for tests, made from the few numbers that matter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from smoothagent_bench.record import Row


def row(mode: str, turn: int, turn_s: float, **changes: Any) -> Row:
    """A row of strategy ``s``, run 0, agent 0."""
    values: dict[str, Any] = {
        "strategy": "s",
        "mode": mode,
        "run": 0,
        "agent": 0,
        "turn": turn,
        "commit": False,
        "commit_s": 0.0,
        "ttft_s": turn_s,
        "turn_s": turn_s,
        "prompt_tokens": 100 * (turn + 1),
        "cached_tokens": 100 * turn,
        "completion_tokens": 11,
        "tbt_mean_s": 0.01,
        "tbt_p99_s": 0.02,
        "elapsed_s": float(turn + 1),
    }
    return Row(**{**values, **changes})


def run(
    mode: str,
    seconds: list[float],
    *,
    commits: Collection[int] = (),
    reached: Collection[int] = (),
    **changes: Any,
) -> list[Row]:
    """A run's rows; a commit's turn has reached the trigger too."""
    return [
        row(mode, turn, s, commit=turn in commits, reached_hard=turn in commits or turn in reached, **changes)
        for turn, s in enumerate(seconds)
    ]
