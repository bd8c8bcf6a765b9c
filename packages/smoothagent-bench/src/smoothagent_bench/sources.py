"""The code base that the agent reads: real files, and the commands that read them.

The files are the Python standard library's own sources, copied into a temporary workspace, so that a
benchmark needs no checkout and the agent can never touch anything else. What the agent runs are real
``head``, ``sed`` and ``tail`` processes, as lists of arguments, never through a shell.
"""

from __future__ import annotations

import io
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoothagent.errors import ConfigurationError

PACKAGES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml")
"""Packages of the standard library that make up the code base."""

COMMANDS = ("head", "sed", "tail")

_LEAST_LINES = 60


@dataclass(frozen=True, slots=True)
class Read:
    """One command that reads a part of a file.

    Attributes:
        argv: the command, to run in the workspace.
        path: the file, relative to the workspace.
        tokens: tokens of the output, as the served tokenizer counts them.
        text: the output it will have.
    """

    argv: tuple[str, ...]
    path: str
    tokens: int
    text: str


def lay_out(workspace: Path) -> list[str]:
    """Copy the code base into an empty folder.

    Returns:
        the files' paths relative to it, sorted.

    Raises:
        ConfigurationError: this Python comes without sources, or a command is missing.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise ConfigurationError(
            f"the agent's commands {', '.join(missing)} are not on PATH: install coreutils and sed"
        )
    library = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    for package in PACKAGES:
        for source in sorted((library / package).rglob("*.py")):
            name = source.relative_to(library).as_posix()
            if "test" in source.parts or not _readable(source):
                continue
            target = workspace / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            files.append(name)
    if len(files) < len(PACKAGES):
        raise ConfigurationError(
            f"found {len(files)} source files in {library}: the benchmark reads Python's own sources"
        )
    return sorted(files)


class Reader:
    """Plans one agent's reads through the code base, in an order of its own.

    What it reads next follows from the tokens asked for so far, so equal requests read equal parts.

    Args:
        workspace: where the files lie.
        files: their relative paths.
        count: tokens of a text.
        seed: agents with different seeds read different files.
    """

    def __init__(self, workspace: Path, files: Sequence[str], count: Callable[[str], int], seed: str) -> None:
        self._workspace, self._count = workspace, count
        order = list(files)
        random.Random(seed).shuffle(order)
        self._parts = self._walk(order)
        self._goal = 1
        self._debt = 0

    def next(self, tokens: int) -> Read:
        """The next read with about this many tokens of output.

        Lines cannot be split, so a read may be off by half a line; the difference is made up by the next.

        Raises:
            ConfigurationError: the code base is used up.
        """
        self._goal = max(1, tokens + self._debt)
        try:
            read = next(self._parts)
        except StopIteration:
            raise ConfigurationError("the code base is too small for this many steps: run fewer steps") from None
        self._debt = self._goal - read.tokens
        return read

    def _walk(self, order: Sequence[str]) -> Iterator[Read]:
        for name in order:
            # As `sed` and `head` count them: `str.splitlines` ends a line at a form feed, too.
            lines = list(io.StringIO((self._workspace / name).read_text(encoding="utf-8"), newline="\n"))
            start = 0
            # A rest of a few lines would make a read that is too short.
            while len(lines) - start >= _LEAST_LINES // 2:
                length, tokens = self._fit(lines[start:])
                text = "".join(lines[start : start + length])
                yield Read(_command(name, start, length, len(lines)), name, tokens, text)
                start += length

    def _fit(self, lines: Sequence[str]) -> tuple[int, int]:
        """How many lines come nearest to the goal, and their tokens."""
        best = (1, self._count(lines[0]))
        for length in range(2, len(lines) + 1):
            tokens = self._count("".join(lines[:length]))
            if abs(tokens - self._goal) < abs(best[1] - self._goal):
                best = (length, tokens)
            if tokens >= self._goal:
                break
        return best


def _command(name: str, start: int, length: int, total: int) -> tuple[str, ...]:
    if start == 0:
        return ("head", "-n", str(length), name)
    if start + length == total:
        return ("tail", "-n", str(length), name)
    return ("sed", "-n", f"{start + 1},{start + length}p", name)


def _readable(source: Path) -> bool:
    """Long enough to be read in parts, and ASCII, so that every tool's output decodes the same."""
    data = source.read_bytes()
    return data.isascii() and data.count(b"\n") >= _LEAST_LINES
