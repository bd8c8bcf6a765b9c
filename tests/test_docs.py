"""Every Python example in README and docs is run, each in a process of its own, against a server on loopback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopback_server import loopback_server
from warm_python import WarmPython, warm_python

ROOT = Path(__file__).parent.parent
DOCUMENTED = "http://127.0.0.1:8080/v1"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

OTHERS = (
    # Of trustcall, which langmem imports.
    "Importing Send from langgraph.constants is deprecated",
    # LlamaIndex's workflows look at every attribute of an agent, pydantic's old ones included.
    *("The `__fields", "The `model_", "Accessing the 'model_", "is_running called from within a step"),
)
"""How warnings begin that are none of ours; all others are errors."""
STRICT = ("-W", "error", *(word for text in OTHERS for word in ("-W", f"ignore:{text}")))


def examples() -> Iterator[tuple[str, str]]:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for number, match in enumerate(BLOCK.finditer(text)):
            yield f"{page.relative_to(ROOT)}#{number}", match[1]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with loopback_server() as url:
        yield url


def test_there_are_examples() -> None:
    assert len(list(examples())) >= 6


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    imports = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
    with warm_python(STRICT, sorted({module for _, code in examples() for module in imports.findall(code)})) as python:
        yield python


@pytest.mark.parametrize(("name", "code"), [pytest.param(*e, id=e[0]) for e in examples()])
def test_example_runs(name: str, code: str, server: str, python: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code.replace(DOCUMENTED, server), encoding="utf-8")
    status, printed = python.run(script)
    assert status == 0, f"{name}:\n{printed}"


@pytest.mark.parametrize("code", ["1 / 0", "import warnings\nwarnings.warn('old', DeprecationWarning)", "exit(3)"])
def test_an_example_that_fails_is_noticed(code: str, python: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    assert python.run(script)[0] != 0


def test_no_page_links_to_a_missing_file() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
