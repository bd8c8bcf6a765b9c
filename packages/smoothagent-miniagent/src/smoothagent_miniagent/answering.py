"""The agent's own call on its way to the server: marked, heard, and streamed where that helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState

from smoothagent import MainRequest
from smoothagent_miniagent.aside import usage_of
from smoothagent_miniagent.clients import Create, with_extras

Piece = Callable[[Any], None]
"""Told a piece of a tool call as it is written: the openai client's ``ChoiceDeltaToolCall``."""
_REFUSED = (400, 404, 422, 501)
"""Statuses of servers that do not stream."""


class Streaming:
    """Whether a server's answers are asked for as streams.

    Mini-Agent waits for whole answers. While one is written lookahead has the server to share, which only a stream
    tells; and an instruction to a sub-agent can be prefilled as it is written.

    Args:
        wanted: yes or no; None: where the server is one of our own, since services have their ways of streaming.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._refused = False

    def here(self, server: str | None) -> bool:
        """Whether to ask this server for streams; ``server`` as `smoothagent.OpenAIBackend.server` says it."""
        if self._refused:
            return False
        return self._wanted if self._wanted is not None else server not in (None, "openai")

    async def answer(
        self, create: Create, params: Mapping[str, Any], request: MainRequest, piece: Piece | None, server: str | None
    ) -> Any:
        """Make a request; the answer is the vendor's object, whole. Raises what the vendor's client raises."""
        marked = with_extras(params, request.extras)
        if self.here(server):
            try:
                answer = await _streamed(create, marked, request, piece)
            except Exception as error:
                if getattr(error, "status_code", None) not in _REFUSED:
                    raise
                answer = await create(**marked)  # where it is refused for another reason it is refused again
                self._refused = True
        else:
            answer = await create(**marked)
        request.usage(usage_of(answer))
        return answer


async def _streamed(create: Create, params: Mapping[str, Any], request: MainRequest, piece: Piece | None) -> Any:
    options = {"include_usage": True, **dict(params.get("stream_options") or {})}
    stream = await create(**{**params, "stream": True, "stream_options": options})
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
    async for chunk in stream:
        state.handle_chunk(chunk)
        for choice in chunk.choices:
            delta = choice.delta
            reasoning = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
            if delta.content or delta.tool_calls or reasoning:
                request.first_token()
            if delta.content:
                request.text(delta.content)
            for call in delta.tool_calls or () if piece is not None else ():
                assert piece is not None
                piece(call)
    return state.current_completion_snapshot
