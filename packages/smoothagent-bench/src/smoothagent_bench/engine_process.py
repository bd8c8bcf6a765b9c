"""The embedded engine's own process: llama.cpp's HTTP server, until its parent goes away.

Run as ``python -m smoothagent_bench.engine_process`` with the settings as one JSON line on stdin. Answers one
JSON line, ``{"address": …}``, when it listens. Stdin stays open for as long as the parent wants the server:
its end, also by the parent's death, ends this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import xllamacpp as _untyped

xllamacpp: Any = _untyped

GRACE_S = 2.0
"""Seconds that llama.cpp may take to shut down; a request in flight can hold it for longer."""


def main() -> int:
    """Serve until stdin ends."""
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    server = xllamacpp.Server(parameters(settings))
    sys.stdout.write(json.dumps({"address": server.listening_address}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    threading.Thread(target=_leave_in_any_case, daemon=True).start()
    del server
    return 0


def parameters(settings: dict[str, Any]) -> Any:
    """llama.cpp's parameters from ``EmbeddedEngine.settings``."""
    values = dict(settings)
    out = xllamacpp.CommonParams()
    out.model.path = values.pop("model")
    out.hostnames = ["127.0.0.1"]
    out.model_alias = {values.pop("alias")}
    out.cpuparams.n_threads = values.pop("decoding_threads")
    out.cpuparams_batch.n_threads = values.pop("threads")
    # On a CPU flash attention makes prefill a tenth faster and decoding at 2,000 tokens half as fast again slower.
    out.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for name, value in values.items():
        setattr(out, name, value)
    return out


def _leave_in_any_case() -> None:
    threading.Event().wait(GRACE_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
