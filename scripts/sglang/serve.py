#!/usr/bin/env python
"""Become a real SGLang server on the CPU: ``serve.py PYTHON MODEL --port PORT [SERVER-ARGUMENT ...]``.

PYTHON is what ``environment.py`` printed, MODEL the folder that ``models.py`` made. This process is replaced by the
server's, so that its id is the server's and stopping its process group stops all of it. A server argument that is also
set here wins over what is set here.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
OURS = "smoothagent_sglang.serving"
# What SGLang needs to be told to run on a CPU.
CPU = (
    *("--device", "cpu"),
    # The default on x86 takes instructions that not every processor has, and kernels that are not on the index.
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    # There is no device whose work the scheduler's could overlap with.
    "--disable-overlap-schedule",
    # Constrained output is not what is tested; its backends compile kernels.
    *("--grammar-backend", "none"),
)
# Sizes for a few cores and a small model.
SMALL = (
    *("--context-length", "8192"),
    # Stated, as the default is measured from the memory that happens to be free.
    *("--max-total-tokens", "32768"),
    *("--chunked-prefill-size", "256"),
    # An idle server that keeps asking takes a core from what is measured beside it.
    "--sleep-on-idle",
)
# What a client of these tests reads.
SEEN = ("--enable-cache-report", "--log-level", "warning")


def main() -> None:
    """Replace this process by the server's."""
    summary = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    parser.add_argument("python", help="the Python that SGLang is installed for")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--module", default=OURS, help="what is run; default: SGLang's launcher with our scheduler")
    options, more = parser.parse_known_args()
    command = server_command(options.python, options.model, options.port, more, module=options.module)
    os.execve(options.python, command, server_variables(os.environ))  # noqa: S606 - the caller names the program


def server_command(python: str, model: str, port: int, more: Sequence[str] = (), *, module: str = OURS) -> list[str]:
    """The words that start the server; the last of a repeated argument holds."""
    where = ("--model-path", model, "--host", HOST, "--port", str(port))
    return [python, "-m", module, *where, *CPU, *SMALL, *SEEN, *("--dtype", dtype(model)), *more]


def dtype(model: str) -> str:
    """What the model's weights are: left to choose, SGLang makes float16 of float32."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def server_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The server's environment variables; of the last two, what the caller set stays."""
    return {
        # More threads than that cost more than they bring on small tensors, and two servers share the machine.
        "OMP_NUM_THREADS": "1",
        # The scheduler stops with an error when it has lost account of a slot of the cache, not only when it is idle.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        **variables,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }


if __name__ == "__main__":
    main()
