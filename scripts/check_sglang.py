#!/usr/bin/env python
"""The scheduler on real SGLang servers: ``uv run scripts/check_sglang.py [--version V ...] [--sequences N] [--load]``.

Builds (or finds) an environment for each version, makes a small random model, starts the server with the scheduler
and the server's strictest accounts of its KV pool, and checks on it:

- a lookahead request in pieces: what it has cached, what the next request finds, what is refused;
- a promoted one overtakes, an aborted one ends, one that decodes answers as a live one does;
- random sequences of requests, aborts, promotions and commits, in a pool that is too small for them: every request
  ends, no slot is lost, the server is as it was;
- what live requests have cached stays cached, and their answers in float32 are the same under lookahead load;
- with ``--load``: live requests under lookahead load, against the same server without the scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("sglang")
sys.path.insert(0, str(FOLDER))

from load import Ask, Fared, Server, prompt, quantile  # noqa: E402
from serve import server_command, server_variables  # noqa: E402

VERSIONS = ("0.5.9", "0.5.23")
CONFIG = "SMOOTHAGENT_SGLANG_CONFIG"
READY_SECONDS = 240.0


class Case(NamedTuple):
    """A server.

    Attributes:
        name: of it.
        version: of SGLang.
        arguments: more of them.
        settings: the scheduler's, as TOML.
    """

    name: str
    version: str
    arguments: Sequence[str] = ()
    settings: str = "strict = true"


def main() -> int:
    """Check all that is asked for; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--version", action="append", choices=VERSIONS, help="default: both ends")
    parser.add_argument("--sequences", type=int, default=120, help="random steps on each server")
    parser.add_argument("--load", action="store_true", help="also measure live requests under load")
    parser.add_argument("--folder", type=Path, help="where environments are; default: the user's cache")
    options = parser.parse_args()
    # So that servers end with this, whoever ends it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for version in options.version or VERSIONS:
        began = time.monotonic()
        python = environment(version, options.folder)
        print(f"{version}: environment in {time.monotonic() - began:.0f} s", flush=True)
        with tempfile.TemporaryDirectory(prefix="smoothagent-sglang-") as name:
            check(version, python, Path(name), options)
    return 0


def environment(version: str, folder: Path | None) -> str:
    """The Python of an environment with that version and with this package."""
    where = [] if folder is None else ["--folder", str(folder / version)]
    command = [sys.executable, str(FOLDER / "environment.py"), version, *where]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    python = told.splitlines()[-1].strip()
    package = ROOT / "packages" / "smoothagent-sglang"
    install = ("uv", "pip", "install", "--quiet", "--python", python, "--no-deps", "--editable", str(package))
    subprocess.run(install, check=True)
    return python


def check(version: str, python: str, folder: Path, options: argparse.Namespace) -> None:
    """All servers of a version."""
    model = folder / "model"
    made = [python, str(FOLDER / "models.py"), str(model), "--dtype", "float32"]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    small = ("--max-total-tokens", "12000")
    cases = [
        Case("mixed", version, ("--enable-mixed-chunk",), "strict = true\nttft = 0.5"),
        Case("separate, a small pool", version, small),
    ]
    if version != "0.5.9":  # whose allocator of pages is a kernel for GPUs
        cases.append(
            Case("mixed, pages of 16, a small pool", version, ("--enable-mixed-chunk", "--page-size", "16", *small))
        )
    for case in cases:
        with serving(case, python, model, folder) as url:
            asyncio.run(checked(case, url, options.sequences))
    if options.load:
        for case in (
            Case("as it is", version, ("--enable-mixed-chunk",), "enabled = false"),
            Case("with the scheduler", version, ("--enable-mixed-chunk",)),
        ):
            with serving(case, python, model, folder) as url:
                asyncio.run(loaded(case, url))


@contextlib.contextmanager
def serving(case: Case, python: str, model: Path, folder: Path) -> Generator[str]:
    """A server, for as long as it is used; what it has logged is shown where something goes wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings, log = folder / "scheduler.toml", folder / "server.log"
    settings.write_text(case.settings + "\n")
    command = server_command(python, str(model), port, [*("--dtype", "float32"), *case.arguments])
    variables = {**server_variables(os.environ), CONFIG: str(settings)}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until_it_listens(process, port)
        yield f"http://127.0.0.1:{port}"
        text = log.read_text(errors="replace")
        assert "Traceback" not in text, "the server raised"
        assert process.poll() is None, "the server has ended"
    except BaseException:
        sys.stderr.write("".join(log.read_text(errors="replace").splitlines(keepends=True)[-60:]))
        raise
    finally:
        stop(process)


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    """Until the port is open. Raises RuntimeError where the server ends before, or takes too long."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready in {READY_SECONDS:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its processes, which are one group of ours."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- what is checked ---------------------------------------------------------------------------


