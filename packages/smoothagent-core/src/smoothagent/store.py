"""Where offloaded tool outputs are kept: content-addressed, durable, returned byte for byte.

A reference is committed to a prompt only after `OffloadStore.put` has returned, and `put` returns
only when the output would survive a crash. The name of an output is a digest of its bytes, so
putting it again changes nothing, writers need no lock, and no text of a message becomes a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_data_path

from smoothagent.blobs import open_blobs
from smoothagent.errors import ConfigurationError, StoreError, StoreUnavailableError, UnknownReferenceError

ID_CHARS = 20
"""Hex characters of an id: 80 bits of the SHA-256, a dozen prompt tokens. See `OffloadStore.put` for collisions."""

IN_USE_SECONDS = 86_400.0
"""Retention leaves alone what was put or read within this time."""

READ_TOOL = "read_offloaded"
"""Name of the tool that reads a reference back (`smoothagent.read_tool`)."""

_ID = f"[0-9a-f]{{{ID_CHARS}}}|[0-9a-f]{{64}}"
_NAME = re.compile(rf"({_ID})\.txt", re.ASCII)
_TEXT = re.compile(
    rf'\[output offloaded: [0-9]+ chars, [0-9]+ lines; read it with {READ_TOOL}\(ref="({_ID})"\)\]', re.ASCII
)
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Reference:
    """Names one stored output.

    Attributes:
        id: lower-case hex, `ID_CHARS` or 64 characters.
        chars: length of the text in code points.
        bytes: length of the stored UTF-8.
    """

    id: str
    chars: int
    bytes: int


class Retained(NamedTuple):
    """What one `OffloadStore.retain` did, in numbers of outputs and bytes."""

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int


def default_location() -> Path:
    """``offload`` in the user's data folder (on Linux ``~/.local/share/smoothagent/offload``)."""
    return user_data_path("smoothagent", appauthor=False) / "offload"


