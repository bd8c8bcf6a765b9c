"""One streamed model call, timed from its sending."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from smoothagent.errors import BackendProtocolError


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answered, and when.

    Attributes:
        text: the reply.
        ttft_s: seconds to the first token.
        gaps_s: seconds between tokens as they arrived.
        prompt_tokens: of the request.
        cached_tokens: of them found in the KV cache, or None where the server does not say.
        completion_tokens: of the reply.
        usage: the server's usage object.
    """

    text: str
    ttft_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    usage: Any

    @property
    def tbt_mean_s(self) -> float:
        """Mean time between tokens; servers may send several in one piece, so the token count divides."""
        return sum(self.gaps_s) / max(1, self.completion_tokens - 1)

    @property
    def tbt_p99_s(self) -> float:
        """99th percentile of the gaps, nearest rank."""
        if not self.gaps_s:
            return 0.0
        ordered = sorted(self.gaps_s)
        return ordered[-1 - len(ordered) // 100]


async def stream_reply(
    client: AsyncOpenAI,
    request: Mapping[str, Any],
    *,
    started: float | None = None,
    on_first_token: Callable[[], None],
    on_text: Callable[[str], None] | None = None,
) -> Reply:
    """Send a chat request and read its answer token by token.

    Args:
        client: the client.
        request: keyword arguments of ``chat.completions.create``, but for the streaming ones.
        started: when the turn's call began, on `time.perf_counter`; default now.
        on_first_token: called when the first token has arrived.
        on_text: called with each piece of text.

    Raises:
        BackendProtocolError: the stream ended without usage, so nothing can be measured.
        openai.APIError: the request failed.
    """
    started = time.perf_counter() if started is None else started
    stream: Any = await client.chat.completions.create(
        **dict(request), stream=True, stream_options={"include_usage": True}
    )
    pieces: list[str] = []
    arrivals: list[float] = []
    usage: Any = None
    async for chunk in stream:
        usage = chunk.usage or usage
        if not chunk.choices or not _carries_token(chunk.choices[0].delta):
            continue
        arrivals.append(time.perf_counter())
        if len(arrivals) == 1:
            on_first_token()
        text = chunk.choices[0].delta.content or ""
        pieces.append(text)
        if on_text is not None and text:
            on_text(text)
    if usage is None or not arrivals:
        raise BackendProtocolError(
            f"the server streamed {len(arrivals)} tokens and {'no ' if usage is None else ''}usage: "
            "it must honour stream_options.include_usage"
        )
    details = getattr(usage, "prompt_tokens_details", None)
    return Reply(
        "".join(pieces),
        arrivals[0] - started,
        tuple(b - a for a, b in itertools.pairwise(arrivals)),
        usage.prompt_tokens,
        None if details is None else details.cached_tokens,
        usage.completion_tokens,
        usage,
    )


def _carries_token(delta: Any) -> bool:
    """Whether a delta stands for generated tokens; the first one of a stream only carries the role."""
    # Reasoning goes by either name.
    reasoning = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
    return bool(delta.content or delta.tool_calls or reasoning)
