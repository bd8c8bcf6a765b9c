"""Run the tests of `smoothagent-miniagent` with Mini-Agent itself.

Mini-Agent is on git only, so it is tested where its source is at hand: ``MINI_AGENT_SOURCE`` names a checkout (tried
with commit d76a4f6). It goes into an environment of its own, with the newest mcp that it can import (1.x). Elsewhere
the tests have run with the stand-in alone, which is said.

    MINI_AGENT_SOURCE=DIR python scripts/check_miniagent.py [PYTEST-ARGUMENT ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from check_lowest import ROOT, run


def main() -> int:
    """Run pytest there; its exit status."""
    source = os.environ.get("MINI_AGENT_SOURCE")
    if not source:
        print("MINI_AGENT_SOURCE is not set: smoothagent-miniagent was tested with its stand-in for Mini-Agent alone.")
        return 0
    if not (Path(source) / "mini_agent" / "agent.py").is_file():
        print(f"MINI_AGENT_SOURCE={source}: there is no mini_agent/agent.py in it; it must be a checkout of Mini-Agent")
        return 2
    wanted = (
        *("--editable", "packages/smoothagent-core", "--editable", "packages/smoothagent-miniagent"),
        *("--no-binary", "mini-agent", str(Path(source).resolve()), "mcp<2", "hypothesis", "pytest", "pytest-xdist"),
    )
    folder = ROOT / "packages" / "smoothagent-miniagent" / "tests"
    tests = [str(folder), "--ignore", str(folder / "test_miniagent_engine.py")]  # which is as slow, and the stand-in's
    # What Mini-Agent and its dependencies warn of is not ours.
    lenient = ["-W", "default"]
    status = run(wanted, ["-m", "pytest", "-p", "no:cacheprovider", *lenient, *tests, *sys.argv[1:]])
    if not status:
        print("smoothagent-miniagent was tested with Mini-Agent itself and with its stand-in.")
    return status


if __name__ == "__main__":
    sys.exit(main())
