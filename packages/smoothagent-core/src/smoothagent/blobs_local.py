"""Blobs in a local folder, durable and private.

A write is: temporary file (0600) → fsync → link under its name → fsync of the folder (0700). So a
name never shows part of a blob, and a crash at any point leaves either nothing or all of it, plus
at most a temporary file that the next sweep removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from smoothagent.blobs import FOLDER, Entry, unavailable
from smoothagent.errors import StoreUnavailableError

_TEMPORARY = ".tmp-"
_TEMPORARY_SECONDS = 3600.0
"""A temporary file this old belongs to a writer that died."""

_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class LocalBlobs:
    """See `smoothagent.blobs.Blobs`. Holds no handle, so it can be pickled and survives a fork.

    Attributes:
        root: the absolute folder the user named; created 0700 where missing, else left as it is.
    """

    root: Path

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.root)

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.root / FOLDER

    def read(self, name: str) -> bytes | None:
        """The bytes, or None where there is no such file."""
        with self._failures("read from"):
            try:
                return (self.folder / name).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes, *, replace: bool) -> bool:
        """Store durably; False where the name was taken and ``replace`` is not set."""
        with self._failures("write to"):
            self._make_folder()
            temporary = self._write_temporary(data)
            try:
                if replace:
                    temporary.replace(self.folder / name)
                else:
                    _link(temporary, self.folder / name)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            _sync_folder(self.folder)
            return True

    def refresh(self, name: str, data: bytes) -> bool:  # noqa: ARG002  only remote places need it
        """Set the modification time to now; False where the file is gone."""
        with self._failures("write to"):
            self._make_folder()
            try:
                os.utime(self.folder / name)
            except FileNotFoundError:
                return False
            # Whoever linked it may not have synced the folder yet, and our caller relies on it.
            _sync_folder(self.folder)
            # Last, because of `remove`: it either has moved the file away (seen here) or sees the new time.
            return (self.folder / name).exists()

    def touch(self, name: str) -> None:
        """Set the modification time to now if this user may."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / name)

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        with self._failures("read from"):
            return (self.folder / name).exists()

    def remove(self, name: str, *, unless_after: float | None = None) -> bool:
        """Delete, unless modified after that time.

        Moved aside first and looked at then: a `refresh` between a look and a delete would be lost.
        """
        path = self.folder / name
        aside = self.folder / f"{_TEMPORARY}{name}-{os.getpid()}-{time.monotonic_ns()}"
        with self._failures("delete from"):
            try:
                path.replace(aside)
            except FileNotFoundError:
                return False
            if unless_after is not None and aside.stat().st_mtime > unless_after:
                aside.replace(path)
                return False
            aside.unlink()
            return True

    def entries(self) -> list[Entry]:
        """All files; temporary files of dead writers are deleted on the way."""
        out: list[Entry] = []
        with self._failures("list"):
            try:
                found = list(os.scandir(self.folder))
            except FileNotFoundError:
                return out
            for item in found:
                # It may vanish while we look: another process sweeps too.
                with contextlib.suppress(FileNotFoundError):
                    info = item.stat(follow_symlinks=False)
                    if not item.name.startswith(_TEMPORARY):
                        out.append(Entry(item.name, info.st_size, info.st_mtime))
                    # ctime, not mtime: a file that `remove` has just moved aside is old by mtime.
                    elif time.time() - info.st_ctime > _TEMPORARY_SECONDS:
                        Path(item.path).unlink()
        return out

    def _write_temporary(self, data: bytes) -> Path:
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.folder)  # mode 0600
        path = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return path

    def _make_folder(self) -> None:
        """Create what is missing, 0700, and refuse a folder that others could have put there."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(path.parent)
        info = self.folder.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.folder))
        if sys.platform != "win32":
            if info.st_uid != os.geteuid():
                raise StoreUnavailableError(
                    f"the offload folder {str(self.folder)!r} belongs to user id {info.st_uid}, not {os.geteuid()}: "
                    "tool outputs would not be private; give OffloadStore another location"
                )
            if stat.S_IMODE(info.st_mode) != 0o700:
                self.folder.chmod(0o700)

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Generator[None]:
        try:
            yield
        except StoreUnavailableError:
            raise
        except OSError as error:
            raise unavailable(doing, self.location, error) from error


def _link(source: Path, target: Path) -> None:
    """Give the file its name unless the name is taken (FileExistsError)."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without hard links. Two writers of one name hold the same bytes, so replacing is as good.
        source.replace(target)


def _sync_folder(folder: Path) -> None:
    """Make a new name durable; a no-op where the system cannot sync folders."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
