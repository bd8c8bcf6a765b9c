"""Work ahead through the model client itself, for servers that only it can talk to."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autogen_core.models import AssistantMessage, ChatCompletionClient, LLMMessage, SystemMessage, UserMessage

from smoothagent import BackendError, Generated, Prompt, Usage
from smoothagent.serving.backend import Wire
from smoothagent.serving.chat import without_thoughts
from smoothagent.serving.through_object import ObjectBackend
from smoothagent.unseen import unseen

IN_PROCESS = frozenset({"LlamaCppChatCompletionClient", "SKChatCompletionAdapter"})
"""Clients whose model may be an object of this process, which answers one call at a time."""


class AsideBackend(ObjectBackend[LLMMessage]):
    """A `Backend` that knows nothing of its server but what the client object says. One for each conversation.

    It asks a copy, which shares the client's connections and not its counters, on the agent's own loop, which those
    connections belong to. A client that is wrapped in others (AutoGen's cache) is asked itself.

    Args:
        client: the agent's.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.
            Where the client takes no length limit that is known here, nothing is asked for.

    Attributes:
        call: keyword arguments of the agent's last call: its tools.
        loop: the agent's.
    """

    def __init__(self, client: ChatCompletionClient, *, warm: bool) -> None:
        own = inner_of(client)
        able = limit(own, 1) is not None and type(own).__name__ not in IN_PROCESS
        super().__init__(type(own).__name__, warm=warm and able)
        self._client = own
        self.call: Mapping[str, Any] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, natives: Sequence[LLMMessage], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""
        # Hosted servers refuse calls whose results are missing.
        last = len(natives)
        while (
            last and isinstance(newest := natives[last - 1], AssistantMessage) and not isinstance(newest.content, str)
        ):
            last -= 1
        if not last:
            return None
        answer = await self._create(natives[:last], prompt, 1)
        return answer.usage

    async def generate(
        self,
        conversation: str,
        messages: Sequence[Wire],
        prompt: Prompt,
        *,
        max_tokens: int,
        lookahead: bool,
        extends_main: bool = True,
    ) -> Generated:
        """What the client answers, with the agent's tools. Raises BackendError."""
        del conversation, extends_main
        if lookahead and self._name in IN_PROCESS:
            raise BackendError(f"{self._name} answers one call at a time: it is asked when it has to be")
        natives: list[LLMMessage] = [n for n in (getattr(w, "native", None) for w in messages) if n is not None]
        if len(natives) < len(messages):
            raise BackendError(f"{len(messages) - len(natives)} of {len(messages)} messages are none of AutoGen's")
        return await self._create(natives, prompt, max_tokens)

    async def _create(self, natives: Sequence[LLMMessage], prompt: Prompt, max_tokens: int) -> Generated:
        head: list[LLMMessage] = [] if prompt.system is None else [SystemMessage(content=prompt.system)]
        given: dict[str, Any] = {k: v for k, v in self.call.items() if k == "tools"}
        extra: dict[str, Any] = dict(self.call.get("extra_create_args") or {})
        limited = limit(self._client, max_tokens, extra)
        extra |= limited or {}
        if extra:
            given["extra_create_args"] = extra
        loop = self.loop
        if loop is None or not loop.is_running():
            raise BackendError(f"{self._name} is asked on the agent's own event loop, which does not run")
        # Copies: some clients change what they are asked.
        sent = [message.model_copy() for message in seen_by(self._client, natives)]
        asked = self._answer([*head, *sent], given)
        try:
            if loop is asyncio.get_running_loop():
                answer = await asked
            else:
                answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, loop))
        except Exception as error:
            raise BackendError(f"the model client failed in the background: {error!r}") from error
        calls = not isinstance(answer.content, str)
        told = answer.usage  # which some leave out
        usage = Usage() if told is None else Usage(told.prompt_tokens, told.completion_tokens)
        reason = {"function_calls": "tool_calls", "unknown": "stop"}.get(answer.finish_reason, answer.finish_reason)
        if limited is not None and reason == "stop" and 0 < max_tokens <= usage.completion_tokens:
            reason = "length"
        text = "" if calls else without_thoughts(answer.content)
        return Generated(text or "", reason if text is not None else "length", calls, usage)

    async def _answer(self, messages: Sequence[LLMMessage], given: Mapping[str, Any]) -> Any:
        with unseen():
            return await _with_counters_of_its_own(self._client).create(messages, **given)


def _with_counters_of_its_own(client: ChatCompletionClient) -> ChatCompletionClient:
    """A copy that shares everything but what is counted; `copy.copy` would make connections of its own."""
    copied: Any = object.__new__(type(client))
    for name, value in vars(client).items():
        counted = "usage" in name or "calls" in name
        copied.__dict__[name] = copy.deepcopy(value) if counted else value
    return copied


def inner_of(client: ChatCompletionClient) -> ChatCompletionClient:
    """The client that makes the requests, where one is wrapped around another (AutoGen's cache)."""
    for _ in range(8):
        inner = getattr(client, "client", None)
        if not isinstance(inner, ChatCompletionClient):
            break
        client = inner
    return client


def seen_by(client: ChatCompletionClient, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
    """What AutoGen's agents send of messages: to a client without vision, text in the place of images."""
    if client.model_info["vision"]:
        return list(messages)
    return [_without_images(m) if isinstance(m, UserMessage) else m for m in messages]


def _without_images(message: UserMessage) -> UserMessage:
    if isinstance(message.content, str):
        return message
    text = "\n".join(part if isinstance(part, str) else "<image>" for part in message.content)
    return UserMessage(content=text, source=message.source)


def limit(client: ChatCompletionClient, tokens: int, call: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """``extra_create_args`` for an answer of at most so many tokens; None where no limit is known.

    Args:
        client: one that makes requests itself.
        tokens: how many.
        call: what the call has of them already.
    """
    names = {c.__name__ for c in type(client).__mro__}
    own: dict[str, Any] = {**dict(getattr(client, "_create_args", None) or {}), **(call or {})}
    if "BaseOllamaChatCompletionClient" in names:
        # They take the place of the client's own, its context size among them.
        return {"options": {**dict(own.get("options") or {}), "num_predict": tokens}}
    if "BaseAnthropicChatCompletionClient" in names:
        return None if own.get("thinking") else {"max_tokens": tokens}
    if "BaseOpenAIChatCompletionClient" in names:
        reasons = re.match(r"o\d|gpt-5", str(own.get("model") or ""))
        return {"max_completion_tokens" if reasons or "max_completion_tokens" in own else "max_tokens": tokens}
    return {"max_tokens": tokens} if "LlamaCppChatCompletionClient" in names else None
