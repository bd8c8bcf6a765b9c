"""What the tests of this package share: agents of Mini-Agent's, or of the stand-in's, on a server on loopback.

Where ``mini_agent`` can be imported every test runs with both.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from smoothagent.machine import Stage
from smoothagent_miniagent import Attachment, standin

OUTPUT = "r" * 400


@dataclass(frozen=True)
class World:
    """Whose classes.

    Attributes:
        name: whose.
        agent: the class of agents.
        message: of messages.
        openai: makes an LLM client for OpenAI's API at a URL.
        anthropic: for Anthropic's.
        result: of a tool's result.
    """

    name: str
    agent: Any
    message: Any
    openai: Callable[..., Any]
    anthropic: Callable[..., Any]
    result: Any

    def make(self, llm: Any, tools: list[Any] | None = None, **more: Any) -> Any:
        """An agent."""
        given: dict[str, Any] = {"system_prompt": "S" * 40, "workspace_dir": mkdtemp(), **more}
        return self.agent(llm_client=llm, tools=tools or [], **given)


def _of_standin() -> World:
    def openai(url: str, retries: int = 0) -> Any:
        return standin.LLMClient(_closing(standin.OpenAIClient("x", url, "m", _retry(standin.RetryConfig, retries))))

    def anthropic(url: str) -> Any:
        client = AsyncAnthropic(api_key="x", base_url=url)
        return standin.LLMClient(_closing(standin.AnthropicClient(client, "m", standin.RetryConfig(False))))

    return World("standin", standin.Agent, standin.Message, openai, anthropic, standin.ToolResult)


def _of_mini_agent() -> World:
    def module(name: str) -> Any:
        return import_module(f"mini_agent.{name}")

    provider = module("schema").LLMProvider

    def make(kind: Any, url: str, retries: int) -> Any:
        llm = module("llm").LLMClient("x", kind, url, "m", _retry(module("retry").RetryConfig, retries))
        _closing(llm._client)
        return llm

    def openai(url: str, retries: int = 0) -> Any:
        return make(provider.OPENAI, url, retries)

    def anthropic(url: str) -> Any:
        return make(provider.ANTHROPIC, url, 0)

    message, result = module("schema").Message, module("tools.base").ToolResult
    return World("mini_agent", module("agent").Agent, message, openai, anthropic, result)


def _retry(config: Any, retries: int) -> Any:
    return config(enabled=bool(retries), max_retries=retries, initial_delay=0.01)


def _closing(client: Any) -> Any:
    # A connection that is kept is reported as lost when its loop has ended.
    client.client = client.client.with_options(default_headers={"Connection": "close"}, max_retries=0)
    return client


WORLDS = [pytest.param(_of_standin, id="standin")]
if find_spec("mini_agent") is not None:
    WORLDS.append(pytest.param(_of_mini_agent, id="mini_agent"))


class Look:
    """A tool that takes as long as lookahead does."""

    name = "look"
    description = "Look at something."
    parameters: dict[str, Any] = {"type": "object", "properties": {"number": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self, world: World, wait: Callable[[], Awaitable[None]] | None = None, output: str = OUTPUT) -> None:
        self._result, self.wait, self._output = world.result, wait, output
        self.calls = 0

    def to_schema(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "input_schema": self.parameters}

    def to_openai_schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    async def execute(self, number: int) -> Any:
        self.calls += 1
        if self.wait is not None:
            await self.wait()
        return self._result(success=True, content=f"{number} {self._output}")


async def settled(attachment: Attachment) -> None:
    """Wait until lookahead has done what it can by now."""
    deadline = time.monotonic() + 30
    while True:
        job = attachment.runtime._lookahead.state.job  # pyright: ignore[reportPrivateUsage]
        if job is None or job.stage is Stage.READY:
            return
        assert time.monotonic() < deadline, "lookahead is not ready"
        await asyncio.sleep(0.002)


async def run(agent: Any, task: str | None = None) -> str:
    """A run of an agent's, without what it prints."""
    if task is not None:
        agent.add_user_message(task)
    with contextlib.redirect_stdout(io.StringIO()):
        return str(await agent.run())


def home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Mini-Agent writes its log there."""
    monkeypatch.setenv("HOME", str(folder))
