"""What the packages export is decided, not accidental: it equals the committed list, and all of it is documented.

One file a public module in `public_surface/`, one name a line, sorted. A name that is added or removed shows in a diff.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SURFACES = Path(__file__).parent / "public_surface"
MODULES = sorted(path.stem for path in SURFACES.glob("*.txt"))


def import_packages() -> list[str]:
    """The import packages of the workspace, one a member."""
    return sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py"))


def exported(module: ModuleType) -> list[tuple[str, object]]:
    return [(name, getattr(module, name)) for name in module.__all__]


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0].startswith("smoothagent")


def has_words(cls: type) -> bool:
    """Whether the class says what it is; the signature `dataclass` writes for want of a docstring does not count."""
    return bool(cls.__doc__) and not str(cls.__doc__).startswith(f"{cls.__name__}(")


def undocumented_members(owner: str, cls: type) -> list[str]:
    """Public methods and properties that `cls` itself defines without saying what they do.

    An override that adds nothing to its base's contract may stay silent: `inspect.getdoc` finds the base's words.
    """
    missing: list[str] = []
    for name in vars(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or not isinstance(
            member, property | classmethod | staticmethod | type(undocumented_members)
        ):
            continue
        if not inspect.getdoc(getattr(cls, name)):
            missing.append(f"{owner}.{name}")
    return missing


def test_every_package_has_a_committed_surface() -> None:
    assert set(import_packages()) <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_exports_equal_the_committed_list(name: str) -> None:
    committed = (SURFACES / f"{name}.txt").read_text(encoding="utf-8").split()
    assert committed == sorted(set(committed)), "one name a line, sorted"
    assert sorted(importlib.import_module(name).__all__) == committed


@pytest.mark.parametrize("name", MODULES)
def test_exports_exist_and_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    missing = [] if inspect.getdoc(module) else [name]
    for export, value in exported(module):
        if not is_ours(value):
            continue
        if inspect.isclass(value):
            missing += [] if has_words(value) else [f"{name}.{export}"]
            missing += undocumented_members(f"{name}.{export}", value)
        elif callable(value) and not inspect.getdoc(value):
            missing.append(f"{name}.{export}")
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_no_public_name_is_left_out(name: str) -> None:
    """What a module shows without an underscore is exported, a submodule, or `annotations`."""
    module = importlib.import_module(name)
    shown = {
        key for key, value in vars(module).items() if not key.startswith("_") and not isinstance(value, ModuleType)
    }
    accidental = {key for key in shown - set(module.__all__) if is_ours(vars(module)[key])}
    assert accidental == set()
