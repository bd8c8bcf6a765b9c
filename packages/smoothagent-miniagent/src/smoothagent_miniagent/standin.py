"""A stand-in for Mini-Agent, which is on git only: the same shapes and the same order of calls.

The benchmark and the tests take Mini-Agent itself where ``mini_agent`` can be imported, and this elsewhere. It has the
public attributes, arguments and message classes of commit d76a4f6, and its agent awaits its summarizer, then its LLM,
then its tools one after the other, as that does; prompts of the summarizer, printing and logging are not the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from openai import AsyncOpenAI
from pydantic import BaseModel


class FunctionCall(BaseModel):
    """What is called, with parsed arguments."""

    name: str
    arguments: dict[str, Any]


class ToolCall(BaseModel):
    """One call."""

    id: str
    type: str
    function: FunctionCall


class Message(BaseModel):
    """A chat message."""

    role: str
    content: str | list[dict[str, Any]]
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class TokenUsage(BaseModel):
    """Token counts of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class LLMResponse(BaseModel):
    """A whole answer."""

    content: str
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    finish_reason: str
    usage: TokenUsage | None = None


class ToolResult(BaseModel):
    """What a tool returns."""

    success: bool
    content: str = ""
    error: str | None = None


class Tool(Protocol):
    """What the agent asks of a tool."""

    name: str

    def to_schema(self) -> dict[str, Any]:
        """In Anthropic's form."""
        ...

    def to_openai_schema(self) -> dict[str, Any]:
        """In OpenAI's form."""
        ...

    def execute(self, **arguments: Any) -> Awaitable[Any]:
        """Do it; returns a `ToolResult` or what looks like one."""
        ...


class RetryConfig:
    """How often a failed request is sent again.

    Args:
        enabled: whether at all.
        max_retries: how often.
        initial_delay: seconds before the first time.
    """

    def __init__(self, enabled: bool = True, max_retries: int = 3, initial_delay: float = 1.0) -> None:
        self.enabled, self.max_retries, self.initial_delay = enabled, max_retries, initial_delay


class _Client:
    """What both clients share: a request is made by ``_make_api_request`` on the vendor's ``client``."""

    client: Any

    def __init__(self, api_key: str, api_base: str, model: str, retry_config: RetryConfig | None = None) -> None:
        self.api_key, self.api_base, self.model = api_key, api_base, model
        self.retry_config = retry_config or RetryConfig()
        self.retry_callback: Callable[[Exception, int], None] | None = None

    async def generate(self, messages: list[Message], tools: list[Any] | None = None) -> LLMResponse:
        """Ask for an answer."""
        return self._parse_response(await self._tried(*self._arguments(messages, tools)))

    def _arguments(self, messages: list[Message], tools: list[Any] | None) -> tuple[Any, ...]:
        raise NotImplementedError

    def _parse_response(self, response: Any) -> LLMResponse:
        raise NotImplementedError

    async def _make_api_request(self, *arguments: Any) -> Any:
        raise NotImplementedError

    async def _tried(self, *arguments: Any) -> Any:
        attempts = self.retry_config.max_retries + 1 if self.retry_config.enabled else 1
        for attempt in range(1, attempts + 1):
            try:
                return await self._make_api_request(*arguments)
            except Exception as error:
                if attempt == attempts:
                    raise
                if self.retry_callback is not None:
                    self.retry_callback(error, attempt)
                await asyncio.sleep(self.retry_config.initial_delay)
        raise AssertionError("unreachable")


class OpenAIClient(_Client):
    """For OpenAI's API."""

    def __init__(self, api_key: str, api_base: str, model: str, retry_config: RetryConfig | None = None) -> None:
        super().__init__(api_key, api_base, model, retry_config)
        self.client = AsyncOpenAI(api_key=api_key, base_url=api_base)

    async def _make_api_request(self, *arguments: Any) -> Any:
        messages, tools = arguments
        params: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "extra_body": {"reasoning_split": True},
        }
        if tools:
            params["tools"] = [_openai_form(tool) for tool in tools]
        return await self.client.chat.completions.create(**params)

    def _arguments(self, messages: list[Message], tools: list[Any] | None) -> tuple[Any, ...]:
        return self._convert_messages(messages)[1], tools

    def _convert_messages(self, messages: list[Message]) -> tuple[str | None, list[dict[str, Any]]]:
        return None, [_openai_message(m) for m in messages if m.role in ("system", "user", "assistant", "tool")]

    def _parse_response(self, response: Any) -> LLMResponse:
        message = response.choices[0].message
        thoughts = "".join(getattr(one, "text", "") for one in getattr(message, "reasoning_details", None) or ())
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(name=call.function.name, arguments=json.loads(call.function.arguments)),
            )
            for call in message.tool_calls or ()
        ]
        usage = None
        if response.usage:
            usage = TokenUsage(
                prompt_tokens=response.usage.prompt_tokens or 0,
                completion_tokens=response.usage.completion_tokens or 0,
                total_tokens=response.usage.total_tokens or 0,
            )
        return LLMResponse(
            content=message.content or "",
            thinking=thoughts or None,
            tool_calls=calls or None,
            finish_reason="stop",
            usage=usage,
        )


