"""Every Python example in README and docs is run, each in a process of its own, against a server on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopback_server import loopback_server

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


@pytest.mark.parametrize(("name", "code"), [pytest.param(*e, id=e[0]) for e in examples()])
def test_example_runs(name: str, code: str, server: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code.replace(DOCUMENTED, server), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *STRICT, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{name}:\n{done.stderr}"


def test_no_page_links_to_a_missing_file() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
