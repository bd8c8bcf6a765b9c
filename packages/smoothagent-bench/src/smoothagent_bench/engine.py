"""The embedded engine: llama.cpp's own HTTP server in a child process, for as long as a ``with`` block runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

import httpx

from smoothagent.errors import BackendUnreachableError, ConfigurationError

ALIAS = "smollm2"
"""The model's name at the embedded engine."""

WINDOW = 8192
"""Tokens of context a slot: SmolLM2's own window."""

SLOTS = 3
"""Slots a conversation: main, summary and lookahead stream (docs/serving.md, "Pacing")."""

STEP_TOKENS = 64
"""Tokens llama.cpp computes in one step; a larger step stalls the decodes that share it for seconds."""
SIDE_STEP_TOKENS = 16
"""The same of an engine for lookahead work: a step that is under way when the agent's request arrives goes on, on a
core that the request wants. Costs 3% (measured)."""

DECODING_THREADS = 1
"""A second one gains little on a model this small, meets the first at every operator, and takes six times as long
(measured) as soon as anything else wants its core."""

START_S = 60.0
STOP_S = 5.0

# llama.cpp's threads meet at a barrier after every operator, hundreds of times a token, and how long they spin
# there before they sleep decides everything. Sleeping at once (OMP_WAIT_POLICY=passive) is slow on a quiet
# machine. Spinning for long (the default of 300,000) is fine there, but beside a single other busy process the
# spinning thread holds the core that the other thread waits for. Measured on two cores, 30 tokens of decode
# beside a busy loop: 200,000 spins 17–21 s, 20,000 4–9 s, 5,000 0.8–1.0 s; alone 9 to 12 ms a token with any of
# them. So: long enough to outlast most barriers, far shorter than a time slice.
_CHILD_ENVIRONMENT = {"GOMP_SPINCOUNT": "5000"}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How to reach the engine.

    Attributes:
        base_url: for an OpenAI client, ends in ``/v1``.
        model: the model's name there.
        slots: number of slots.
        window: tokens of context a slot.
        pid: its process.
        slot_folder: where slots are saved.
    """

    base_url: str
    model: str
    slots: int
    window: int
    pid: int
    slot_folder: Path


class EmbeddedEngine:
    """Starts the engine on a free loopback port and stops it at the end of the block.

    The process ends with this one, also when this one is killed. It is in a session of its own, so that
    Ctrl-C reaches the benchmark first, which stops the engine after it has kept its results.

    Args:
        model: the GGUF file.
        conversations: how many it serves at once; each gets `SLOTS` slots, and one is left over for requests
            that belong to none.
        threads: compute threads; default the cores this process may use, at most 4.
        window: tokens of context a slot.
        beside: an engine whose lookahead work this one does, on the cores that a decode of that one leaves idle.

    Raises:
        ConfigurationError: on entering, where the engine cannot be started.
    """

    def __init__(
        self,
        model: Path,
        *,
        conversations: int = 1,
        threads: int | None = None,
        window: int = WINDOW,
        beside: EngineInfo | None = None,
    ) -> None:
        if conversations < 1:
            raise ConfigurationError(f"conversations is {conversations}: the engine needs at least 1")
        self.model = model
        self.slots = SLOTS * conversations + 1
        self.threads = threads or min(4, usable_cores() - (DECODING_THREADS if beside else 0)) or 1
        self.beside = beside
        self.window = window
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def settings(self, folder: Path) -> dict[str, Any]:
        """What the child is told, in llama.cpp's names."""
        step = STEP_TOKENS if self.beside is None else SIDE_STEP_TOKENS
        return {
            "model": str(self.model),
            "alias": ALIAS,
            "port": 0,
            "decoding_threads": DECODING_THREADS,
            "threads": self.threads,
            "n_parallel": self.slots,
            "n_ctx": self.window * self.slots,
            "n_batch": step,
            "n_ubatch": step,
            # Each stream has a slot of its own; anything that moves prefixes between slots would blur what
            # is measured, and re-using shifted chunks is not exact.
            "kv_unified": False,
            "cache_ram_mib": 0,
            "n_cache_reuse": 0,
            "slot_save_path": f"{folder}{os.sep}",
            "endpoint_slots": True,
            "endpoint_props": True,
            "endpoint_metrics": True,
            "ui": False,
            "warmup": True,
        }

    def __enter__(self) -> EngineInfo:
        if not self.model.is_file():
            raise ConfigurationError(f"no model file at {self.model}: leave the choice to `find_model`")
        self._folder = tempfile.TemporaryDirectory(prefix="smoothagent-engine-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        slots = folder / "slots" if self.beside is None else self.beside.slot_folder
        slots.mkdir(mode=0o700, exist_ok=True)
        try:
            return self._start(folder, slots)
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def ended(self) -> bool:
        """Whether its process is not running, or no more."""
        return self._process is None or self._process.poll() is not None

    def check(self) -> None:
        """Raise BackendUnreachableError with the engine's last words where its process has ended."""
        if self.ended:
            raise BackendUnreachableError(f"the embedded engine has died: {self.last_words()}")

    def last_words(self, lines: int = 3) -> str:
        """The last lines of the engine's log."""
        if self._folder is None:
            return "it is not running"
        log = Path(self._folder.name) / "engine.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return " | ".join(text.strip().splitlines()[-lines:]) or "it logged nothing"

    def _start(self, folder: Path, slots: Path) -> EngineInfo:
        with (folder / "engine.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "smoothagent_bench.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_CHILD_ENVIRONMENT},
                start_new_session=True,
            )
        self._process = process
        assert process.stdin is not None
        process.stdin.write(json.dumps(self.settings(slots)).encode() + b"\n")
        process.stdin.flush()
        address = self._address(process)
        self._await_ready(address)
        return EngineInfo(f"{address}/v1", ALIAS, self.slots, self.window, process.pid, slots)

    def _address(self, process: subprocess.Popen[bytes]) -> str:
        answers: SimpleQueue[bytes] = SimpleQueue()
        assert process.stdout is not None
        Thread(target=_pump, args=(process.stdout, answers), daemon=True).start()
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                line = answers.get(timeout=0.1)
            except Empty:
                self._started()
                continue
            if line.startswith(b'{"address"'):
                return str(json.loads(line)["address"]).rstrip("/")
        raise ConfigurationError(f"the embedded engine did not start in {START_S:.0f} s: {self.last_words()}")

    def _await_ready(self, address: str) -> None:
        deadline = time.monotonic() + START_S
        with httpx.Client(trust_env=False, timeout=5) as client:
            while time.monotonic() < deadline:
                self._started()
                try:
                    if client.get(f"{address}/health").is_success:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise ConfigurationError(f"the embedded engine was not ready in {START_S:.0f} s: {self.last_words()}")

    def _started(self) -> None:
        process = self._process
        if process is not None and process.poll() is not None:
            raise ConfigurationError(
                f"the embedded engine ended with status {process.returncode} while starting: {self.last_words()}; "
                "run against a server of your own with --base-url"
            )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # Last: while the child lives, the thread that reads its output holds the pipe.
            if process.stdout is not None:
                process.stdout.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pump(source: Any, sink: SimpleQueue[bytes]) -> None:
    try:
        for line in source:
            sink.put(line)
    except ValueError:  # closed by _stop
        return
