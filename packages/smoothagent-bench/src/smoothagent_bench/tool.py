"""The agent's tool: it runs the command for real, and takes as long as the benchmark says a tool takes."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFINITION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run one command in the workspace and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def call(number: int, argv: Sequence[str]) -> dict[str, Any]:
    """The wire tool call that asks for a command."""
    arguments = json.dumps({"command": shlex.join(argv)})
    return {"id": f"call_{number}", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def result(tool_call: dict[str, Any], output: str) -> dict[str, Any]:
    """The wire message that answers a call."""
    return {"role": "tool", "tool_call_id": tool_call["id"], "content": output}


async def run(tool_call: dict[str, Any], workspace: Path, seconds: float) -> str:
    """Execute a call's command in the workspace, in ``seconds`` at least.

    Raises:
        RuntimeError: the command failed; it names it and what it said.
    """
    command = str(json.loads(tool_call["function"]["arguments"])["command"])
    sleeping = asyncio.create_task(asyncio.sleep(seconds))
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            cwd=workspace,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        await sleeping
    finally:
        sleeping.cancel()
    if process.returncode != 0:
        said = errors.decode(errors="replace").strip()
        raise RuntimeError(f"the tool's command {command!r} ended with status {process.returncode}: {said}")
    return output.decode()
