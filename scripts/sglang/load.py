"""Requests to a real SGLang server, at times that were fixed beforehand, and how they fared."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import httpx

VOCABULARY = range(20, 250)
"""Token ids that every model of these tests has."""


@dataclass
class Fared:
    """How one request fared.

    Attributes:
        sent: seconds after the load began.
        ttft: seconds until the first token; None where it has none.
        between: seconds between its tokens.
        seconds: until its end.
        output: token ids.
        cached: tokens of its prompt found in the cache.
        finish: why it ended.
    """

    sent: float = 0.0
    ttft: float | None = None
    between: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    output: list[int] = field(default_factory=list[int])
    cached: int = 0
    finish: str = ""


class Ask(NamedTuple):
    """A request.

    Attributes:
        at: seconds after the load begins.
        ids: its prompt.
        tokens: of its answer.
        lookahead: best-effort.
        number: to promote it by.
    """

    at: float
    ids: list[int]
    tokens: int
    lookahead: bool = False
    number: int = 0


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Random tokens."""
    return [rng.choice(VOCABULARY) for _ in range(tokens)]


class Server:
    """A client of one server.

    Args:
        url: its root.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(600, connect=30), limits=httpx.Limits(max_connections=None)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ready(self, seconds: float) -> None:
        """Wait until it answers. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    if (await self._client.get("/health", timeout=5)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.5)

    async def generate(self, ask: Ask, *, rid: str | None = None, marks: bool = True) -> Fared:
        """Send one now. ``marks``: say that it is a lookahead request, where it is."""
        params: dict[str, Any] = {"max_new_tokens": ask.tokens, "temperature": 0, "ignore_eos": True}
        if ask.lookahead and marks:
            params["custom_params"] = {"lookahead": 1, "lookahead_id": ask.number}
        body: dict[str, Any] = {"input_ids": ask.ids, "sampling_params": params, "stream": True}
        if rid is not None:
            body["rid"] = rid
        fared, began = Fared(), time.perf_counter()
        last, said = began, 0
        async with self._client.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now, event = time.perf_counter(), json.loads(line[6:])
                if "meta_info" not in event:
                    raise RuntimeError(f"the server answered {line[:300]}")
                meta: dict[str, Any] = event["meta_info"]
                fared.cached = int(meta.get("cached_tokens") or 0)
                reason: dict[str, Any] = meta.get("finish_reason") or {}
                fared.finish = str(reason.get("type", ""))
                fared.output = list(event.get("output_ids") or fared.output)
                tokens = int(meta["completion_tokens"])
                if fared.ttft is None:
                    fared.ttft = now - began
                elif tokens > said:
                    fared.between.append(now - last)
                last, said = now, tokens
        fared.seconds = time.perf_counter() - began
        return fared

    async def load(self, asks: Sequence[Ask], *, marks: bool = True) -> list[Fared]:
        """Send each at its time, whatever became of those before it."""
        began = time.perf_counter()

        async def one(ask: Ask) -> Fared:
            await asyncio.sleep(max(0.0, began + ask.at - time.perf_counter()))
            sent = time.perf_counter() - began
            fared = await self.generate(ask, marks=marks)
            fared.sent = sent
            return fared

        return list(await asyncio.gather(*map(one, asks)))

    async def post(self, path: str, body: dict[str, Any]) -> int:
        """Post; returns the status."""
        return (await self._client.post(path, json=body)).status_code

    async def state(self) -> dict[str, Any]:
        """What the lookahead scheduler tells; empty where there is none."""
        for path in ("/server_info", "/get_server_info"):
            answer = await self._client.get(path)
            if answer.status_code == 200:
                return dict(answer.json()["internal_states"][0].get("lookahead") or {})
        raise RuntimeError("the server tells no state")


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share is not above; of few values the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
