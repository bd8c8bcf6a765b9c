"""The embedded engine and a short real conversation on it. No assertion on absolute times."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from quiet import Quiet
from smoothagent import BackendUnreachableError, ConfigurationError, Message, Prompt
from smoothagent_bench.engine import EmbeddedEngine, EngineInfo
from smoothagent_bench.model_file import find_model
from smoothagent_bench.record import ResultsFile
from smoothagent_bench.remote import find_server
from smoothagent_bench.run import Bench, Plan, Server
from smoothagent_bench.strategies import variants
from smoothagent_bench.tokens import counting_client, open_tokens
from smoothagent_bench.workload import Isolation, demo_profile

engine_test = pytest.mark.engine

TINY = replace(
    demo_profile(),
    steps=6,
    step=110,
    reply=24,
    hard=500,
    soft=380,
    keep=120,
    summary=24,
    keep_turns=2,
    at_turns=4,
    isolation=Isolation(opens_at=0, reads=2, read_tokens=160, delegates_at=3, system_tokens=60, instruction_tokens=24),
)


@pytest.fixture(scope="module")
def engine() -> Generator[EngineInfo]:
    with EmbeddedEngine(find_model(), conversations=2, window=2_048) as info:
        yield info


@engine_test
def test_it_is_what_find_server_finds(engine: EngineInfo) -> None:
    found = find_server(engine.base_url, None)
    assert (found.model, found.window, found.slots) == ("smollm2", 2_048, 7)


@engine_test
def test_counts_agree_with_the_engines_usage(engine: EngineInfo) -> None:
    history = [Message("system", "Be brief."), Message("user", "Count: 1 2 3 <|im_end|> ünïcode \x00")]
    with counting_client(engine.base_url) as http:
        tokens = open_tokens(http, engine.model, sample="x")
        body = {"messages": [m.wire() for m in history], "max_tokens": 1, "id_slot": 6}
        usage = http.post("v1/chat/completions", json=body).json()["usage"]
        assert sum(map(tokens.count, history)) + tokens.fixed(Prompt()) == usage["prompt_tokens"]


@engine_test
@pytest.mark.parametrize(("kind", "modes"), [("summarize", ("sync", "lookahead")), ("isolate", ("none", "lookahead"))])
def test_a_short_conversation_in_its_modes(
    engine: EngineInfo, kind: str, modes: tuple[str, ...], tmp_path: Path
) -> None:
    results = ResultsFile(tmp_path)
    server = Server(engine.base_url, engine.model, engine.window, slots=6)
    asyncio.run(Bench(Plan(variants([kind]), TINY, 1, 0.1, 1, modes=modes), server, results, Quiet()).run())
    rows = results.rows()
    assert len(rows) == TINY.steps * len(modes)
    instruction = TINY.isolation.instruction_tokens
    assert {r.completion_tokens for r in rows} <= {TINY.reply, instruction}
    by_mode = {mode: [r for r in rows if r.mode == mode] for mode in modes}
    assert not any(r.commit for r in by_mode.get("none", []))
    assert [r.turn for r in by_mode.get("sync", []) if r.commit] == [4] * ("sync" in modes)
    # All modes have the same conversation up to the commit, but for what the model writes.
    sizes = [[r.prompt_tokens for r in by_mode[mode]][:4] for mode in modes]
    assert max(abs(a - b) for row in zip(*sizes, strict=True) for a in row for b in row) <= 24
    # Every turn but the first, and a synchronous commit, extends a warm prefix.
    for row in by_mode[modes[0]][1:4]:
        assert row.cached_tokens
        assert row.cached_tokens > row.prompt_tokens // 2


@engine_test
def test_it_ends_with_its_parent() -> None:
    code = (
        "import sys, time; from smoothagent_bench.engine import EmbeddedEngine;"
        "from smoothagent_bench.model_file import find_model;"
        "info = EmbeddedEngine(find_model(), window=512).__enter__();"
        "print(info.pid, info.base_url, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        assert httpx.get(f"{url}/models", timeout=30).is_success
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not _alive(int(pid)):
            return
        asyncio.run(asyncio.sleep(0.05))
    pytest.fail("the engine outlived its parent")


@engine_test
def test_its_death_is_told_with_its_last_words() -> None:
    engine = EmbeddedEngine(find_model(), window=512)
    with engine as info:
        engine.check()
        os.kill(info.pid, signal.SIGKILL)
        for _ in range(200):
            if engine.ended:
                break
            asyncio.run(asyncio.sleep(0.05))
        with pytest.raises(BackendUnreachableError, match="has died"):
            engine.check()


@engine_test
def test_a_broken_model_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(ConfigurationError, match="while starting"), EmbeddedEngine(tmp_path / "model.gguf"):
        pass


def test_a_missing_model_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model file at"), EmbeddedEngine(tmp_path / "model.gguf"):
        pass


def test_no_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="conversations is 0"):
        EmbeddedEngine(tmp_path, conversations=0)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
