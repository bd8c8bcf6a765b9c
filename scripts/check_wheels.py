"""Build every wheel and try each extra of `smoothagent` from them in an empty environment.

For each extra (and for none) a fresh virtual environment outside the workspace gets `smoothagent[extra]`: the suite's
own distributions from the wheels just built, everything else from the configured index as wheels only, so that an
installation that would compile anything fails here. Then every module of the suite is imported, warnings being errors,
every entry point is loaded and the command is run.

    python scripts/check_wheels.py [--keep DIR]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Runs inside the empty environment. `-W error` holds for it too.
PROBE = """
import importlib, pkgutil, sys
from importlib.metadata import distributions, entry_points

optional, packages = sys.argv[1].split(","), sys.argv[2:]
for name in packages:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith(".__main__") and module.name not in optional:
            importlib.import_module(module.name)
groups = [group for group in entry_points().groups if group.startswith("smoothagent.")]
for group in groups:
    for entry in entry_points(group=group):
        if entry.module not in optional:
            entry.load()
installed = len(list(distributions()))
print(f"{len(packages)} packages imported, {len(groups)} entry point groups loaded, {installed} distributions")
"""


STRICT = ("-W", "error", "-W", "ignore:Importing Send from langgraph.constants is deprecated")
"""Warnings are errors; the one that is not is trustcall's, which langmem imports."""
OPTIONAL = {
    "smoothagent-autogen": {"bench": "harness"},
    "smoothagent-gateway": {"bench": "harness"},
    "smoothagent-langchain": {
        "bench": "harness",
        "classic": "classic",
        "deepagents": "deepagents",
        "langmem": "langmem",
    },
    "smoothagent-llamaindex": {"bench": "harness"},
    "smoothagent-miniagent": {"bench": "harness"},
}
"""Extras of a member, by the module that needs what they bring: imported only where the extra is installed."""


class CheckError(Exception):
    """A wheel, or an installation from it, is not as it must be."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, quietly unless it fails; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"{' '.join(words)} exited {done.returncode}\n{done.stdout}{done.stderr}"
        raise CheckError(msg)
    return done.stdout


def build_wheels(out: Path) -> list[Path]:
    """Build the meta distribution's wheel and every member's into `out`."""
    run("uv", "build", "--all-packages", "--wheel", "--out-dir", out)
    return sorted(out.glob("*.whl"))


def import_packages(wheel: Path) -> list[str]:
    """The top-level packages a wheel carries; none for the meta distribution."""
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return sorted(top for top in tops if not top.endswith(".dist-info"))


def check_contents(wheel: Path) -> None:
    """A wheel carries its licence and typed packages of ours, and nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        msg = f"{wheel.name} has no licence file"
        raise CheckError(msg)
    for package in import_packages(wheel):
        if not package.startswith("smoothagent"):
            msg = f"{wheel.name} would install {package!r} beside the suite's packages"
            raise CheckError(msg)
        if f"{package}/py.typed" not in names:
            msg = f"{wheel.name} has no {package}/py.typed: type checkers would ignore its annotations"
            raise CheckError(msg)


def check_meta(wheel: Path) -> None:
    """The meta distribution is metadata only."""
    if packages := import_packages(wheel):
        msg = f"{wheel.name} is the meta distribution and must carry no modules, but has {packages}"
        raise CheckError(msg)


@contextmanager
def empty_environment(keep: Path | None, label: str) -> Generator[Path]:
    """A virtual environment without any package, outside the workspace."""
    if keep:
        folder = keep.resolve() / label
        folder.mkdir(parents=True, exist_ok=True)
        run("uv", "venv", "--no-project", "--clear", "--python", sys.executable, folder / "venv", cwd=folder)
        yield folder / "venv"
        return
    with tempfile.TemporaryDirectory(prefix=f"smoothagent-{label}-") as name:
        run("uv", "venv", "--no-project", "--python", sys.executable, Path(name) / "venv", cwd=Path(name))
        yield Path(name) / "venv"


def check_installed_from(wheels: list[Path], site: Path) -> list[str]:
    """The suite's installed modules are the wheels' own, byte for byte; return the packages."""
    packages: list[str] = []
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        info = next(name.split("/")[0] for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        if not (site / info).exists():
            continue
        for name in archive.namelist():
            if not name.startswith(info) and (site / name).read_bytes() != archive.read(name):
                msg = f"{name} was not installed from {wheel.name}"
                raise CheckError(msg)
        packages += import_packages(wheel)
    return packages


def check_extras(wheel: Path, extras: Sequence[str], wheels: list[Path], keep: Path | None) -> str:
    """Install a distribution with extras into an empty environment and try all that is there."""
    name = wheel.name.split("-")[0].replace("_", "-")
    with empty_environment(keep, "-".join([name, *extras])) as venv:
        folder, python = venv.parent, venv / "bin" / "python"
        wanted = f"{name}[{','.join(extras)}] @ {wheel.as_uri()}"
        links = str(wheel.parent)
        run(
            *("uv", "pip", "install", "--python", python, "--only-binary", ":all:", "--find-links", links),
            *("--refresh-package", "smoothagent-core", wanted),
            cwd=folder,
        )
        where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
        packages = check_installed_from(wheels, Path(where))
        optional = [
            f"{member.replace('-', '_')}.{module}"
            for member, modules in OPTIONAL.items()
            for extra, module in modules.items()
            if not (member == name and extra in extras)
        ]
        imported = run(python, *STRICT, "-c", PROBE, ",".join(optional), *packages, cwd=folder).strip()
        run(venv / "bin" / "smoothagent", "--help", cwd=folder)
        return imported


def main() -> int:
    """Build, check and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the wheels and the environments in DIR")
    keep: Path | None = parser.parse_args().keep
    extras: list[str] = list(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    with tempfile.TemporaryDirectory(prefix="smoothagent-dist-") as name:
        out = keep.resolve() / "dist" if keep else Path(name)
        try:
            wheels = build_wheels(out)
            for wheel in wheels:
                check_contents(wheel)
            meta = next(wheel for wheel in wheels if wheel.name.startswith("smoothagent-"))
            check_meta(meta)
            print(f"built {', '.join(wheel.name for wheel in wheels)}")
            asked: list[tuple[Path, list[str]]] = [(meta, []), *((meta, [extra]) for extra in extras)]
            for member, modules in OPTIONAL.items():
                prefix = f"{member.replace('-', '_')}-"
                asked.append((next(w for w in wheels if w.name.startswith(prefix)), list(modules)))
            for wheel, given in asked:
                start = time.monotonic()
                found = check_extras(wheel, given, wheels, keep)
                print(f"{wheel.name} {given}: {found} ({time.monotonic() - start:.1f} s)")
        except CheckError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
