"""A real agent with a SQLite checkpointer, killed in mid-lookahead, goes on in another process as if nothing were."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agent_server import AgentServer, serving

TURNS = 14
SCRIPT = Path(__file__).with_name("resumed_agent.py")


def started(server: AgentServer, database: Path, hang: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), server.url, str(database), str(hang)], stdout=subprocess.PIPE, text=True
    )


def looked(process: subprocess.Popen[str], number: int) -> None:
    """Wait until the tool has been called for the n-th time."""
    assert process.stdout is not None
    # However it fails to come, the end of its output ends the waiting.
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if line == f"look {number}\n":
                return
    finally:
        watchdog.cancel()
    raise AssertionError(f"it ended with {process.wait()} before call {number}")


def finished(server: AgentServer, database: Path) -> list[tuple[str, str, str]]:
    """The state's messages (type, text, id) after the agent has gone on to its end."""
    with started(server, database, 0) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [tuple(m) for m in json.loads(output.splitlines()[-1])]


def paired(body: dict[str, Any]) -> bool:
    waiting: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting
            waiting += [c["id"] for c in message.get("tool_calls") or ()]
    return not waiting


def test_a_killed_agent_loses_nothing_and_finds_no_wrong_prefix(tmp_path: Path) -> None:
    hang = 9
    # Lookahead requests, of which the first comes after the seventh call, are never answered: it dies in the middle of
    # one, beside which it has gone on.
    server = AgentServer(turns=TURNS)
    server.hold_from = 7
    with serving(server):
        process = started(server, tmp_path / "one.db", hang)
        try:
            looked(process, hang)
            assert server.holding.wait(60), "nothing is in flight: the test would say nothing"
        finally:
            process.kill()
            process.communicate()
        before = server.main
        assert len(before) == hang
        server.hold_from = 0
        server.released.set()
        messages = finished(server, tmp_path / "one.db")
        after = server.main[len(before) :]

    numbers = [int(text.split()[0]) for kind, text, _ in messages if kind == "tool"]
    assert numbers == list(range(numbers[0], TURNS + 1)), "every result is there once, in order"
    assert messages[-1][:2] == ("ai", "done")
    assert len({i for *_, i in messages}) == len(messages)
    # What the new process sends first is what the old one sent last, with the result that was still to come.
    last, first = before[-1]["messages"], after[0]["messages"]
    assert first[-1]["content"].startswith(f"{hang} "), "the result that it was killed before"
    if first[: len(last)] == last:
        assert len(first) == len(last) + 2
    else:
        assert "summary of the conversation" in str(first[1]["content"])
    assert all(map(paired, server.main))
    assert any("summary of the conversation" in str(b["messages"][1]["content"]) for b in after), "and it goes on so"
