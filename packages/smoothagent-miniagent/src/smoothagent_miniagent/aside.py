"""Work ahead through the LLM client itself, for servers that only it can talk to, such as Anthropic's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from smoothagent import BackendError, Generated, Prompt, Usage
from smoothagent.request import read_usage
from smoothagent.serving.backend import Wire
from smoothagent.serving.chat import without_thoughts
from smoothagent.serving.through_object import ObjectBackend
from smoothagent_miniagent.clients import Create, Kind, kind_of, limited, rerouted


class AsideBackend(ObjectBackend[Any]):
    """A `Backend` that knows nothing of its server but what the LLM client says. One for each conversation.

    It is asked on the agent's own loop, which its connections belong to.

    Args:
        llm: the agent's.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.
            A client of an unknown kind is never asked for that, since it takes no length limit.

    Attributes:
        tools: of the agent's last call.
        loop: the agent's.
    """

    def __init__(self, llm: Any, *, warm: bool) -> None:
        self._kind = kind_of(llm)
        super().__init__(type(llm).__name__, warm=warm and self._kind is not Kind.OTHER)
        self._llm = llm
        self.tools: Sequence[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, natives: Sequence[Any], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""
        del prompt
        # Hosted servers refuse calls whose results are missing.
        last = len(natives)
        while last and getattr(natives[last - 1], "tool_calls", None):
            last -= 1
        if not any(native.role != "system" for native in natives[:last]):
            return None  # nor do they take a request without a message
        return (await self._answered(natives[:last], 1)).usage

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
        del conversation, prompt, lookahead, extends_main
        natives = [native for native in (getattr(wire, "native", None) for wire in messages) if native is not None]
        if len(natives) < len(messages):
            raise BackendError(f"{len(messages) - len(natives)} of {len(messages)} messages are none of Mini-Agent's")
        return await self._answered(natives, max_tokens)

    async def _answered(self, natives: Sequence[Any], max_tokens: int) -> Generated:
        loop = self.loop
        if loop is None or not loop.is_running():
            raise BackendError(f"{self._name} is asked on the agent's own event loop, which does not run")
        asked = self._ask(natives, max_tokens)
        try:
            if loop is asyncio.get_running_loop():
                return await asked
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, loop))
        except Exception as error:
            raise BackendError(f"the LLM client failed in the background: {error!r}") from error

    async def _ask(self, natives: Sequence[Any], max_tokens: int) -> Generated:
        raw: Any = None

        async def through(create: Create, params: dict[str, Any]) -> Any:
            nonlocal raw
            raw = await create(**limited(self._llm, params, max_tokens))
            return raw

        llm = self._llm if self._kind is Kind.OTHER else rerouted(self._llm, through, retries=False)
        response = await llm.generate(messages=list(natives), tools=self.tools)
        usage = usage_of(raw) or read_usage(response.usage) or Usage()
        reason = _reason(raw)
        if reason == "stop" and self._kind is not Kind.OTHER and 0 < max_tokens <= usage.completion_tokens:
            reason = "length"
        text = without_thoughts(response.content or "")
        calls = bool(response.tool_calls)
        return Generated(text or "", reason if text is not None else "length", calls, usage)


def usage_of(raw: Any) -> Usage | None:
    """Token counts of a vendor's answer; Mini-Agent's own drop what was cached."""
    told = getattr(raw, "usage", None)
    if told is None or not hasattr(told, "input_tokens"):
        return read_usage(told)
    cached = getattr(told, "cache_read_input_tokens", None)
    written = getattr(told, "cache_creation_input_tokens", None) or 0
    return Usage(told.input_tokens + (cached or 0) + written, told.output_tokens, cached)


def _reason(raw: Any) -> str:
    choices = getattr(raw, "choices", None)
    told: Any = getattr(choices[0], "finish_reason", None) if choices else getattr(raw, "stop_reason", None)
    reason = str(told or "stop")
    return {"max_tokens": "length", "end_turn": "stop", "tool_use": "tool_calls"}.get(reason, reason)
