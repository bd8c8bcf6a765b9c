"""What commits have left: found again by the chain digest of what they covered, in memory and in a SQLite file."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothagent import CommitRecord, ConfigurationError

log = logging.getLogger("smoothagent.gateway")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS commits (
    space TEXT NOT NULL, digest TEXT NOT NULL, covered INTEGER NOT NULL, name TEXT NOT NULL, first INTEGER NOT NULL,
    record TEXT NOT NULL, PRIMARY KEY (space, digest)
);
"""
_VERSION = 2
_KEPT = 10_000
"""Commits that are remembered on disk, the newest. By number, since a clock may jump."""
_BYTES = 512 * 2**20
"""Bytes of the file beyond which the older half of them is forgotten."""
_IN_MEMORY = 4096
"""Commits that are remembered in memory."""
_AT_ONCE = 500
"""Digests asked for at once; SQLite takes at least 999."""
_LOCKED_SECONDS = 1.0
"""Seconds to wait for a file that another process has locked."""
_CLOSING_SECONDS = 3.0
"""Seconds that closing waits for what is still to be written."""


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit.

    Attributes:
        record: what it covered, and what stands for that.
        name: the conversation's.
        first: nothing of its history was transformed before.
    """

    record: CommitRecord[dict[str, Any]]
    name: str
    first: bool

    def fits(self, length: int) -> bool:
        """Whether a history of so many messages has as much after what is covered as the strategy leaves verbatim."""
        whole = self.record.whole
        return whole is None or length >= whole.input


class Records:
    """The commits of all conversations.

    A history that was taken back behind a commit (an answer that is made again, another branch) goes on from the one
    before that, or from none.

    Args:
        path: the file; made, with its folder, for this user alone. None keeps them in memory alone.
        made_with: tells apart what another strategy has made, or for another server.

    Raises:
        ConfigurationError: the file cannot be opened, or is something else.
    """

    def __init__(self, path: Path | None = None, made_with: str = "") -> None:
        self._made_with = made_with
        self._memory: OrderedDict[tuple[str, str], Committed] = OrderedDict()
        self._file = None if path is None else _File(path)

    def put(self, space: str, committed: Committed) -> None:
        """Remember a commit; on disk soon, and whatever comes of it."""
        space = self._key(space)
        key = (space, committed.record.digest)
        self._memory.pop(key, None)
        self._memory[key] = committed
        while len(self._memory) > _IN_MEMORY:
            self._memory.popitem(last=False)
        if self._file is not None:
            self._file.put(space, committed)

    def has(self, space: str, record: CommitRecord[dict[str, Any]]) -> bool:
        """Whether a commit is in memory."""
        return (self._key(space), record.digest) in self._memory

    def known(self, space: str, chain: Sequence[str], length: int | None = None) -> Committed | None:
        """The commit to go on from, of those in memory.

        Args:
            space: whose.
            chain: digests of the history's first 1, 2, … messages.
            length: of the history, where not all of its digests are given.
        """
        space = self._key(space)
        found = [self._memory[space, digest] for digest in chain if (space, digest) in self._memory]
        return _chosen(found, len(chain) if length is None else length)

    async def find(self, space: str, chain: Sequence[str]) -> Committed | None:
        """The same, of those on disk, too."""
        if self._file is not None:
            for committed in await self._file.find(self._key(space), chain):
                self._memory.setdefault((self._key(space), committed.record.digest), committed)
        return self.known(space, chain)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._file is not None:
            self._file.close()

    def _key(self, space: str) -> str:
        return f"{self._made_with}/{space}"


def _chosen(found: Sequence[Committed], length: int) -> Committed | None:
    """Of commits that hold, by what they cover: the last that leaves enough, else the one that leaves most.

    A history that is shorter than what was first committed was sent as it is then.
    """
    fitting = [committed for committed in found if committed.fits(length)]
    if fitting:
        return fitting[-1]
    return found[0] if found and not found[0].first else None


class _File:
    """The SQLite file. Reads do not wait for writes, which another process may hold up.

    Args:
        path: where.

    Raises:
        ConfigurationError: it cannot be opened, or is something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="smoothagent-records")
        self._reading = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="smoothagent-records-read")
        self._waiting: dict[tuple[str, str], Committed] = {}
        self._lock = threading.Lock()
        self._said = False
        try:
            self._writer = self._writing.submit(self._made).result()
            self._reader = self._reading.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self._writing.shutdown()
            self._reading.shutdown()
            raise ConfigurationError(
                f"the gateway's state cannot be kept in {path} ({error}): pass another file as --state, or --no-state"
            ) from error

    def _made(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        database = self._open()
        try:
            found = database.execute("PRAGMA user_version").fetchone()[0]
            tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if found not in (0, _VERSION) or (found == 0 and tables):
                raise sqlite3.DatabaseError(f"it is of version {found}, this is version {_VERSION}")
            self._path.chmod(0o600)  # one that was there may be open to others
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version={_VERSION}")
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=_LOCKED_SECONDS, isolation_level=None)

    # ---- writing -------------------------------------------------------------------------------

    def put(self, space: str, committed: Committed) -> None:
        """Write it soon."""
        with self._lock:
            self._waiting[space, committed.record.digest] = committed
        with contextlib.suppress(RuntimeError):  # closed
            self._writing.submit(self._write)

    def _write(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        rows = [
            (*key, c.record.covered, c.name, c.first, json.dumps(c.record.to_dict(dict))) for key, c in waiting.items()
        ]
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.executemany("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?, ?)", rows)
                self._forget_old()
                self._writer.execute("COMMIT")
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
        except Exception as error:
            with self._lock:  # with the next one
                self._waiting = {**waiting, **self._waiting} if len(self._waiting) < _IN_MEMORY else self._waiting
            if not self._said:
                self._said = True
                log.warning(
                    "a commit could not be written to %s (%r): the gateway goes on, and a restart makes such "
                    "transformations again",
                    self._path,
                    error,
                )

    def _forget_old(self) -> None:
        def one(query: str) -> int:
            return int(self._writer.execute(query).fetchone()[0])

        count, kept = one("SELECT count(*) FROM commits"), _KEPT
        pages = one("PRAGMA page_count") - one("PRAGMA freelist_count")
        if pages * one("PRAGMA page_size") > _BYTES:
            kept = count // 2
        if count > kept:
            self._writer.execute(
                "DELETE FROM commits WHERE rowid IN (SELECT rowid FROM commits ORDER BY rowid LIMIT ?)", (count - kept,)
            )

    # ---- reading -------------------------------------------------------------------------------

    async def find(self, space: str, chain: Sequence[str]) -> list[Committed]:
        """The commits that hold for a history."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reading, self._find, space, chain)
        except Exception as error:
            log.warning("what was remembered in %s could not be read: %r", self._path, error)
            return []

    def _find(self, space: str, chain: Sequence[str]) -> list[Committed]:
        found = list[Committed]()
        for begin in range(0, len(chain), _AT_ONCE):
            asked = chain[begin : begin + _AT_ONCE]
            marks = ",".join("?" * len(asked))
            rows = self._reader.execute(
                f"SELECT name, first, record FROM commits WHERE space = ? AND digest IN ({marks})",  # noqa: S608  marks
                (space, *asked),
            )
            for name, first, told in rows:
                record = CommitRecord[dict[str, Any]].from_dict(json.loads(told), dict)
                found.append(Committed(record, name, bool(first)))
        return found

    def close(self) -> None:
        """Write what is left, as far as that does not take long."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._writing.submit(self._write).result(_CLOSING_SECONDS)
        for pool, database in ((self._writing, self._writer), (self._reading, self._reader)):
            with contextlib.suppress(RuntimeError, TimeoutError):
                pool.submit(database.close).result(_CLOSING_SECONDS)
            pool.shutdown(wait=False, cancel_futures=True)
