"""Results: one row a turn, in a file that is only appended to and from which a benchmark resumes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from smoothagent.errors import ConfigurationError, StoreUnavailableError

MODES = ("none", "sync", "lookahead")
"""No transformation, at the trigger on the critical path, and ahead of time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One turn of one agent. Times in seconds, sizes in tokens.

    Attributes:
        strategy: label of the strategy.
        mode: ``none``, ``sync`` or ``lookahead``.
        run: number of the run, from 0.
        agent: number of the agent, from 0.
        turn: number of the turn, from 0.
        commit: the request was the first with a transformed context.
        commit_s: time in ``on_commit``.
        ttft_s: from sending the request to its first token.
        turn_s: both together: what the agent waited.
        prompt_tokens: of the request.
        cached_tokens: of them found in the KV cache; None where the server does not say.
        completion_tokens: of the reply.
        tbt_mean_s: mean time between tokens of the reply.
        tbt_p99_s: 99th percentile of it (nearest rank).
        lookahead: at a commit ``hit`` (prepared and warm), ``late`` (prepared, but not all warm or past its
            time) or ``miss`` (made on the critical path although lookahead was on); else ``none``.
        reached_hard: the trigger was reached when the turn began.
        delegated: the turn is a sub-agent's.
        known_tokens: at a commit, tokens of the new view known at the last segment boundary.
        waited_s: time of ``commit_s`` spent waiting for a lookahead in flight.
        background_prefilled: tokens that lookahead computed since the last turn.
        background_generated: tokens that it generated.
        wasted: of both, what was given up since the last turn.
        late_commits: commits since the last turn that came late.
        mispredictions: commits since the last turn at another cut than the one warmed.
        failures: background work since the last turn that failed.
        elapsed_s: from the run's start to the end of the turn's reply.
    """

    strategy: str
    mode: str
    run: int
    agent: int
    turn: int
    commit: bool
    commit_s: float
    ttft_s: float
    turn_s: float
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    tbt_mean_s: float
    tbt_p99_s: float
    lookahead: str = "none"
    reached_hard: bool = False
    delegated: bool = False
    known_tokens: int | None = None
    waited_s: float = 0.0
    background_prefilled: int = 0
    background_generated: int = 0
    wasted: int = 0
    late_commits: int = 0
    mispredictions: int = 0
    failures: int = 0
    elapsed_s: float = 0.0

    def encode(self) -> str:
        """The row as one JSON line, without its end."""
        return json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()})

    @staticmethod
    def decode(line: str) -> Row:
        """Read what `encode` wrote; unknown fields are ignored. Raises ValueError where it is no row."""
        raw = json.loads(line)
        if not isinstance(raw, dict):
            raise ValueError(f"not a row: {line[:80]!r}")
        data = cast("dict[str, Any]", raw)
        try:
            return Row(**{k: v for k, v in data.items() if k in _FIELDS})
        except TypeError as error:
            raise ValueError(str(error)) from error


_FIELDS = frozenset(f.name for f in fields(Row))


class Group(NamedTuple):
    """What is measured at once: all agents of one strategy in one mode of one run. Complete or redone."""

    strategy: str
    run: int
    mode: str


class ResultsFile:
    """``results.jsonl``. A group's rows are written in one piece, so a torn last line is all a crash can leave.

    Args:
        folder: where the file lies; made if need be.

    Raises:
        StoreUnavailableError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        self._broken = folder / "broken.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            if not os.access(self.path, os.W_OK):
                raise PermissionError(f"{self.path} is not writable")
        except OSError as error:
            raise StoreUnavailableError(f"cannot write results to {folder}: {error}; choose another --out") from error

    def rows(self) -> list[Row]:
        """All rows, oldest first.

        Raises:
            ConfigurationError: a line other than the last is damaged.
        """
        text = self.path.read_text(encoding="utf-8")
        complete, _, torn = text.rpartition("\n")
        if torn:
            # Only a crash in the middle of a write leaves a line without an end: that group is redone.
            self._rewrite(f"{complete}\n" if complete else "")
        out: list[Row] = []
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                out.append(Row.decode(line))
            except ValueError as error:
                raise ConfigurationError(
                    f"{self.path}, line {number} is no result row ({error}): remove it, or choose another --out"
                ) from error
        return out

    def complete(self, agents: int, steps: int) -> set[Group]:
        """Groups of which every agent's every turn is there; rows of any other group are dropped."""
        rows = self.rows()
        seen: dict[Group, set[tuple[int, int]]] = {}
        for row in rows:
            seen.setdefault(group_of(row), set()).add((row.agent, row.turn))
        whole = {g for g, turns in seen.items() if len(turns) >= agents * steps}
        kept = [r for r in rows if group_of(r) in whole]
        if len(kept) < len(rows):
            self._rewrite("".join(f"{r.encode()}\n" for r in kept))
        return whole

    def append(self, rows: Iterable[Row]) -> None:
        """Add a whole group, durably."""
        data = "".join(f"{row.encode()}\n" for row in rows)
        try:
            with self.path.open("a", encoding="utf-8") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise StoreUnavailableError(f"cannot write results to {self.path}: {error}; free space there") from error

    def note_broken(self, group: Group, error: str) -> None:
        """Note a group that broke and is redone: what breaks half the time must not look sound."""
        with self._broken.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**group._asdict(), "error": error}) + "\n")

    def broken(self) -> dict[str, dict[str, int]]:
        """How many groups broke, by strategy and mode."""
        counts: dict[str, dict[str, int]] = {}
        lines = self._broken.read_text(encoding="utf-8").splitlines() if self._broken.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError):  # torn by a crash in the middle of a write
                noted = json.loads(line)
                modes = counts.setdefault(noted["strategy"], {})
                modes[noted["mode"]] = modes.get(noted["mode"], 0) + 1
        return counts

    def clear(self) -> None:
        """Start anew."""
        self._rewrite("")
        self._broken.unlink(missing_ok=True)
        (self.path.parent / "settings.json").unlink(missing_ok=True)

    def _rewrite(self, text: str) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)


