"""Run llama.cpp's server in this process until stdin closes: ``python llamacpp_process.py MODEL PORT SLOT_DIR``."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main(model: str, port: int, slot_dir: str) -> None:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_ctx, params.n_parallel, params.kv_unified = 8192, 4, False
    params.n_batch = params.n_ubatch = 64
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.endpoint_slots = params.endpoint_props = True
    params.slot_save_path = slot_dir
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
