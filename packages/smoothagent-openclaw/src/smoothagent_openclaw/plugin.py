"""The plugin that OpenClaw loads: its files, and which providers are another plugin's already."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any, cast

from smoothagent import ConfigurationError
from smoothagent_openclaw.places import write

ID = "smoothagent"
"""The plugin's, and its compaction provider's."""
_MANIFEST = "openclaw.plugin.json"
_FILES = ("index.ts", "messages.ts", "package.json", _MANIFEST)


def files(provider: str | None) -> dict[str, str]:
    """The plugin's files, for a provider whose requests it marks; None for none."""
    source = resources.files("smoothagent_openclaw").joinpath("plugin")
    told = {name: source.joinpath(name).read_text(encoding="utf-8") for name in _FILES}
    manifest: dict[str, Any] = json.loads(told[_MANIFEST])
    manifest["providers"] = [] if provider is None else [provider]
    return {**told, _MANIFEST: json.dumps(manifest, indent=2) + "\n"}


def install(folder: Path, provider: str | None) -> None:
    """Write it. Raises ConfigurationError where that cannot be done, or something else lies there."""
    if folder.exists() and not _is_ours(folder):
        raise ConfigurationError(f"{folder} is there and is not ours: move it, or pass --no-plugin")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made: {error.strerror or error}") from error
    for name, text in files(provider).items():
        write(folder / name, text)


def remove(folder: Path) -> None:
    """Take it away, if it is ours."""
    if _is_ours(folder):
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def is_as_shipped(folder: Path, provider: str | None) -> bool:
    """Whether it is there, as this version has it."""
    try:
        return all((folder / name).read_text(encoding="utf-8") == text for name, text in files(provider).items())
    except (OSError, UnicodeDecodeError):
        return False


def _is_ours(folder: Path) -> bool:
    try:
        manifest: Any = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and cast("dict[str, Any]", manifest).get("id") == ID


def may_be_marked(provider: str) -> bool | None:
    """Whether no plugin of OpenClaw's own has this provider's name; None where OpenClaw is not found.

    One provider has one plugin: for those that OpenClaw brings along (``vllm``, ``ollama``, …) it is theirs.
    """
    found = shutil.which("openclaw")
    if found is None:
        return None
    extensions = Path(found).resolve().parent / "dist" / "extensions"
    manifests = list(extensions.glob(f"*/{_MANIFEST}"))
    if not manifests:
        return None
    names = set[str]()
    for path in manifests:
        try:
            told: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        owned = cast("dict[str, Any]", told).get("providers") if isinstance(told, dict) else None
        names |= {str(name).lower() for name in cast("list[object]", owned if isinstance(owned, list) else [])}
    return provider.lower() not in names
