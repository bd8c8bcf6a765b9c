"""One chat completion, streamed, put together again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from smoothagent.errors import BackendProtocolError, BackendUnreachableError
from smoothagent.serving import chat
from smoothagent.serving.backend import Generated, Usage
from smoothagent.serving.dialects.base import mapping, rows, whole
from smoothagent.serving.unpaced import Pacing


class Answer:
    """A chat completion as its events come in."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.tool_calls = False
        self.usage: Usage | None = None
        self.events = 0

    def begin(self) -> int:
        """Another piece of the answer comes; returns the events so far."""
        self.finish_reason = self.usage = None
        return self.events

    def take(self, event: Mapping[str, Any]) -> bool:
        """Add one event; whether it carried something the model wrote."""
        if "choices" not in event and "usage" not in event:
            raise BackendProtocolError(f"a streamed answer holds an event that is no completion: {str(event)[:80]!r}")
        if event.get("usage"):
            self.usage = usage(event["usage"])
        wrote = False
        for choice in rows(event.get("choices"))[:1]:
            delta = mapping(choice.get("delta"))
            content = delta.get("content")
            if isinstance(content, str) and content:
                self.text += content
                wrote = True
            if delta.get("tool_calls") or delta.get("function_call"):
                self.tool_calls = wrote = True
            # vLLM calls it ``reasoning`` since 0.12, SGLang and DeepSeek's own API as before.
            wrote = wrote or bool(delta.get("reasoning_content") or delta.get("reasoning"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.events += wrote
        return wrote

    def generated(self) -> Generated:
        """The whole answer. Raises BackendUnreachableError where it just stopped."""
        if self.finish_reason is None and not self.tool_calls:
            raise BackendUnreachableError(f"the answer broke off after {self.events} events, without saying why")
        said = chat.without_thoughts(self.text)
        return Generated(
            text=said or "",
            finish_reason=self.finish_reason if said is not None else "length",
            tool_calls=self.tool_calls or self.finish_reason == "tool_calls" or chat.calls_tools(said or ""),
            usage=self.usage or Usage(completion_tokens=self.events),
        )


Events = AsyncIterator[Mapping[str, Any]]
"""A streamed answer's events."""


async def answer_streamed(
    open_stream: Callable[[], AbstractAsyncContextManager[Events]],
    pacer: Pacing,
    *,
    background: bool,
    conversation: str,
) -> Generated:
    """Ask at once; where the caller waits (not ``background``), lookahead work gives way as to a main request."""
    answer = Answer()
    own = f"{conversation}\0own"
    if not background:
        pacer.main_arrived(own)
    try:
        async with open_stream() as events:
            async for event in events:
                if answer.take(event) and not background and answer.events == 1:
                    pacer.main_first_token(own)
    finally:
        if not background:
            pacer.main_done(own)
    return answer.generated()


def usage(value: object) -> Usage:
    """Token counts of an answer; ``cached_tokens`` None where the server does not say."""
    counts = mapping(value)
    details = counts.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=whole(counts.get("prompt_tokens")) or 0,
        completion_tokens=whole(counts.get("completion_tokens")) or 0,
        cached_tokens=whole(mapping(details).get("cached_tokens")) if details is not None else None,
    )
