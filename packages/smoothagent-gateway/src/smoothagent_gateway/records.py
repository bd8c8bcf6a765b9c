"""What a restart needs: each conversation's last commit, in a SQLite file."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smoothagent import CommitRecord, ConfigurationError

log = logging.getLogger("smoothagent.gateway")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    space TEXT NOT NULL, name TEXT NOT NULL, covered INTEGER NOT NULL, digest TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (space, name)
);
CREATE INDEX IF NOT EXISTS by_digest ON records (space, digest);
"""
_VERSION = 1
_KEPT = 10_000
"""Conversations that are remembered, the newest. By number, since a clock may jump."""
_AT_ONCE = 500
"""Digests asked for at once; SQLite takes at least 999."""


class Found(NamedTuple):
    """A conversation's last commit."""

    name: str
    record: CommitRecord[dict[str, Any]]


class Records:
    """The newest commit of each conversation, found again by the chain digest of what it covers.

    All work is done in a thread of its own. What cannot be written is told once and kept in memory alone: a restart
    then makes that transformation again.

    Args:
        path: the file; made, with its folder, for this user alone.

    Raises:
        ConfigurationError: it cannot be opened, or is something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="smoothagent-records")
        self._said = False
        try:
            self._database = self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigurationError(
                f"the gateway's state cannot be kept in {path} ({error}): pass another file as --state, or --no-state"
            ) from error

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        database = sqlite3.connect(self._path, timeout=5.0, isolation_level=None)
        try:
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"it is of version {found}, this is version {_VERSION}")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version={_VERSION}")
        except sqlite3.Error:
            database.close()
            raise
        return database

    def put(self, space: str, name: str, record: CommitRecord[dict[str, Any]]) -> None:
        """Remember a commit; soon, and whatever comes of it."""
        with contextlib.suppress(RuntimeError):  # closed
            self._thread.submit(self._put, space, name, record)

    def _put(self, space: str, name: str, record: CommitRecord[dict[str, Any]]) -> None:
        try:
            told = json.dumps(record.to_dict(dict))
            row = (space, name, record.covered, record.digest, told)
            self._database.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", row)
            self._database.execute("DELETE FROM records WHERE rowid <= (SELECT max(rowid) FROM records) - ?", (_KEPT,))
        except Exception as error:
            if not self._said:
                self._said = True
                log.warning(
                    "a commit could not be written to %s (%r): the gateway goes on, and a restart makes such "
                    "transformations again",
                    self._path,
                    error,
                )

    async def find(self, space: str, digests: Sequence[str]) -> Found | None:
        """The conversation whose commit covers most of a history, whose prefixes have these digests."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._find, space, digests)
        except Exception as error:
            log.warning("what was remembered in %s could not be read: %r", self._path, error)
            return None

    def _find(self, space: str, digests: Sequence[str]) -> Found | None:
        for end in range(len(digests), 0, -_AT_ONCE):
            asked = digests[max(0, end - _AT_ONCE) : end]
            marks = ",".join("?" * len(asked))
            row = self._database.execute(
                f"SELECT name, record FROM records WHERE space = ? AND digest IN ({marks}) "  # noqa: S608  marks alone
                "ORDER BY covered DESC, rowid DESC LIMIT 1",
                (space, *asked),
            ).fetchone()
            if row is not None:
                return Found(row[0], CommitRecord[dict[str, Any]].from_dict(json.loads(row[1]), dict))
        return None

    def close(self) -> None:
        """Write what is left, and close the file."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._database.close)
        self._thread.shutdown()
