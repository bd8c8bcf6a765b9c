"""One static version everywhere: the distributions are released together and pin each other exactly."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CORE = "smoothagent-core"
META = "smoothagent"


def project_table(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


MEMBERS = {folder.parent.name: project_table(folder.parent) for folder in ROOT.glob("packages/*/pyproject.toml")}
PROJECTS = {META: project_table(ROOT), **MEMBERS}
VERSION: str = PROJECTS[META]["version"]


def requirements(project: dict[str, Any]) -> list[Requirement]:
    extras: dict[str, list[str]] = project.get("optional-dependencies", {})
    lines: list[str] = [*project.get("dependencies", []), *(line for extra in extras.values() for line in extra)]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("name", PROJECTS)
def test_version_is_static_and_the_same(name: str) -> None:
    project = PROJECTS[name]
    assert project["name"] == name
    assert project["version"] == VERSION
    assert "dynamic" not in project


@pytest.mark.parametrize("name", PROJECTS)
def test_python_and_licence_are_the_same(name: str) -> None:
    assert PROJECTS[name]["requires-python"] == PROJECTS[META]["requires-python"]
    assert PROJECTS[name]["license"] == "Apache-2.0"
    folder = ROOT if name == META else ROOT / "packages" / name
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", PROJECTS)
def test_members_are_pinned_exactly(name: str) -> None:
    for requirement in requirements(PROJECTS[name]):
        if canonicalize_name(requirement.name) in PROJECTS:
            assert str(requirement.specifier) == f"=={VERSION}", f"{name} requires {requirement}"


@pytest.mark.parametrize("name", PROJECTS)
def test_installed_version_is_the_static_one(name: str) -> None:
    assert metadata.version(name) == VERSION


@pytest.mark.parametrize("name", MEMBERS)
def test_dunder_version_is_the_static_one(name: str) -> None:
    """Read from the source, so that a package that cannot be imported still has its version checked."""
    initialiser = next((ROOT / "packages" / name / "src").glob("*/__init__.py")).read_text(encoding="utf-8")
    assert f'\n__version__ = "{VERSION}"\n' in initialiser


def test_meta_depends_on_core_and_forwards_every_other_member() -> None:
    meta = PROJECTS[META]
    assert meta["dependencies"] == [f"{CORE}=={VERSION}"]
    expected = {member.removeprefix("smoothagent-"): [f"{member}=={VERSION}"] for member in MEMBERS if member != CORE}
    assert meta["optional-dependencies"] == expected


@pytest.mark.parametrize("name", PROJECTS)
def test_changelog_has_the_version(name: str) -> None:
    folder = ROOT if name == META else ROOT / "packages" / name
    assert f"## [{VERSION}]" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
