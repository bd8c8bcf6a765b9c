"""Run the tests with the oldest dependencies the packages say they accept, and the core's with the newest openai.

Every direct dependency of every package is installed at its lower bound, as wheels only, into an environment of its
own; the lock file is neither read nor written. Tools (pytest, Hypothesis) come at their lower bounds too. Tests that
start the embedded engine are left out: what they need of it does not depend on the other packages' age. The newest
openai client has an environment of its own, since LlamaIndex's LLMs take no newer one than 2.

    python scripts/check_lowest.py [PYTEST-ARGUMENT ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


LOWEST = (
    *(
        "--resolution",
        "lowest-direct",
        "--editable",
        ".[autogen,bench,gateway,langchain,llamaindex,miniagent,openclaw,sglang]",
    ),
    *("--editable", "packages/smoothagent-langchain[bench,classic,deepagents,langmem]"),
    *("--editable", "packages/smoothagent-gateway[bench]"),
    *("--editable", "packages/smoothagent-autogen[bench]"),
    *("--editable", "packages/smoothagent-llamaindex[bench]", "--editable", "packages/smoothagent-miniagent[bench]"),
    *("--group", "test"),
)
NEWEST = (
    *("--editable", "packages/smoothagent-core", "openai>=3", "httpx2", "hypothesis", "opentelemetry-sdk"),
    *("pytest", "pytest-xdist"),
)


def main() -> int:
    """Run pytest in both environments; return the first exit status that is none of success."""
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-m", "not engine", "--hypothesis-profile=few", *sys.argv[1:]]
    for wanted, tests in ((LOWEST, []), (NEWEST, ["packages/smoothagent-core/tests"])):
        if status := run(wanted, [*pytest, *tests]):
            return status
    return 0


def run(wanted: Sequence[str], arguments: Sequence[str]) -> int:
    """Install into an environment of its own and run Python there; return its exit status."""
    environment = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    with tempfile.TemporaryDirectory(prefix="smoothagent-lowest-") as name:
        python = Path(name) / "venv" / "bin" / "python"
        install = ("uv", "pip", "install", "--quiet", "--python", python, "--only-binary", ":all:")
        commands: list[Sequence[str | Path]] = [
            ("uv", "venv", "--quiet", "--no-project", "--python", sys.executable, Path(name) / "venv"),
            (*install, *wanted),
            ("uv", "pip", "list", "--python", python),
            (python, *arguments),
        ]
        for command in commands:
            words = [str(word) for word in command]
            if status := subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