class OffloadStore:
    """Offloaded texts in a local folder or behind an fsspec URL.

    Every text comes back exactly, lone surrogates and NULs included. Several hosts that continue
    one conversation need a shared URL (``s3://bucket/agents``): with the default folder a reference
    means nothing on another host. Locally, a folder that is missing is created with mode 0700; the
    files (0600) lie in its subfolder ``outputs``, which is always kept at 0700, so a location that
    already exists and is open to others is left as it is and the outputs are private all the same.

    Nothing is created before the first `put`, but an impossible location is refused here. All
    methods block and may be called from any thread; instances can be pickled and forked.

    Args:
        location: a folder or fsspec URL; `default_location` where None.
        options: keyword arguments of the fsspec filesystem (``{"key": …, "secret": …}``).

    Raises:
        ConfigurationError: unknown protocol, or a filesystem package that is not installed.
    """

    def __init__(
        self, location: str | os.PathLike[str] | None = None, *, options: Mapping[str, Any] | None = None
    ) -> None:
        self._blobs = open_blobs(os.fspath(default_location() if location is None else location), options or {})
        # When this process last used what: reads leave no trace on remote filesystems.
        self._used: dict[str, float] = {}

    def __repr__(self) -> str:
        """Names the location, without credentials."""
        return f"OffloadStore({self.location!r})"

    @property
    def location(self) -> str:
        """The folder or URL, without credentials."""
        return self._blobs.location

    def put(self, content: str) -> Reference:
        """Store a text; on return it is durable. Idempotent: a text already there only counts as used again.

        A damaged copy is repaired. Where another text already has the short id (which somebody would
        have to construct on purpose), the whole digest becomes this one's id.

        Raises:
            StoreUnavailableError: the place cannot be written (nothing partial remains under a name).
        """
        data = content.encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(data).hexdigest()
        for key in (digest[:ID_CHARS], digest):
            if self._place(key, data):
                self._used[key] = time.time()
                return Reference(key, len(content), len(data))
        raise StoreError(f"two texts with the SHA-256 {digest} in {self.location!r}")  # pragma: no cover

    def get(self, reference: Reference | str) -> str:
        """The text, exactly as it was put.

        Raises:
            UnknownReferenceError: no such output here, or not an id at all.
            StoreUnavailableError: the place cannot be read.
            StoreError: what is stored is damaged.
        """
        key = _checked(reference)
        data = self._blobs.read(f"{key}.txt")
        if data is None:
            raise UnknownReferenceError(
                f"no offloaded output {key!r} in {self.location!r}: it was deleted, or put into another store "
                "(several hosts need one shared URL)"
            )
        if not _matches(data, key):
            raise StoreError(
                f"offloaded output {key!r} in {self.location!r} is damaged: its {len(data)} bytes do not have the "
                "digest they were stored under; putting the same output again repairs it"
            )
        self._used[key] = time.time()
        self._blobs.touch(f"{key}.txt")
        return data.decode("utf-8", "surrogatepass")

    def exists(self, reference: Reference | str) -> bool:
        """Whether an output is stored here (unread, so a damaged one counts); False for what is no id."""
        key = reference.id if isinstance(reference, Reference) else reference
        return re.fullmatch(_ID, key) is not None and self._blobs.exists(f"{key}.txt")

    def forget(self, reference: Reference | str) -> bool:
        """Delete an output now. False where it was not there. Every conversation with the same output loses it."""
        key = _checked(reference)
        self._used.pop(key, None)
        return self._blobs.remove(f"{key}.txt")

    def retain(
        self,
        *,
        max_age_seconds: float | None = None,
        max_bytes: int | None = None,
        in_use_seconds: float = IN_USE_SECONDS,
    ) -> Retained:
        """Delete the oldest outputs. Nothing is ever deleted unless this is called.

        Age counts from the last `put` or `get`. Remote filesystems keep the time of the last write
        only: there another process's `get` does not count, and its `put` only if the output was
        older than ten minutes.

        Args:
            max_age_seconds: delete what is older.
            max_bytes: then delete the oldest until the rest fits.
            in_use_seconds: never delete what is younger, whatever the limits say.
        """
        for name, value in (("max_age_seconds", max_age_seconds), ("max_bytes", max_bytes)):
            if value is not None and value < 0:
                raise ConfigurationError(f"retain({name}={value}): a limit cannot be negative")
        now = time.time()
        found = [(match[1], entry) for entry in self._blobs.entries() if (match := _NAME.fullmatch(entry.name))]
        aged = sorted((max(entry.modified, self._used.get(key, 0.0)), key, entry) for key, entry in found)
        kept, kept_bytes = len(aged), sum(entry.size for _, entry in found)
        for used, key, entry in aged:
            if now - used < in_use_seconds:
                break
            too_old = max_age_seconds is not None and now - used > max_age_seconds
            too_many = max_bytes is not None and kept_bytes > max_bytes
            if (too_old or too_many) and self._blobs.remove(entry.name, unless_after=entry.modified):
                self._used.pop(key, None)
                kept, kept_bytes = kept - 1, kept_bytes - entry.size
        total_bytes = sum(entry.size for _, entry in found)
        return Retained(len(found) - kept, total_bytes - kept_bytes, kept, kept_bytes)

    def _place(self, key: str, data: bytes) -> bool:
        """Have these bytes durable under the id; False where another text owns it."""
        name = f"{key}.txt"
        for _ in range(_ATTEMPTS):
            found = self._blobs.read(name)
            if found is None:
                if self._blobs.write(name, data, replace=False):
                    return True
                # Another writer was faster: look at what it wrote.
            elif found == data:
                if self._blobs.refresh(name, data):
                    return True
                # Retention took it since we looked: write it anew.
            elif _matches(found, key):
                return False
            else:
                return self._blobs.write(name, data, replace=True)
        raise StoreUnavailableError(
            f"offloaded output {key!r} keeps vanishing from {self.location!r}: another process deletes it at once"
        )


def reference_text(reference: Reference, content: str) -> str:
    """What stands in a prompt for an offloaded output: about 40 tokens, the same for the same output."""
    lines = content.count("\n") + (content != "" and not content.endswith("\n"))
    return f'[output offloaded: {reference.chars} chars, {lines} lines; read it with {READ_TOOL}(ref="{reference.id}")]'


def parse_reference(text: str) -> str | None:
    """The id where a whole message is a `reference_text`; None for any other text, such as one that quotes it."""
    match = _TEXT.fullmatch(text)
    return match[1] if match else None


def _checked(reference: Reference | str) -> str:
    key = reference.id if isinstance(reference, Reference) else reference
    if re.fullmatch(_ID, key) is None:
        raise UnknownReferenceError(
            f"{key[:80]!r} is no reference to an offloaded output: expected {ID_CHARS} hex digits"
        )
    return key


def _matches(data: bytes, key: str) -> bool:
    return hashlib.sha256(data).hexdigest().startswith(key)
