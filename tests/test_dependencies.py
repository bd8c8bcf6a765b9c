"""Each package declares what it imports, and nothing else.

What only arrives through another package's dependencies may leave with its next release.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MEMBERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
# Declared and never imported: `pip` runs as a program of its own, and uvicorn takes what makes it fast where that is.
NEVER_IMPORTED = {"smoothagent-bench": {"pip"}, "smoothagent-gateway": {"httptools", "uvloop"}}


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names of all absolute imports, wherever they stand."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def distributions_of(member: Path) -> set[str]:
    """The distributions that `member`'s source imports, by their canonical names."""
    owners = metadata.packages_distributions()
    own = {path.name for path in (member / "src").iterdir()}
    found: set[str] = set()
    for path in member.glob("src/**/*.py"):
        for module in imported_modules(path.read_text(encoding="utf-8")):
            top = module.partition(".")[0]
            if top in own or top in sys.stdlib_module_names:
                continue
            found |= {canonicalize_name(name) for name in providers(module, owners)}
    return found


def providers(module: str, owners: Mapping[str, list[str]]) -> set[str]:
    """Who provides a module; the OpenTelemetry namespace is shared, and ours import its API only."""
    top, _, rest = module.partition(".")
    if top == "opentelemetry":
        return {"opentelemetry-api"}
    if top == "langgraph":
        return {"langgraph"}  # a namespace, too: its prebuilt agents and checkpointers are other distributions
    if top == "llama_index":  # a namespace, too: its distributions are named after their part of it
        part = rest.split(".")
        return {"-".join(["llama-index", *(part[:1] if part[0] == "core" else part[:2])])}
    if top.startswith("smoothagent"):
        return {"smoothagent-core" if top == "smoothagent" else top}
    return set(owners.get(top, [top]))


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_declared_is_what_is_imported(member: Path) -> None:
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    assert distributions_of(member) | NEVER_IMPORTED.get(member.name, set()) == declared


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_importing_all_of_it_says_nothing_not_even_at_exit(member: Path) -> None:
    modules = [
        ".".join(path.relative_to(member / "src").with_suffix("").parts)
        for path in sorted(member.glob("src/**/*.py"))
        if path.stem not in ("__main__", "__init__")
    ]
    strict = ("-W", "error", "-W", "ignore:Importing Send from langgraph.constants is deprecated")
    done = subprocess.run(
        [sys.executable, *strict, "-c", "\n".join(f"import {module}" for module in modules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
