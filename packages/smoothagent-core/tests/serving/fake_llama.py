"""A llama.cpp server in a page: a token is a character, a slot is a list of tokens, time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.fake_http import FakeServer, Reply, Seen

BOS = 1
EMOJI = 0x1F000
"""Characters from here on take three tokens here, of which a stream shows only the last."""


class Slot:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.busy = False
        self.decoded = 0
        self.lock = asyncio.Lock()


def _slots() -> list[Slot]:
    return []


@dataclass
class FakeLlama(FakeServer):
    """Evaluates ``per_token`` seconds a prompt token, decodes ``per_step`` seconds a token, says ``answer``."""

    n_slots: int = 4
    n_ctx: int = 4096
    per_token: float = 0.004
    per_step: float = 0.01
    answer: str = "All is well."
    can_save: bool = True
    shows_slots: bool = True
    per_copy: float = 0.0
    keeps: int | None = None
    opening: str = ""
    path: str = "/here/a.gguf"
    template: str = "one"
    weights: dict[str, int] = field(default_factory=dict[str, int])
    files: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    slots: list[Slot] = field(default_factory=_slots)
    evaluated: int = 0

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range(self.n_slots)]

    async def handle(self, seen: Seen) -> Reply:
        path, body = seen.path, seen.body
        if path.startswith("/slots/"):
            return await self._copy(path, body)
        match path:
            case "/v1/models":
                return 200, {"data": [{"id": "local", "owned_by": "llamacpp", "meta": self.weights}]}
            case "/props":
                return 200, {
                    "total_slots": self.n_slots,
                    "default_generation_settings": {"n_ctx": self.n_ctx},
                    "chat_template": self.template,
                    "model_path": self.path,
                }
            case "/slots":
                return self._state()
            case "/apply-template":
                return self._apply(body)
            case "/tokenize":
                return 200, {"tokens": tokens_of(body["content"], special=body["add_special"])}
            case "/completion":
                return self._complete(body["prompt"], body)
            case "/v1/chat/completions":
                status, reply = self._apply({"add_generation_prompt": True, **body})
                if status != 200:
                    return status, reply
                return self._chat(tokens_of(reply["prompt"], special=True), body)
            case _:
                return 404, {"error": {"message": "File Not Found", "code": 404}}

    def _state(self) -> Reply:
        if not self.shows_slots:
            return 501, {"error": {"message": "This server does not support slots endpoint. Start it with `--slots`"}}
        return 200, [
            {
                "id": i,
                "is_processing": s.busy,
                **({"n_prompt_tokens": len(s.tokens)} if s.tokens else {}),
                "next_token": [{"n_decoded": s.decoded}],
            }
            for i, s in enumerate(self.slots)
        ]

    def _apply(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        messages = body["messages"]
        last = messages[-1]
        if last["role"] == "assistant" and last.get("tool_calls"):
            return 400, {"error": {"message": "Cannot continue an assistant message that contains tool calls."}}
        out = "".join(f"[tool {t['function']['name']}]" for t in body.get("tools", ()))
        for message in messages:
            calls = "".join(f"<call {c['function']['name']}>" for c in message.get("tool_calls") or ())
            # As real templates do, an answer that is to be continued begins as one that is to be made.
            opening = self.opening if message is last and message["role"] == "assistant" else ""
            out += f"<{message['role']}>{opening}{message.get('content') or ''}{calls}"
            if message is not last or message["role"] != "assistant":
                out += "</>\n"
        if body.get("add_generation_prompt") and last["role"] != "assistant":
            out += f"<assistant>{self.opening}"
        return 200, {"prompt": out}

    async def _copy(self, path: str, body: Mapping[str, Any]) -> Reply:
        if not self.can_save:
            return 501, {"error": {"message": "This server does not support slots action. Use `--slot-save-path`"}}
        number = int(path.split("/")[2].partition("?")[0])
        slot: Slot = self.slots[number % self.n_slots]
        name: str = body["filename"]
        if "/" in name:
            return 400, {"error": {"message": "Invalid filename"}}
        async with slot.lock:
            await asyncio.sleep(self.per_copy)
            if path.endswith("save"):
                self.files[name] = list(slot.tokens)
                return 200, {"n_saved": len(slot.tokens)}
            slot.tokens = list(self.files.get(name, []))[: self.keeps]
            if name not in self.files:
                return 400, {
                    "error": {"message": "Unable to restore slot, no available space or invalid slot save file"}
                }
            return 200, {"n_restored": len(slot.tokens)}

    async def _complete(self, prompt: list[int], body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        number: int = body.get("id_slot", self.n_slots - 1)
        slot = self.slots[number % self.n_slots]
        async with slot.lock:
            slot.busy, slot.decoded = True, 0
            try:
                async for event in self._run(slot, prompt, body):
                    yield event
            finally:
                slot.busy = False

    async def _run(self, slot: Slot, prompt: list[int], body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        cached = min(shared(slot.tokens, prompt), len(prompt) - 1)
        progress = {"total": len(prompt), "cache": cached, "processed": cached}
        yield {"content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, "prompt_progress": progress}
        slot.tokens = prompt[:cached]
        for start in range(cached, len(prompt), 64):
            batch = prompt[start : start + 64]
            await asyncio.sleep(self.per_token * len(batch))
            self.evaluated += len(batch)
            slot.tokens += batch
            progress = {"total": len(prompt), "cache": cached, "processed": len(slot.tokens)}
            yield {"content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, "prompt_progress": progress}
        said = text_of(prompt).rpartition("<assistant>")[2]
        rest = tokens_of(self.answer, special=False)[len(tokens_of(said, special=False)) :]
        limit = body.get("n_predict", body.get("max_tokens"))
        stop = "limit" if limit < len(rest) or limit == 0 else "eos"
        for i, token in enumerate(rest[:limit]):
            await asyncio.sleep(self.per_step)
            slot.tokens.append(token)
            slot.decoded = i + 1
            if token >= 0:
                yield {"content": chr(token), "tokens": [token], "stop": False, "tokens_predicted": i + 1}
        timings = {"cache_n": cached, "prompt_n": len(prompt) - cached}
        yield {"content": "", "tokens": [], "stop": True, "stop_type": stop, "timings": timings}

    async def _chat(self, prompt: list[int], body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        usage: dict[str, Any] = {}
        finish = None
        async for event in self._complete(prompt, body):
            if "timings" in event:
                cached = event["timings"]["cache_n"]
                usage = {"prompt_tokens": len(prompt), "completion_tokens": 0}
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
                finish = "length" if event["stop_type"] == "limit" else "stop"
            delta = {"content": event["content"] or None}
            yield {"choices": [{"delta": delta, "finish_reason": finish}], "usage": None}
        yield {"choices": [], "usage": usage}


def tokens_of(text: str, *, special: bool) -> list[int]:
    """A token a character; large ones are two withheld tokens and the visible last one."""
    out = [BOS] if special else []
    for char in text:
        out += [-1, -2, ord(char)] if ord(char) >= EMOJI else [ord(char)]
    return out


def text_of(tokens: list[int]) -> str:
    return "".join(chr(t) for t in tokens if t > BOS)


def shared(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
