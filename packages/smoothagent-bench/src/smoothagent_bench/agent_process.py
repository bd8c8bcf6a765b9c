"""One agent's process, so that no agent's event loop slows another's (paper section 6.1).

Run as ``python -m smoothagent_bench.agent_process`` with a `Job` as one JSON line on stdin. Answers one row a
line, or ``{"error": …}`` and status 2. The end of stdin ends it: the benchmark has stopped, or died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import openai

from smoothagent.errors import SmoothAgentError
from smoothagent_bench.harness import find_harness
from smoothagent_bench.job import Assignment, Job
from smoothagent_bench.sources import Reader
from smoothagent_bench.tokens import counting_client, open_tokens
from smoothagent_bench.workload import ScriptWriter


def main() -> int:
    """Run the job on stdin."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    job = Job.decode(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="smoothagent-agent-") as store,
            counting_client(job.base_url, job.api_key) as http,
        ):
            asyncio.run(_drive(prepare(job, http, Path(store))))
    except (SmoothAgentError, openai.APIError) as error:
        _write(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 2
    return 0


def prepare(job: Job, http: httpx.Client, store: Path) -> Assignment:
    """Size the agent's script with the served tokenizer."""
    workspace = Path(job.workspace)
    sample = (workspace / job.files[0]).read_text(encoding="utf-8")[:4000]
    tokens = open_tokens(http, job.model, sample=sample)
    # The same run and agent read the same files in every mode.
    reader = Reader(workspace, job.files, tokens.text, f"{job.run}/{job.agent}")
    return Assignment(job, ScriptWriter(job.profile, tokens, reader).write(job.variant.kind), tokens, store)


async def _drive(assignment: Assignment) -> None:
    await asyncio.sleep(assignment.job.start_delay_s)
    async for row in find_harness(assignment.job.harness).run(assignment):
        _write(row.encode())


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
