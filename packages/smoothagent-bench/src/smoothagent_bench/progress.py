"""Live progress in the terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from smoothagent_bench.plots import NAMES
from smoothagent_bench.record import Group, Row


class LiveProgress:
    """One bar for the benchmark and one for the run in hand; a line for each run that is done.

    Args:
        console: where to.
        agents: agents a group.
        steps: turns a run.
    """

    def __init__(self, console: Console, *, agents: int, steps: int) -> None:
        self._console, self._turns = console, agents * steps
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
        )
        self._all: TaskID | None = None
        self._one: TaskID | None = None
        self._worst = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, group: Group, number: int, total: int) -> None:
        """A group begins."""
        if self._all is None:
            self._all = self._bars.add_task("[bold]runs", total=total, note="")
            self._one = self._bars.add_task("", total=self._turns, note="")
        assert self._one is not None
        self._bars.update(self._all, completed=number - 1)
        self._bars.reset(self._one, total=self._turns, description=_name(group), note="planning the script")
        self._worst, self._began = 0.0, time.monotonic()

    def turned(self, row: Row) -> None:
        """A turn is over."""
        assert self._one is not None
        self._worst = max(self._worst, row.turn_s)
        note = f"waited {row.turn_s:.2f} s"
        self._bars.update(self._one, advance=1, note=f"{note}, committed" if row.commit else note)

    def finished(self, group: Group) -> None:
        """A group is done."""
        assert self._all is not None
        self._bars.advance(self._all)
        took = time.monotonic() - self._began
        self._console.print(f"[green]✓[/] {_name(group)}: worst wait {self._worst:.2f} s  [dim]({took:.0f} s)")

    def failed(self, group: Group, error: str) -> None:
        """A group broke."""
        self._console.print(
            f"[yellow]![/] {_name(group)} broke and is discarded: {error}", markup=True, highlight=False
        )


class DownloadProgress:
    """A bar for the model file, shown only if there is something to fetch."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """See ``model_file.Progress``."""
        if what not in self._tasks:
            self._bars.start()
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done)


def rich_table(cells: list[list[str]]) -> Table:
    """The short table for a terminal."""
    heads, *body = cells
    out = Table(*[f"[bold]{heads[0]}", *heads[1:]], box=None, pad_edge=False, header_style="dim")
    out.columns[0].no_wrap = True
    for column in out.columns[1:]:
        column.justify = "right"
    for row in body:
        out.add_row(f"[bold]{row[0]}", *row[1:])
    return out


def _name(group: Group) -> str:
    return f"{group.strategy}, {NAMES[group.mode]}, run {group.run + 1}"