def group_of(row: Row) -> Group:
    """The group a row belongs to."""
    return Group(row.strategy, row.run, row.mode)


def by_run(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows of each agent's each run, in order of turns."""
    runs: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in rows:
        runs.setdefault((row.strategy, row.mode, row.run, row.agent), []).append(row)
    for turns in runs.values():
        yield sorted(turns, key=lambda r: r.turn)


_LATER = frozenset({"server", "command"})
"""Settings that older folders do not name."""


def check_own(folder: Path) -> None:
    """Refuse to clear a folder that holds anything but a demo's results.

    Raises:
        ConfigurationError: it does, or nothing says what it holds.
    """
    path, rows = folder / "settings.json", folder / "results.jsonl"
    if not path.exists() and not (rows.exists() and rows.stat().st_size):
        return
    known = _settings(path) if path.exists() else {}
    # Older demos did not say that they are one.
    command = known.get("command") or ("demo" if known.get("profile") == "demo" else None)
    if command != "demo":
        what = f"a {command}" if command else "a benchmark"
        raise ConfigurationError(f"{folder} holds the results of {what}, which would be lost: choose another --out")


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is damaged ({error}), so nobody can say what the results beside it are: choose another --out"
        ) from error


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note what a folder's results were measured with, or refuse to mix them with others.

    Raises:
        ConfigurationError: the folder holds results of other settings; names the first that differs.
    """
    path = folder / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        return
    # Older folders do not name it, and every server was sent it.
    current = json.loads(json.dumps(settings))
    known = {**({"full_length": True} if "full_length" in current else {}), **_settings(path)}
    for name in sorted({*known, *current}):
        if name not in known and name in _LATER:
            continue  # a folder from before this was noted
        if known.get(name) != current.get(name):
            raise ConfigurationError(
                f"{folder} holds results measured with {name} {known.get(name)!r}, not {current.get(name)!r}: "
                "choose another --out"
            )