class AnthropicClient(_Client):
    """For Anthropic's API, over a client of theirs.

    Args:
        client: an ``anthropic.AsyncAnthropic``, which Mini-Agent makes itself.
        model: the model's name.
        retry_config: see there.
    """

    def __init__(self, client: Any, model: str, retry_config: RetryConfig | None = None) -> None:
        super().__init__(str(client.api_key), str(client.base_url), model, retry_config)
        self.client = client

    async def _make_api_request(self, *arguments: Any) -> Any:
        system, messages, tools = arguments
        params: dict[str, Any] = {"model": self.model, "max_tokens": 16384, "messages": messages}
        if system:
            params["system"] = system
        if tools:
            params["tools"] = [tool if isinstance(tool, dict) else tool.to_schema() for tool in tools]
        return await self.client.messages.create(**params)

    def _arguments(self, messages: list[Message], tools: list[Any] | None) -> tuple[Any, ...]:
        return *self._convert_messages(messages), tools

    def _convert_messages(self, messages: list[Message]) -> tuple[str | None, list[dict[str, Any]]]:
        system = next((str(m.content) for m in reversed(messages) if m.role == "system"), None)
        return system, [_anthropic_message(m) for m in messages if m.role != "system"]

    def _parse_response(self, response: Any) -> LLMResponse:
        blocks = list(response.content)
        calls = [
            ToolCall(id=b.id, type="function", function=FunctionCall(name=b.name, arguments=b.input))
            for b in blocks
            if b.type == "tool_use"
        ]
        told = response.usage
        cached = (getattr(told, "cache_read_input_tokens", 0) or 0) + (
            getattr(told, "cache_creation_input_tokens", 0) or 0
        )
        prompt = told.input_tokens + cached
        return LLMResponse(
            content="".join(b.text for b in blocks if b.type == "text"),
            thinking="".join(b.thinking for b in blocks if b.type == "thinking") or None,
            tool_calls=calls or None,
            finish_reason=response.stop_reason or "stop",
            usage=TokenUsage(
                prompt_tokens=prompt, completion_tokens=told.output_tokens, total_tokens=prompt + told.output_tokens
            ),
        )


class LLMClient:
    """What agents get: one of the clients, wrapped.

    Args:
        client: the one.
    """

    def __init__(self, client: _Client) -> None:
        self._client = client
        self.model, self.api_key, self.api_base = client.model, client.api_key, client.api_base

    @property
    def retry_callback(self) -> Callable[[Exception, int], None] | None:
        """Told of each retry."""
        return self._client.retry_callback

    @retry_callback.setter
    def retry_callback(self, value: Callable[[Exception, int], None] | None) -> None:
        self._client.retry_callback = value

    async def generate(self, messages: list[Message], tools: list[Any] | None = None) -> LLMResponse:
        """Ask for an answer."""
        return await self._client.generate(messages, tools)


