"""A Python that has imported what scripts import, and runs each of them in a process forked from it.

Importing a framework takes seconds, and running a page's example does not. Each line of stdin is a script, its folder
and the file for what it prints, as JSON; each answer is its exit status.

    python warm_python.py MODULE ...
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

SECONDS = 120
"""After which a script is ended."""


class WarmPython:
    """Runs scripts.

    Args:
        process: this file's.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, script: Path) -> tuple[int, str]:
        """The script's exit status and what it printed, run in its folder."""
        printed = script.with_suffix(".out")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), str(script.parent), str(printed)]) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        return int(status), printed.read_text(encoding="utf-8")


@contextlib.contextmanager
def warm_python(options: Sequence[str], modules: Sequence[str]) -> Generator[WarmPython]:
    """A process with these options of the interpreter's, which has imported these modules where it can."""
    words = [sys.executable, *options, __file__, *modules]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield WarmPython(process)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    """Serve."""
    for module in sys.argv[1:]:
        with contextlib.suppress(Exception):  # a script that needs it says so
            importlib.import_module(module)
    while line := sys.stdin.readline():
        script, folder, printed = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.alarm(SECONDS)
            os.chdir(folder)
            file = os.open(printed, os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(file, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = [script]
            sys.path[0] = folder
            runpy.run_path(script, run_name="__main__")
            return  # and end as any script does
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
