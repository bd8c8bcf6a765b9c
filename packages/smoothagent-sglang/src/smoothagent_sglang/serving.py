"""Starts SGLang's own server with the lookahead scheduler, through whichever of its doors this version has."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version

from smoothagent_sglang import engine, plugin

_LOADS_PLUGINS = (0, 5, 11)


def serve(arguments: Sequence[str]) -> None:
    """``python -m sglang.launch_server`` with these arguments; ends with the server.

    Args:
        arguments: SGLang's own.
    """
    if engine.version_of(version("sglang")) < _LOADS_PLUGINS:
        server = engine.module("entrypoints.http_server")
        server.launch_server = functools.partial(
            server.launch_server, run_scheduler_process_func=plugin.run_scheduler_process
        )
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
