"""Blobs behind any fsspec URL: object stores, SFTP, memory.

Object stores make a write visible all at once, so there is no temporary name (a move would be a
second upload there); every write is read back before it counts. Where a plain file server shows
part of a write, the store's digest check refuses it and the next `put` repairs it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

from fsspec.core import url_to_fs  # pyright: ignore[reportUnknownVariableType]
from fsspec.implementations.local import LocalFileSystem

from smoothagent.blobs import FOLDER, Entry, shown, unavailable
from smoothagent.errors import ConfigurationError, StoreError, StoreUnavailableError

REWRITE_AFTER_SECONDS = 600.0
"""`refresh` uploads again only what is older: most remote filesystems cannot change a modification time alone."""

_PACKAGES = {
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hdfs": "pyarrow",
    "http": "aiohttp",
    "https": "aiohttp",
    "oci": "ocifs",
    "oss": "ossfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
    "webdav": "webdav4[fsspec]",
}


class _FileSystem(Protocol):
    """The part of ``fsspec.AbstractFileSystem`` in use here."""

    def cat_file(self, path: str) -> bytes: ...

    def pipe_file(self, path: str, value: bytes) -> object: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> object: ...

    def exists(self, path: str) -> bool: ...

    def rm_file(self, path: str) -> object: ...

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]: ...

    def modified(self, path: str) -> datetime: ...

    def invalidate_cache(self, path: str | None = None) -> object: ...


def _open(location: str, options: Mapping[str, Any]) -> tuple[_FileSystem, str]:
    protocol = location.split("://", 1)[0].split("::")[-1] if "://" in location else "file"
    try:
        return cast("tuple[_FileSystem, str]", url_to_fs(location, **options))
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package!r}" if package else str(error)
        raise ConfigurationError(
            f"OffloadStore location {shown(location)!r} needs a package that is not installed: {remedy}"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"OffloadStore cannot use {shown(location)!r} with options {sorted(options)}: {shown(str(error))}; "
            "give a folder or a URL of a protocol that fsspec knows"
        ) from error
    except Exception as error:  # each filesystem has its own connection errors
        raise unavailable("open", shown(location), error) from error


def local_path(location: str, options: Mapping[str, Any]) -> Path | None:
    """The absolute folder of a location on this machine, or None where it is elsewhere."""
    filesystem, root = _open(location, options)
    return Path(root) if isinstance(filesystem, LocalFileSystem) else None


class RemoteBlobs:
    """See `smoothagent.blobs.Blobs`. Opens its filesystem anew in a forked or unpickling process.

    Args:
        location: an fsspec URL.
        options: the filesystem's own keyword arguments.
    """

    def __init__(self, location: str, options: Mapping[str, Any]) -> None:
        self._url = location
        self._options = dict(options)
        self._opened: tuple[int, _FileSystem, str] | None = None

    def __reduce__(self) -> tuple[type[RemoteBlobs], tuple[str, dict[str, Any]]]:
        """Pickle as the arguments: connections do not travel."""
        return RemoteBlobs, (self._url, self._options)

    @property
    def location(self) -> str:
        """The URL without credentials."""
        return shown(self._url)

    def read(self, name: str) -> bytes | None:
        """The bytes, or None where there is no such blob."""
        with self._failures("read from") as (filesystem, folder):
            return _read(filesystem, f"{folder}/{name}")

    def write(self, name: str, data: bytes, *, replace: bool) -> bool:  # noqa: ARG002  see below
        """Store and read back. Never False: few remote filesystems can create exclusively."""
        with self._failures("write to") as (filesystem, folder):
            path = f"{folder}/{name}"
            try:
                filesystem.pipe_file(path, data)
            except FileNotFoundError:  # a filesystem with real folders
                filesystem.makedirs(folder, exist_ok=True)
                filesystem.pipe_file(path, data)
            if _read(filesystem, path) != data:
                raise StoreUnavailableError(
                    f"the offload store at {self.location!r} did not keep {len(data)} bytes it accepted as {name}: "
                    "check its free space and versioning, or give OffloadStore another location"
                )
            return True

    def refresh(self, name: str, data: bytes) -> bool:
        """Upload again what is older than `REWRITE_AFTER_SECONDS`."""
        with self._failures("write to") as (filesystem, folder):
            try:
                if time.time() - _modified(filesystem, f"{folder}/{name}") < REWRITE_AFTER_SECONDS:
                    return True
            except NotImplementedError:
                return True
            except FileNotFoundError:
                return False
        return self.write(name, data, replace=True)

    def touch(self, name: str) -> None:
        """Nothing: a read should not cost an upload."""

    def exists(self, name: str) -> bool:
        """Whether the blob is there; not answered from a cached listing."""
        with self._failures("read from") as (filesystem, folder):
            filesystem.invalidate_cache(folder)
            return filesystem.exists(f"{folder}/{name}")

    def remove(self, name: str, *, unless_after: float | None = None) -> bool:
        """Delete, unless modified after that time."""
        with self._failures("delete from") as (filesystem, folder):
            path = f"{folder}/{name}"
            filesystem.invalidate_cache(folder)
            try:
                if unless_after is not None and _modified(filesystem, path) > unless_after:
                    return False
                filesystem.rm_file(path)
            except FileNotFoundError:
                return False
            return True

    def entries(self) -> list[Entry]:
        """All blobs. Raises StoreError where the filesystem tells no modification times."""
        with self._failures("list") as (filesystem, folder):
            filesystem.invalidate_cache(folder)
            try:
                found = [item for item in filesystem.ls(folder, detail=True) if item["type"] == "file"]
            except FileNotFoundError:
                return []
            out: list[Entry] = []
            for item in found:
                path = str(item["name"])
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    out.append(Entry(path.rsplit("/", 1)[-1], int(item["size"] or 0), _modified(filesystem, path)))
            return out

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Generator[tuple[_FileSystem, str]]:
        pid = os.getpid()
        if self._opened is None or self._opened[0] != pid:
            filesystem, root = _open(self._url, self._options)
            self._opened = pid, filesystem, f"{root.rstrip('/')}/{FOLDER}"
        try:
            yield self._opened[1:]
        except StoreError:
            raise
        except NotImplementedError as error:
            raise StoreError(
                f"the filesystem at {self.location!r} cannot do this ({doing} the offload store): "
                "for retention use the service's own lifecycle rules, else give OffloadStore another location"
            ) from error
        except Exception as error:  # botocore, aiohttp, paramiko … each raise their own
            raise unavailable(doing, self.location, error) from error


def _read(filesystem: _FileSystem, path: str) -> bytes | None:
    try:
        return filesystem.cat_file(path)
    except FileNotFoundError:
        return None


def _modified(filesystem: _FileSystem, path: str) -> float:
    when = filesystem.modified(path)
    # Some filesystems give UTC without saying so.
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
