#!/usr/bin/env python
"""What the gateway adds to a request: against a direct connection to the same server, in the same run.

``uv run scripts/bench_gateway.py [--streams 50] [--seconds 20] [--json FILE]``

A scripted server streams answers (first chunk after 50 ms, then 50 chunks, one every 20 ms); so many clients at once
each carry on a conversation of growing length, in turn directly and through ``smoothagent gateway`` with a strategy
that commits. Then 500 streams are held open, each with a chunk every half a second. Server, gateway and clients are
processes of their own, on loopback. Figures: the time from sending a request to the first chunk of its answer, and how
much later than planned the others come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST, EVERY, CHUNKS = 0.05, 0.02, 50
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


# ---- the server --------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    try:
        while True:
            head, body = await read_message(reader)
            if not head:
                return
            call: dict[str, Any] = json.loads(body) if body else {}
            if b"/chat/completions" not in head.split(b"\r\n")[0] or call.get("max_tokens") == 1:
                whole = json.dumps(
                    {
                        "data": [{"id": "m", "max_model_len": 100_000}],
                        "choices": [
                            {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
                        ],
                        "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
                    }
                ).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ")
                writer.write(str(len(whole)).encode() + b"\r\n\r\n" + whole)
                continue
            await stream(writer, call, len(body) // 4)
    except (ConnectionError, asyncio.IncompleteReadError):
        return
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter, call: dict[str, Any], prompt: int) -> None:
    """One answer to a prompt of so many tokens, each chunk at its time."""
    chunks, every = int(call.get("chunks", CHUNKS)), float(call.get("every", EVERY))
    began = time.perf_counter()
    writer.write(STREAM)
    for i in range(chunks):
        await asyncio.sleep(max(0.0, began + FIRST + i * every - time.perf_counter()))
        delta = {"choices": [{"index": 0, "delta": {"content": f"{time.time():.6f} "}, "finish_reason": None}]}
        writer.write(chunked(b"data: " + json.dumps(delta).encode() + b"\n\n"))
    last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    writer.write(chunked(b"data: " + json.dumps(last).encode() + b"\n\n"))
    options: dict[str, Any] = call.get("stream_options") or {}
    if options.get("include_usage"):
        usage: dict[str, Any] = {
            "choices": [],
            "usage": {"prompt_tokens": prompt, "completion_tokens": chunks, "total_tokens": prompt + chunks},
        }
        writer.write(chunked(b"data: " + json.dumps(usage).encode() + b"\n\n"))
    writer.write(chunked(b"data: [DONE]\n\n") + chunked(b""))
    await writer.drain()


def chunked(data: bytes) -> bytes:
    """A chunk of HTTP's."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b"", b""
    length = next(
        (int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    return head, await reader.readexactly(length)


async def serve() -> None:
    """Serve, and say where."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024, limit=2**26)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


# ---- the clients -------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds: to the first chunk of an answer, and by which a chunk came later than it was written."""

    first: list[float] = field(default_factory=list[float])
    lag: list[float] = field(default_factory=list[float])
    failed: int = 0

    def told(self) -> dict[str, float]:
        """In milliseconds."""
        return {
            "requests": len(self.first),
            "failed": self.failed,
            "first_p50_ms": quantile(self.first, 0.5) * 1e3,
            "first_p99_ms": quantile(self.first, 0.99) * 1e3,
            "lag_p50_ms": quantile(self.lag, 0.5) * 1e3,
            "lag_p99_ms": quantile(self.lag, 0.99) * 1e3,
        }


def quantile(values: Sequence[float], q: float) -> float:
    """The value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, call: dict[str, Any], times: Times) -> str:
        """Ask; returns the text."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        body = json.dumps(call).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        told = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in told.split(b"\r\n")[0]:
            raise ConnectionError(told.decode())
        text, first = "", True
        while True:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            data = (await self._reader.readexactly(size + 2))[:-2]
            if not size:
                return text
            now = time.time()
            if first:
                times.first.append(time.perf_counter() - began)
                first = False
            for event in data.split(b"\n\n"):
                if event.startswith(b"data: {"):
                    delta = json.loads(event[6:])["choices"]
                    content = delta[0]["delta"].get("content") if delta else None
                    if content:
                        times.lag.append(now - float(content))
                        text += content

    def close(self) -> None:
        """Close it."""
        if self._writer is not None:
            self._writer.close()


async def conversation(port: int, name: str, until: float, times: Times, start: float) -> None:
    """Turns of one agent, until the time is over."""
    client, messages = Client(port), [{"role": "system", "content": "S" * 2000}, {"role": "user", "content": name}]
    await asyncio.sleep(start)
    try:
        while time.perf_counter() < until:
            text = await client.ask({"model": "m", "messages": messages, "stream": True}, times)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more " + "r" * 1000}]
    except (ConnectionError, asyncio.IncompleteReadError):
        times.failed += 1
    finally:
        client.close()


async def many(port: int, label: str, streams: int, seconds: float) -> Times:
    """So many agents at once, each begun at another time."""
    times, until, turn = Times(), time.perf_counter() + seconds, FIRST + EVERY * CHUNKS
    agents = (conversation(port, f"{label}-{i}", until, times, turn * i / streams) for i in range(streams))
    await asyncio.gather(*agents)
    return times


async def held(port: int, label: str, streams: int, seconds: float) -> Times:
    """So many streams open at once, each with a chunk every half a second."""
    times = Times()

    async def one(i: int) -> None:
        await asyncio.sleep(2.0 * i / streams)
        client = Client(port)
        call = {"model": "m", "messages": [{"role": "user", "content": f"{label}-{i}"}], "stream": True}
        try:
            await client.ask({**call, "chunks": int(seconds / 0.5), "every": 0.5}, times)
        except (ConnectionError, asyncio.IncompleteReadError):
            times.failed += 1
        finally:
            client.close()

    await asyncio.gather(*(one(i) for i in range(streams)))
    return times


# ---- the run -----------------------------------------------------------------------------------


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """What a process has used of a processor; NaN where that cannot be told."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(command: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """A process, and the first line that it says."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description="What the gateway adds, against a direct connection.")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--held", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of four rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    server, line = started([sys.executable, __file__, "--serve"])
    direct = int(line)
    upstream = f"http://127.0.0.1:{direct}/v1"
    command = [str(Path(sys.executable).with_name("smoothagent")), "gateway", "--upstream", upstream, "--port", "0"]
    gateway, line = started([*command, "--no-state", "--strategy", "keep-recent", "--turns", "4", "--at-turns", "8"])
    found = re.search(r"127\.0\.0\.1:(\d+)/v1", line)
    assert found, line
    through = int(found[1])
    try:
        told = measured(direct, through, gateway, options)
    finally:
        for process in (gateway, server):
            process.terminate()
            process.wait(10)
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


def measured(direct: int, through: int, gateway: subprocess.Popen[str], options: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turn, directly and through the gateway."""
    times = {"direct": Times(), "gateway": Times()}
    used = 0.0
    for number in range(4):
        name, port = [("direct", direct), ("gateway", through)][number % 2]
        before = cpu_seconds(gateway)
        one = asyncio.run(many(port, f"{name}{number}", options.streams, options.seconds))
        used += (cpu_seconds(gateway) - before) if name == "gateway" else 0.0
        times[name].first += one.first
        times[name].lag += one.lag
        times[name].failed += one.failed
    before, began = cpu_seconds(gateway), time.perf_counter()
    open_ones = asyncio.run(held(through, "held", options.held, options.seconds))
    share = (cpu_seconds(gateway) - before) / (time.perf_counter() - began)
    ours, theirs = times["gateway"], times["direct"]
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "streams": options.streams,
        "direct": theirs.told(),
        "gateway": ours.told(),
        "added_first_p50_ms": (quantile(ours.first, 0.5) - quantile(theirs.first, 0.5)) * 1e3,
        "added_first_p99_ms": (quantile(ours.first, 0.99) - quantile(theirs.first, 0.99)) * 1e3,
        "added_lag_p50_ms": (statistics.median(ours.lag) - statistics.median(theirs.lag)) * 1e3,
        "gateway_cpu": used / (2 * options.seconds),
        "held_open": {"streams": options.held, **open_ones.told(), "gateway_cpu": share},
    }


if __name__ == "__main__":
    main()
