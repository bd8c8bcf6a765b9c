"""Named bytes in a folder or behind a URL: what `smoothagent.store` needs of the place it writes to.

Two kinds implement `Blobs`: `smoothagent.blobs_local` calls the operating system itself, because
fsspec's local filesystem neither syncs to disk nor sets modes; `smoothagent.blobs_remote` speaks
fsspec. `open_blobs` picks one by the location.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from smoothagent.errors import ConfigurationError, StoreUnavailableError

FOLDER = "outputs"
"""Everything lies in this folder under the location, so that its mode is ours to set, whoever made the location."""


class Entry(NamedTuple):
    """One stored blob.

    Attributes:
        name: its name.
        size: bytes.
        modified: seconds since the epoch, of the last write or refresh.
    """

    name: str
    size: int
    modified: float


class Blobs(Protocol):
    """A flat place of named bytes. All methods block, and raise StoreUnavailableError where the place fails.

    Names are the caller's own: nothing here ever sees a path from message content.
    """

    @property
    def location(self) -> str:
        """Where the blobs are, fit for messages: without credentials."""
        ...

    def read(self, name: str) -> bytes | None:
        """The bytes, or None where there is no such blob."""
        ...

    def write(self, name: str, data: bytes, *, replace: bool) -> bool:
        """Store durably before returning. False where the name was taken and ``replace`` is not set."""
        ...

    def refresh(self, name: str, data: bytes) -> bool:
        """Make an existing blob's modification time now; False where it is gone. ``data`` is what it holds."""
        ...

    def touch(self, name: str) -> None:
        """Like `refresh` after a read: cheap, and where it cannot be done not an error."""
        ...

    def exists(self, name: str) -> bool:
        """Whether the blob is there."""
        ...

    def remove(self, name: str, *, unless_after: float | None = None) -> bool:
        """Delete, unless modified after that time (seconds since the epoch). Whether it was deleted."""
        ...

    def entries(self) -> Iterable[Entry]:
        """All blobs, and leftovers of crashed writers swept on the way."""
        ...


def open_blobs(location: str, options: Mapping[str, Any]) -> Blobs:
    """The place behind a folder path or fsspec URL. Creates nothing yet.

    Raises:
        ConfigurationError: an unknown protocol, a missing package, or unusable options.
        StoreUnavailableError: the filesystem could not be reached.
    """
    # Imported here because both modules import this one for the protocol.
    from smoothagent.blobs_local import LocalBlobs
    from smoothagent.blobs_remote import RemoteBlobs, local_path

    if not location or "\0" in location:
        raise ConfigurationError(
            f"OffloadStore location {location!r} is no path and no URL: give a folder or fsspec URL"
        )
    folder = local_path(location, options)
    return LocalBlobs(folder) if folder is not None else RemoteBlobs(location, options)


def shown(location: str) -> str:
    """A location without the credentials that a URL may carry."""
    return re.sub(r"//[^/@]*@", "//***@", location)


_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space, call retain(), or give OffloadStore another location",
    errno.EDQUOT: "the quota is used up: free space, call retain(), or give OffloadStore another location",
    errno.EACCES: "make it readable and writable for this user, or give OffloadStore another location",
    errno.EPERM: "make it readable and writable for this user, or give OffloadStore another location",
    errno.EROFS: "it is on a read-only file system: give OffloadStore a writable location",
    errno.ENOTDIR: "a part of that path is a file: give OffloadStore the path of a folder",
    errno.EEXIST: "a part of that path is a file: give OffloadStore the path of a folder",
}


def unavailable(doing: str, location: str, cause: Exception) -> StoreUnavailableError:
    """The error for a failed access: what was done, where, why, and what to do about it."""
    code = cause.errno if isinstance(cause, OSError) else None
    remedy = _REMEDIES.get(code or 0, "check that the location exists and can be reached")
    why = (cause.strerror if isinstance(cause, OSError) else None) or f"{type(cause).__name__}: {cause}"
    error = StoreUnavailableError(f"cannot {doing} the offload store at {location!r} ({shown(why)}): {remedy}")
    error.errno = code
    return error