async def checked(case: Case, url: str, sequences: int) -> None:
    """All checks on one server."""
    began = time.monotonic()
    async with Server(url) as server:
        await server.ready(READY_SECONDS)
        rng = random.Random(case.name)
        for _ in range(3):
            await server.generate(Ask(0, prompt(rng, 200), 8))
        assert "pool_tokens" in await server.state(), "the scheduler is not there"
        for part in (pieces, promotions, answers, kept):
            async with asyncio.timeout(120):
                await part(server, rng)
            print(f"{case.version} {case.name}: {part.__name__}", flush=True)
        ended = await sequence(server, rng, sequences)
        state = await accounts(server)
    told = ", ".join(
        f"{name} {state.get(name, 0)}" for name in ("pieces", "promoted", "aborted", "evictions", "refused")
    )
    print(f"{case.version} {case.name}: ok; {ended} requests, {told}; {time.monotonic() - began:.0f} s", flush=True)


async def until(server: Server, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for the state until something holds of it. Raises TimeoutError."""
    async with asyncio.timeout(60):
        while True:
            state = await server.state()
            if holds(state):
                return state
            await asyncio.sleep(0.02)


async def pieces(server: Server, rng: random.Random) -> None:
    """A prefill in pieces is cached for whoever comes next, and is no hit of its own; what is impossible is refused."""
    ids = prompt(rng, 1500)
    before = await server.state()
    warmed = await server.generate(Ask(0, ids, 0, lookahead=True, number=1))
    after = await server.state()
    assert warmed.finish == "length", warmed
    assert warmed.cached == 0, f"its own pieces are told as {warmed.cached} cached tokens"
    assert after.get("pieces", 0) >= before.get("pieces", 0) + 5, "it was not computed in pieces"
    found = await server.generate(Ask(0, [*ids, *prompt(rng, 20)], 1))
    assert found.cached >= 1500 - 16, f"{found.cached} of 1500 tokens were warm"
    for bad in (
        {"lookahead": 2},
        {"lookahead": True},
        {"lookahead": 1, "deadline": -1},
        {"lookahead": 1, "lookahead_id": "x"},
    ):
        params = {"max_new_tokens": 1, "custom_params": bad}
        status = await server.post("/generate", {"input_ids": ids[:50], "sampling_params": params})
        assert status == 400, f"{bad} was answered with {status}"


async def promotions(server: Server, rng: random.Random) -> None:
    """A promoted request is done before those that came before it; an aborted one ends."""
    for bad in (-1, 1.5, 10**30):
        await server.post("/set_internal_state", {"server_args": {"lookahead_promote": bad}})
    asks = [Ask(0, prompt(rng, 2500), 1, lookahead=True, number=100 + i) for i in range(5)]
    known = int((await server.state())["requests"])
    done: list[int] = []

    async def one(ask: Ask) -> None:
        await server.generate(ask, rid=f"promoted-{ask.number}")
        done.append(ask.number)

    tasks = [asyncio.ensure_future(one(ask)) for ask in asks]
    await until(server, lambda state: state["requests"] == known + len(asks))
    assert await server.post("/set_internal_state", {"server_args": {"lookahead_promote": 104}}) == 200
    await asyncio.gather(*tasks)
    assert done[-1] != 104, f"the promoted one was the last: {done}"
    task = asyncio.ensure_future(server.generate(Ask(0, prompt(rng, 3000), 1, lookahead=True), rid="aborted-1x"))
    await until(server, lambda state: state["held"] > 0)
    await server.post("/abort_request", {"rid": "aborted-1x"})
    assert (await asyncio.wait_for(task, 30)).finish == "abort"


async def answers(server: Server, rng: random.Random) -> None:
    """A lookahead request that decodes answers as a live one does, and live ones are answered as without its load."""
    asks = [Ask(0, prompt(rng, rng.randrange(100, 700)), 12) for _ in range(4)]
    alone = [await server.generate(ask) for ask in asks]
    await server.post("/flush_cache", {})
    for ask, fared in zip(asks, alone, strict=True):
        again = await server.generate(ask._replace(lookahead=True))
        assert again.output == fared.output, "another answer where it is computed in pieces"
    await server.post("/flush_cache", {})
    load = [Ask(0.05 * i, prompt(rng, 800), 0, lookahead=True) for i in range(6)]
    live = [ask._replace(at=0.3 * i) for i, ask in enumerate(asks)]
    fared = (await server.load([*load, *live]))[len(load) :]
    assert [f.output for f in fared] == [f.output for f in alone], "another answer under lookahead load"


async def kept(server: Server, rng: random.Random) -> None:
    """What live requests have cached is there after more lookahead work than the pool holds."""
    ids = prompt(rng, 2000)
    await server.generate(Ask(0, ids, 4))
    pool = int((await server.state())["pool_tokens"])
    load = [Ask(0.02 * i, prompt(rng, 1500), 0, lookahead=True) for i in range(pool // 1500 + 2)]
    await server.load(load)
    found = await server.generate(Ask(0, [*ids, *prompt(rng, 10)], 4))
    assert found.cached >= 2000 - 16, f"of a live request's 2000 cached tokens {found.cached} were left"


async def sequence(server: Server, rng: random.Random, steps: int) -> int:
    """Random requests, some of which go on from others; aborts, promotions and commits, at any time."""
    shared = [prompt(rng, rng.randrange(50, 900)) for _ in range(4)]
    tasks: list[asyncio.Task[Fared]] = []
    rids: list[tuple[str, int, list[int]]] = []
    for step in range(steps):
        act = rng.random()
        if act < 0.62 or not rids:
            lookahead = rng.random() < 0.6
            begun = rng.choice(shared)[: rng.randrange(1, 900)] if rng.random() < 0.7 else []
            ids = [*begun, *prompt(rng, rng.randrange(1, 1200))]
            ask = Ask(0, ids, rng.choice([0, 0, 1, 5]) if lookahead else rng.choice([1, 4, 9]), lookahead, 1000 + step)
            rid = f"sequence-{step:06d}x"
            tasks.append(asyncio.create_task(server.generate(ask, rid=rid)))
            rids.append((rid, ask.number, ids))
        elif act < 0.76:
            await server.post("/abort_request", {"rid": rng.choice(rids[-8:])[0]})
        elif act < 0.88:
            await server.post("/set_internal_state", {"server_args": {"lookahead_promote": rng.choice(rids[-8:])[1]}})
        else:
            ids = rng.choice(rids[-8:])[2]
            tasks.append(asyncio.create_task(server.generate(Ask(0, [*ids, *prompt(rng, 5)], 3))))
        await asyncio.sleep(rng.choice([0, 0, 0.01, 0.05, 0.2]))
    async with asyncio.timeout(300):
        fared = await asyncio.gather(*tasks)
    assert all(f.finish in ("length", "abort", "stop") for f in fared)
    return len(fared)


async def accounts(server: Server) -> dict[str, Any]:
    """Nothing is held, and after a flush all of the pool is free. Returns what was told before that."""
    state = await until(server, lambda state: not state["held"] and not state["answering"])
    total = state["free_tokens"] + state["evictable_tokens"] + state["protected_tokens"]
    assert total == state["pool_tokens"], f"{total} of {state['pool_tokens']} tokens are accounted for: {state}"
    assert await server.post("/flush_cache", {}) == 200
    flushed = await server.state()
    assert flushed["free_tokens"] == flushed["pool_tokens"], f"a flushed pool is not free: {flushed}"
    assert not flushed["own_tokens"]
    return state


# ---- under load --------------------------------------------------------------------------------


async def loaded(case: Case, url: str, count: int = 40) -> None:
    """Live requests at two fifths of what the server can do, beside none and more and more lookahead work."""
    rng = random.Random(14)
    async with Server(url) as server:
        await server.ready(READY_SECONDS)
        alone = [await server.generate(Ask(0, prompt(rng, 200), 16)) for _ in range(9)][3:]
        gap = quantile([f.seconds for f in alone], 0.5) / 0.4
        step = quantile([b for f in alone for b in f.between], 0.5)
        for every in (0.0, 3.0, 1.0):
            arrivals, at = random.Random(5), 0.0
            live = list[Ask]()
            for _ in range(count):
                at += arrivals.expovariate(1 / gap)
                live.append(Ask(at, prompt(arrivals, 200), 16))
            work = (
                [Ask(0.3 + k * every, prompt(arrivals, 3000), 0, lookahead=True) for k in range(int(at / every))]
                if every
                else []
            )
            fared = await server.load([*live, *work])
            lc, be = fared[:count], fared[count:]
            first, between = [f.ttft or 0.0 for f in lc], [b for f in lc for b in f.between]
            print(
                f"{case.version} {case.name}: step {step * 1e3:.1f} ms, lookahead every {every:.0f} s: "
                f"TTFT p50 {quantile(first, 0.5) * 1e3:.0f}, max {max(first) * 1e3:.0f} ms; between tokens "
                f"p50 {quantile(between, 0.5) * 1e3:.1f}, p99 {quantile(between, 0.99) * 1e3:.1f} ms; "
                f"{len(be)} lookahead requests, {quantile([f.seconds for f in be], 0.5):.1f} s each",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
