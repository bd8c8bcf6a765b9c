"""Run the tests with the oldest dependencies the packages say they accept.

Every direct dependency of every package is installed at its lower bound, as wheels only, into an environment of its
own; the lock file is neither read nor written. Tools (pytest, Hypothesis) come at their lower bounds too. Tests that
start the embedded engine are left out: what they need of it does not depend on the other packages' age.

    python scripts/check_lowest.py [PYTEST-ARGUMENT ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Install at the lower bounds and run pytest there; return its exit status."""
    environment = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    with tempfile.TemporaryDirectory(prefix="smoothagent-lowest-") as name:
        python = Path(name) / "venv" / "bin" / "python"
        commands: list[list[str | Path]] = [
            ["uv", "venv", "--quiet", "--no-project", "--python", sys.executable, Path(name) / "venv"],
            [
                *("uv", "pip", "install", "--quiet", "--python", python, "--resolution", "lowest-direct"),
                *("--only-binary", ":all:", "--editable", ".[bench,langchain]", "--group", "test"),
                *("--editable", "packages/smoothagent-langchain[bench,classic,deepagents,langmem]"),
            ],
            ["uv", "pip", "list", "--python", python],
            [
                python,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "-m",
                "not engine",
                "--hypothesis-profile=few",
                *sys.argv[1:],
            ],
        ]
        for command in commands:
            words = [str(word) for word in command]
            if status := subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
