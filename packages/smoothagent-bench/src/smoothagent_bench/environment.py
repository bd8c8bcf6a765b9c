"""What a benchmark was measured on and with."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from smoothagent_bench.engine import usable_cores

_DISTRIBUTIONS = ("smoothagent-core", "smoothagent-bench", "xllamacpp", "openai", "httpx")


def describe(command: Sequence[str], server: str) -> dict[str, str]:
    """Facts for the report, in the order to print them.

    Args:
        command: the command line.
        server: what served the model.
    """
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "server": server,
        "cpu": f"{cpu_model()}, {usable_cores()} usable cores",
        "memory": memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):
        facts["load when it ended"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> str:
    """Physical memory."""
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):  # no such call on this system
        return "unknown"