class Agent:
    """The agent.

    Args:
        llm_client: what it asks.
        system_prompt: what it is told first.
        tools: its tools.
        max_steps: most model calls of a run.
        workspace_dir: where its tools work.
        token_limit: tokens beyond which it summarizes.
    """

    def __init__(
        self,
        llm_client: Any,
        system_prompt: str,
        tools: Sequence[Any],
        max_steps: int = 50,
        workspace_dir: str = "./workspace",
        token_limit: int = 80000,
    ) -> None:
        self.llm = llm_client
        self.tools: dict[str, Any] = {tool.name: tool for tool in tools}
        self.max_steps, self.token_limit = max_steps, token_limit
        self.workspace_dir = Path(workspace_dir)
        self.cancel_event: asyncio.Event | None = None
        self.system_prompt = system_prompt
        self.messages: list[Message] = [Message(role="system", content=system_prompt)]
        self.api_total_tokens = 0
        self._skip_next_token_check = False

    def add_user_message(self, content: str) -> None:
        """What the user says."""
        self.messages.append(Message(role="user", content=content))

    async def run(self, cancel_event: asyncio.Event | None = None) -> str:
        """Call model and tools until an answer calls none; returns its text, or what went wrong."""
        if cancel_event is not None:
            self.cancel_event = cancel_event
        for _ in range(self.max_steps):
            if self._cancelled():
                return "Task cancelled by user."
            await self._summarize_messages()
            tools = list(self.tools.values())
            try:
                response = await self.llm.generate(messages=self.messages, tools=tools)
            except Exception as error:
                return f"LLM call failed: {error}"
            if response.usage:
                self.api_total_tokens = response.usage.total_tokens
            self.messages.append(
                Message(
                    role="assistant",
                    content=response.content,
                    thinking=response.thinking,
                    tool_calls=response.tool_calls,
                )
            )
            if not response.tool_calls:
                return response.content
            if self._cancelled() or await self._called(response.tool_calls):
                return "Task cancelled by user."
        return f"Task couldn't be completed after {self.max_steps} steps."

    async def _called(self, calls: Sequence[Any]) -> bool:
        """Run the calls, one after the other; whether the run was cancelled meanwhile."""
        for call in calls:
            name = call.function.name
            try:
                result: Any = await self.tools[name].execute(**call.function.arguments)
            except KeyError:
                result = ToolResult(success=False, error=f"Unknown tool: {name}")
            except Exception as error:
                result = ToolResult(success=False, error=f"Tool execution failed: {type(error).__name__}: {error}")
            content = result.content if result.success else f"Error: {result.error}"
            self.messages.append(Message(role="tool", content=content, tool_call_id=call.id, name=name))
            if self._cancelled():
                return True
        return False

    def _cancelled(self) -> bool:
        """Whether it was; then an unfinished step is taken back."""
        if self.cancel_event is None or not self.cancel_event.is_set():
            return False
        last = max((i for i, m in enumerate(self.messages) if m.role == "assistant"), default=None)
        if last is not None:
            self.messages = self.messages[:last]
        return True

    async def _summarize_messages(self) -> None:
        """Beyond the limit a summary of every round takes its place; user messages stay."""
        if self._skip_next_token_check:
            self._skip_next_token_check = False
            return
        if max(self._estimate_tokens(), self.api_total_tokens) <= self.token_limit:
            return
        users = [i for i, m in enumerate(self.messages) if m.role == "user" and i > 0]
        if not users:
            return
        made = [self.messages[0]]
        for number, (begin, end) in enumerate(zip(users, [*users[1:], len(self.messages)], strict=True), 1):
            made.append(self.messages[begin])
            if done := self.messages[begin + 1 : end]:
                summary = await self._create_summary(done, number)
                made.append(Message(role="user", content=f"[Assistant Execution Summary]\n\n{summary}"))
        self.messages = made
        self._skip_next_token_check = True

    async def _create_summary(self, messages: Sequence[Message], round_num: int) -> str:
        lines = [f"{m.role}: {m.content}" for m in messages]
        asked = f"Summarize round {round_num} of an agent's execution:\n\n" + "\n".join(lines)
        system = "You are an assistant skilled at summarizing Agent execution processes."
        told = [Message(role="system", content=system), Message(role="user", content=asked)]
        try:
            response = await self.llm.generate(messages=told)
        except Exception:
            return asked
        return str(response.content)

    def _estimate_tokens(self) -> int:
        texts = [f"{m.content}{m.thinking or ''}{m.tool_calls or ''}" for m in self.messages]
        return int(sum(map(len, texts)) / 2.5)


def _openai_form(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        return tool.to_openai_schema()
    given: dict[str, Any] = dict(tool)  # pyright: ignore[reportUnknownArgumentType]
    if given.get("type") == "function":
        return given
    function = {"name": given["name"], "description": given["description"], "parameters": given["input_schema"]}
    return {"type": "function", "function": function}


def _openai_message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role}
    if message.role != "assistant" or message.content:
        made["content"] = message.content
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "assistant" and message.thinking:
        made["reasoning_details"] = [{"text": message.thinking}]
    return made


def _anthropic_message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        block = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [block]}
    if message.role != "assistant" or not (message.thinking or message.tool_calls):
        return {"role": message.role, "content": message.content}
    blocks: list[dict[str, Any]] = []
    if message.thinking:
        blocks.append({"type": "thinking", "thinking": message.thinking})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.function.name, "input": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    return {"role": "assistant", "content": blocks}
