"""Where OpenClaw's configuration is, and what is remembered beside it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from smoothagent import ConfigurationError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Original:
    """A value that was changed.

    Attributes:
        path: where it is.
        existed: whether there was one.
        value: the one there was.
        written: the one that took its place.
        item: it is one more value of the list at ``path``.
    """

    path: list[str | int]
    existed: bool
    value: Any
    written: Any
    item: bool = False


@dataclass(frozen=True, slots=True)
class Remembered:
    """What ``configure`` has done, for ``run``, ``doctor`` and ``unconfigure``.

    Attributes:
        upstream: the API that the provider had.
        provider: the provider that goes through the gateway.
        model: the model that agents use first.
        window: tokens of the model's context.
        hard: tokens at which contexts are summarized.
        keep: tokens that stay verbatim at least; None for a quarter.
        port: the gateway's.
        originals: what was changed, in that order.
        plugin: OpenClaw loads ours, from `plugin_folder`.
        digest: of the configuration as it was written.
    """

    upstream: str
    provider: str
    model: str
    window: int
    hard: int
    keep: int | None
    port: int
    originals: list[Original]
    plugin: bool = False
    digest: str = ""


def digest_of(text: str) -> str:
    """Tells a configuration from one that its user has changed since."""
    return hashlib.sha256(text.encode()).hexdigest()


def config_path(given: Path | None, environment: Mapping[str, str]) -> Path:
    """OpenClaw's configuration file, as it finds it itself.

    Args:
        given: on the command line.
        environment: ``OPENCLAW_CONFIG_PATH``, ``OPENCLAW_STATE_DIR``, ``OPENCLAW_HOME``, ``OPENCLAW_PROFILE``.
    """
    if given is not None:
        return given.expanduser()
    if environment.get("OPENCLAW_CONFIG_PATH"):
        return Path(environment["OPENCLAW_CONFIG_PATH"]).expanduser()
    if environment.get("OPENCLAW_STATE_DIR"):
        return Path(environment["OPENCLAW_STATE_DIR"]).expanduser() / "openclaw.json"
    home = Path(environment.get("OPENCLAW_HOME") or environment.get("HOME") or "~").expanduser()
    profile = environment.get("OPENCLAW_PROFILE")
    return home / (f".openclaw-{profile}" if profile else ".openclaw") / "openclaw.json"


def beside(config: Path) -> Path:
    """Where what is remembered lies."""
    return config.with_name(f"{config.name}.smoothagent")


def backup_of(config: Path) -> Path:
    """Where the configuration lies as it was."""
    return config.with_name(f"{config.name}.before-smoothagent")


def plugin_folder(config: Path) -> Path:
    """Where OpenClaw loads our plugin from."""
    return config.absolute().with_name("smoothagent-plugin")


def read(path: Path) -> str:
    """A configuration's text. Raises ConfigurationError where there is none."""
    try:
        return path.read_bytes().decode()  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(
            f"OpenClaw's configuration {path} cannot be read ({reason}): start OpenClaw once, or pass --config"
        ) from error


def write(path: Path, text: str) -> None:
    """Write a file in one piece, for its user alone unless it was there. Raises ConfigurationError."""
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        target = path.resolve()  # a link stays one
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(mode)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


def remember(config: Path, remembered: Remembered) -> None:
    """Write it beside the configuration."""
    write(beside(config), json.dumps({"version": _VERSION, **asdict(remembered)}, indent=2) + "\n")


def recall(config: Path) -> Remembered | None:
    """What was remembered; None where nothing is. Raises ConfigurationError where it cannot be read."""
    path = beside(config)
    if not path.exists():
        return None
    try:
        told = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        if told.pop("version") != _VERSION:
            raise ValueError("another version's")
        originals = [Original(**one) for one in told.pop("originals")]
        return Remembered(**told, originals=originals)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): it holds what `smoothagent openclaw configure` has changed; the "
            f"configuration as it was is {backup_of(config)}"
        ) from error
