"""A listener to benchmarks that run within a test."""

from __future__ import annotations

import pytest

from smoothagent_bench.record import Group, Row


class Quiet:
    """It only fails."""

    def started(self, group: Group, number: int, total: int) -> None: ...

    def turned(self, row: Row) -> None: ...

    def finished(self, group: Group) -> None: ...

    def failed(self, group: Group, error: str) -> None:
        pytest.fail(f"{group}: {error}")
