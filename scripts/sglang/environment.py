#!/usr/bin/env python
"""An environment in which the real SGLang server runs without a GPU: ``uv run scripts/sglang/environment.py 0.5.23``.

SGLang comes from the package index unmodified, but without what it depends on, most of which is for GPUs and several
gigabytes. What a CPU needs of it is in ``requirements-VERSION.txt``; the two imports that block are answered by
``stubs.py``. The environment is apart from the workspace's own, is built once, and is built again when any of these
changes. The last line printed is the path of its Python; what uv said is in ``build.log`` beside the environment.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from platformdirs import user_cache_path

HERE = Path(__file__).resolve().parent
STUBS_MODULE = "smoothagent_sglang_stubs"
"""What ``stubs.py`` is called where it is installed: a name nothing else has."""
SHOWN_LINES = 15
"""How many of uv's last lines a failure shows."""

PIP_SECTIONS = ("global", "install", ":env:")
"""The sections of pip's configuration that hold for ``pip install``; a later one wins."""
PASSED_ON = {
    # pip's option: uv's variables, of which the first is set unless the user has set one; what separates its values.
    "find-links": (("UV_FIND_LINKS",), ","),
    "index-url": (("UV_DEFAULT_INDEX", "UV_INDEX_URL"), " "),
    "extra-index-url": (("UV_INDEX", "UV_EXTRA_INDEX_URL"), " "),
    "constraint": (("UV_CONSTRAINT",), " "),
    "cert": (("SSL_CERT_FILE",), " "),
}
PATHS = ("find-links", "constraint", "cert")
"""The options whose values may be relative paths."""


class BuildError(Exception):
    """The environment cannot be built; says why in one line, and what uv said in those after it."""


def main() -> int:
    """Find or build the environment and print its Python."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("version", help=f"of SGLang: {', '.join(known_versions())}")
    parser.add_argument("--folder", type=Path, help="where to build it (default: in the user's cache folder)")
    parser.add_argument(
        "--python",
        default=f"{sys.version_info.major}.{sys.version_info.minor}",
        help="the Python it is for, a version or a path (default: %(default)s)",
    )
    options = parser.parse_args()
    folder: Path = options.folder or user_cache_path("smoothagent") / f"sglang-{options.version}"
    wanted = absolute(options.python) if os.sep in options.python else options.python
    try:
        python = environment(options.version, folder.absolute(), wanted)
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


def environment(version: str, folder: Path, python: str) -> Path:
    """The Python of a finished environment in ``folder``, built there unless it is there already.

    Raises:
        BuildError: the version is unknown, uv is missing or an installation failed.
    """
    if version not in known_versions():
        raise BuildError(f"no requirements for SGLang {version}; there are for {', '.join(known_versions())}")
    folder.mkdir(parents=True, exist_ok=True)
    built = python_in(folder)
    marker = folder / "finished"
    wanted = digest(version, python)
    # Whoever comes while another builds waits here, and then finds it built.
    with (folder / "lock").open("w") as lock:
        # The build's commands hold the lock too: one that outlives this process is waited for, not built over.
        os.set_inheritable(lock.fileno(), True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (built.exists() and marker.is_file() and marker.read_text(encoding="utf-8") == wanted):
            # An environment cannot be moved once it is built, so that it is finished is told by a file that is
            # removed first and written last.
            marker.unlink(missing_ok=True)
            build(version, folder, python)
            part = folder / "finished.part"
            part.write_text(wanted, encoding="utf-8")
            part.replace(marker)
    return built


def known_versions() -> list[str]:
    """The versions of SGLang that there are requirements for."""
    return sorted(path.stem.removeprefix("requirements-") for path in HERE.glob("requirements-*.txt"))


def digest(version: str, python: str) -> str:
    """Of all that the environment is made from: one with another digest is built again."""
    parts = [version.encode(), python.encode(), requirements(version).read_bytes(), (HERE / "stubs.py").read_bytes()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def python_in(folder: Path) -> Path:
    """The environment's Python."""
    return folder / "venv" / "bin" / "python"


def requirements(version: str) -> Path:
    """The file of what a CPU needs of that version's dependencies."""
    return HERE / f"requirements-{version}.txt"


def build(version: str, folder: Path, python: str) -> None:
    """Build ``folder/venv``, over whatever an interrupted build left there.

    Raises:
        BuildError: uv is missing, or one of its commands or the first import failed.
    """
    venv, built = folder / "venv", python_in(folder)
    # `uv run` says where it is itself; a `uv` on the path may be a wrapper that chooses by the working directory.
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise BuildError("uv is not on the path: install it, for instance with `pip install uv`")
    if venv.exists():
        shutil.rmtree(venv)
    (folder / "build.log").unlink(missing_ok=True)
    # Compiled here, as a server of three processes would take a minute to start where Python may not keep bytecode.
    install = (uv, "pip", "install", "--compile-bytecode", "--only-binary", ":all:", "--python", str(built))
    run(folder, "creating the environment", (uv, "venv", "--no-project", "--python", python, str(venv)))
    run(folder, "installing the requirements", (*install, "--requirement", str(requirements(version))))
    run(folder, f"installing SGLang {version}", (*install, "--no-deps", f"sglang=={version}"))
    packages = next((venv / "lib").glob("python*/site-packages"))
    shutil.copyfile(HERE / "stubs.py", packages / f"{STUBS_MODULE}.py")
    # Python executes such a line whenever it starts, so that the server's child processes have the stubs too.
    (packages / f"{STUBS_MODULE}.pth").write_text(f"import {STUBS_MODULE}\n", encoding="utf-8")
    run(folder, "importing SGLang", (str(built), "-c", "import sglang.srt.entrypoints.http_server"))


def run(folder: Path, what: str, command: Sequence[str]) -> None:
    """Run a command of the build in ``folder``, where no project's settings are found.

    Raises:
        BuildError: it failed; ends with the last lines of what it said.
    """
    print(f"{what} ...", flush=True)
    settings = {**uv_settings(os.environ, pip_settings()), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,
        check=False,
    )
    with (folder / "build.log").open("ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode() + done.stdout)
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        said = "\n".join(lines)
        raise BuildError(f"{what} failed with status {done.returncode}; all of it is in {log.name}\n{said}")


def pip_settings() -> dict[str, list[str]]:
    """What pip's configuration says about where packages come from, by option; nothing where there is no pip."""
    pip = (sys.executable, "-m", "pip", "config", "list")
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    found = dict[tuple[str, str], list[str]]()
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in PIP_SECTIONS and option in PASSED_ON:
            found[section, option] = str(ast.literal_eval(value)).split()
    return {option: found[section, option] for section in PIP_SECTIONS for at, option in found if at == section}


def uv_settings(variables: Mapping[str, str], settings: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The variables for uv, which reads none of pip's settings itself.

    Args:
        variables: those it is started with; what they already say to uv stays.
        settings: pip's, by option.
    """
    passed = {key: value for key, value in variables.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    for option, values in settings.items():
        names, separator = PASSED_ON[option]
        if values and not any(name in variables for name in names):
            passed[names[0]] = separator.join(absolute(value) if option in PATHS else value for value in values)
    if "UV_INDEX" in passed or "UV_EXTRA_INDEX_URL" in passed:
        # As pip does: take a release from any index, not only from the first that knows the package.
        passed.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return passed


def absolute(value: str) -> str:
    """A path that holds in another working directory too; a URL as it is."""
    return value if "://" in value else str(Path(value).expanduser().absolute())


if __name__ == "__main__":
    sys.exit(main())
