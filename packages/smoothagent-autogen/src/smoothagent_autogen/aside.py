"""Work ahead through the model client itself, for servers that only it can talk to."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from autogen_core.models import ChatCompletionClient, LLMMessage, SystemMessage

from smoothagent import BackendError, Generated, Prompt, Usage
from smoothagent.serving.backend import Wire
from smoothagent.serving.through_object import ObjectBackend

_unseen: ContextVar[bool] = ContextVar("smoothagent_autogen_unseen", default=False)

IN_PROCESS = frozenset({"LlamaCppChatCompletionClient", "SKChatCompletionAdapter"})
"""Clients whose model may be an object of this process, which answers one call at a time."""


@contextlib.contextmanager
def unseen() -> Generator[None]:
    """What is called inside is no call of the agent's."""
    token = _unseen.set(True)
    try:
        yield
    finally:
        _unseen.reset(token)


def is_unseen() -> bool:
    """Whether a client that is called here is not to be taken for the agent's."""
    return _unseen.get()


class AsideBackend(ObjectBackend[LLMMessage]):
    """A `Backend` that knows nothing of its server but what the client object says. One for each conversation.

    It asks a copy, so that the user's client counts no tokens of it, on the agent's own loop, which its connections
    belong to.

    Args:
        client: the agent's.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.
            Where the client takes no length limit that is known here, nothing is asked for.

    Attributes:
        call: keyword arguments of the agent's last call: its tools.
        loop: the agent's.
    """

    def __init__(self, client: ChatCompletionClient, *, warm: bool) -> None:
        able = limit(client, 1) is not None and type(client).__name__ not in IN_PROCESS
        super().__init__(type(client).__name__, warm=warm and able)
        self._client = client
        self.call: Mapping[str, Any] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, natives: Sequence[LLMMessage], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""
        answer = await self._create(natives, prompt, 1)
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
        extra = {**dict(self.call.get("extra_create_args") or {}), **(limit(self._client, max_tokens) or {})}
        if extra:
            given["extra_create_args"] = extra
        loop = self.loop
        if loop is None or not loop.is_running():
            raise BackendError(f"{self._name} is asked on the agent's own event loop, which does not run")
        asked = self._answer([*head, *natives], given)
        try:
            if loop is asyncio.get_running_loop():
                answer = await asked
            else:
                answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, loop))
        except Exception as error:
            raise BackendError(f"the model client failed in the background: {error!r}") from error
        calls = not isinstance(answer.content, str)
        usage = Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        reason = {"function_calls": "tool_calls", "unknown": "stop"}.get(answer.finish_reason, answer.finish_reason)
        if reason == "stop" and 0 < max_tokens <= usage.completion_tokens:
            reason = "length"
        return Generated("" if calls else answer.content, reason, calls, usage)

    async def _answer(self, messages: Sequence[LLMMessage], given: Mapping[str, Any]) -> Any:
        # What it counts is the copy's: it puts sums in its fields, and changes none in place.
        client: Any = copy.copy(self._client)
        with unseen():
            return await client.create(messages, **given)


def limit(client: ChatCompletionClient, tokens: int) -> dict[str, Any] | None:
    """``extra_create_args`` for an answer of at most so many tokens; None where no limit is known."""
    names = {c.__name__ for c in type(client).__mro__}
    if "BaseOllamaChatCompletionClient" in names:
        return {"options": {"num_predict": tokens}}
    if names & {"BaseOpenAIChatCompletionClient", "BaseAnthropicChatCompletionClient", "LlamaCppChatCompletionClient"}:
        return {"max_tokens": tokens}
    return None
