"""The ``smoothagent`` command; packages add subcommands by the entry-point group ``smoothagent.commands``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import cast

from smoothagent.errors import SmoothAgentError

GROUP = "smoothagent.commands"
_HINTS = {"demo": "bench", "bench": "bench", "gateway": "gateway"}
"""Which extra brings a command that is not installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for a wrong call or a clear error)."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands = {e.name: e for e in entry_points(group=GROUP)}
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_usage(commands) + "\n")
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        sys.stdout.write(f"smoothagent {version('smoothagent-core')}\n")
        return 0
    command = commands.get(args[0])
    if command is None:
        sys.stderr.write(_unknown(args[0], commands) + "\n")
        return 2
    try:
        return cast("Callable[[list[str]], int]", command.load())(args[1:])
    except SmoothAgentError as error:
        sys.stderr.write(f"smoothagent {args[0]}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _usage(commands: dict[str, EntryPoint]) -> str:
    lines = ["usage: smoothagent COMMAND [options]", "", "commands:"]
    lines += [f"  {name}" for name in sorted(commands)] or [
        '  none installed: pip install "smoothagent[bench]" brings demo and bench'
    ]
    return "\n".join([*lines, "", "smoothagent COMMAND --help says more"])


def _unknown(name: str, commands: dict[str, EntryPoint]) -> str:
    if name in _HINTS:
        return f'smoothagent: the command {name!r} is not installed: pip install "smoothagent[{_HINTS[name]}]"'
    known = ", ".join(sorted(commands)) or "none"
    return f"smoothagent: unknown command {name!r}; there are: {known}"
