"""Between an agent and its server: adds the calls that the benchmark's script says, and measures.

So that agents of any framework can be scripted that have nothing but a base URL to set.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from smoothagent_gateway.answer import Events, data_of


@dataclass(slots=True)
class Heard:
    """One answer.

    Attributes:
        began: when its request came here, by ``time.perf_counter``.
        arrivals: when its tokens came.
        prompt_tokens: of the request as the server got it.
        cached_tokens: of these, found in its cache; None where it does not say.
        completion_tokens: of the answer.
    """

    began: float
    arrivals: list[float] = field(default_factory=list[float])
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0


class Stage:
    """A server on loopback for one agent.

    Args:
        target: the API that it passes requests on to.
        fields: set in every request.
        heard: told of each answer when it was written; returns the tool call to end it with, in OpenAI's form, or None.
    """

    def __init__(
        self,
        target: str,
        fields: Mapping[str, Any],
        heard: Callable[[Heard], Awaitable[Mapping[str, Any] | None]],
    ) -> None:
        self._target, self._fields, self._heard = target, fields, heard
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Serve; the URL of its API."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._completion)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        # llama.cpp drops about one in 60 kept-alive connections, and a retry would spoil a measurement.
        async with aiohttp.ClientSession(headers={"Connection": "close"}) as session:
            self._session = session
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                port = runner.addresses[0][1]
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                await runner.cleanup()

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        call: dict[str, Any] = await request.json()
        heard = Heard(time.perf_counter())
        chunks = self._chunks(call, heard)
        if call.get("stream"):
            return await self._streamed(request, call, chunks)
        state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
        async for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        whole = state.current_completion_snapshot.model_dump(mode="json", exclude_none=True)
        return web.json_response({**whole, "object": "chat.completion"})

    async def _streamed(
        self, request: web.Request, call: Mapping[str, Any], chunks: AsyncIterator[dict[str, Any]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        options: Mapping[str, Any] = call.get("stream_options") or {}
        asks = options.get("include_usage")
        async for chunk in chunks:
            if chunk["choices"] or asks:
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _chunks(self, call: Mapping[str, Any], heard: Heard) -> AsyncGenerator[dict[str, Any]]:
        """The answer's, with the call that it ends with."""
        assert self._session is not None
        kept = {k: v for k, v in call.items() if k not in ("max_completion_tokens", "n")}
        sent = {**kept, **self._fields, "stream": True, "stream_options": {"include_usage": True}}
        events, last, usage = Events(), None, None
        async with self._session.post(f"{self._target}/chat/completions", json=sent) as answer:
            if answer.status != 200:
                raise web.HTTPBadGateway(text=f"the server answered {answer.status}: {await answer.text()}")
            async for data in answer.content.iter_any():
                for event in events.feed(data):
                    told = data_of(event)
                    if not told or told == b"[DONE]":
                        continue
                    chunk: dict[str, Any] = json.loads(told)
                    usage = chunk if chunk.get("usage") else usage
                    choices: list[dict[str, Any]] = chunk.get("choices") or []
                    if not choices:
                        continue
                    if choices[0].get("finish_reason"):
                        last = chunk
                        continue
                    if choices[0]["delta"].get("content"):
                        heard.arrivals.append(time.perf_counter())
                    yield chunk
        if last is None or usage is None:
            raise web.HTTPBadGateway(text="the server's answer has no end, or told no usage")
        counts: dict[str, Any] = usage["usage"]
        details: dict[str, Any] = counts.get("prompt_tokens_details") or {}
        heard.prompt_tokens, heard.completion_tokens = counts["prompt_tokens"], counts["completion_tokens"]
        heard.cached_tokens = details.get("cached_tokens")
        made = await self._heard(heard)
        if made is not None:
            delta = {"tool_calls": [{"index": 0, **made}]}
            yield {**last, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        reason = "stop" if made is None else "tool_calls"
        yield {**last, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        yield {**last, "choices": list[Any](), "usage": counts}
