"""Servers that take chat completions and find prefixes themselves: vLLM, SGLang, a hosted one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.fake_http import FakeServer, Reply, Seen
from serving.fake_llama import shared


@dataclass
class FakeChat(FakeServer):
    """A prefix cache over characters, four a token, in blocks; ``refuses`` maps a request field to what it says."""

    kind: str = "vllm"
    model: str = "m"
    block: int = 16
    caches: bool = True
    reports: bool = True
    per_token: float = 0.001
    per_step: float = 0.01
    answer: str = "all is well"
    reasons: bool = False
    reasons_as: str = "reasoning_content"
    needs_user: bool = False
    finish: str | None = "stop"
    calls: bool = False
    refuses: dict[str, str] = field(default_factory=dict[str, str])
    refuse_any_value: bool = False
    needs: int = 1
    """Tokens of the answer's first character: a piece of fewer brings nothing."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: str = ""
    load: Any = None
    known: list[list[int]] = field(default_factory=list[list[int]])
    computed: int = 0
    open_at_abort: list[str] = field(default_factory=list[str])

    async def handle(self, seen: Seen) -> Reply:
        if seen.path == "/v1/chat/completions":
            return await self._chat(seen.body)
        if seen.path == "/abort_request":
            named = [s for s in self.seen if s.body.get("rid") == seen.body["rid"] and s is not seen]
            self.open_at_abort += [s.body["rid"] for s in named if not s.ended and not s.broken]
        answer = self._about(seen.path)
        return (404, {"error": {"message": "Not Found"}}) if answer is None else (200, answer)

    def _about(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": self.model, "max_model_len": 2048}]}
        if self.kind == "vllm":
            return {"/version": {"version": "0.32.0"}, "/metrics": self.metrics, "/tokenize": {"count": 7}}.get(path)
        if self.kind == "sglang":
            about: dict[str, Any] = {
                "/server_info": {"internal_states": [{}], **self.info},
                "/v1/tokenize": {"count": 8},
            }
            about |= {"/v1/tokenize": {"count": 8}, "/set_internal_state": [], "/abort_request": "ok"}
            if self.load is not None:
                about["/get_load"] = self.load
            return about.get(path)
        return None

    async def _chat(self, body: dict[str, Any]) -> Reply:
        if body["model"] != self.model:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        for name, words in self.refuses.items():
            if name in body and (self.refuse_any_value or name != "max_tokens" or body[name] == 0):
                return 400, {"error": {"message": words}}
        if self.needs_user and not any(m["role"] == "user" for m in body["messages"]):
            return 400, {"error": {"message": "No user query found in messages."}}
        text = "".join(f"[{t}]" for t in body.get("tools", ())) + "".join(
            f"<{m['role']}>{m.get('content')}" for m in body["messages"]
        )
        tokens = [hash(text[i : i + 4]) for i in range(0, len(text) - 3, 4)]
        hit = max([shared(tokens, k) for k in self.known], default=0) // self.block * self.block
        if not self.caches:
            hit = 0
        if body.get("stream"):
            return self._stream(body, tokens, hit)
        await self._prefill(tokens, hit)
        usage = self._usage(tokens, hit, body["max_tokens"])
        return 200, {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}], "usage": usage}

    async def _prefill(self, tokens: list[int], hit: int) -> None:
        await asyncio.sleep(self.per_token * (len(tokens) - hit))
        self.computed += len(tokens) - hit
        self.known.append(tokens)

    def _usage(self, tokens: list[int], hit: int, written: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": written}
        # vLLM and SGLang leave the field out where nothing was found.
        says = self.reports and (hit or self.kind == "hosted")
        return usage | ({"prompt_tokens_details": {"cached_tokens": hit}} if says else {})

    async def _stream(self, body: Mapping[str, Any], tokens: list[int], hit: int) -> AsyncGenerator[Mapping[str, Any]]:
        await self._prefill(tokens, hit)
        if self.calls:
            call = {"tool_calls": [{"index": 0, "function": {"name": "sed"}}]}
            yield {"choices": [{"delta": call, "finish_reason": "tool_calls"}]}
            return
        last = body["messages"][-1]
        said = last["content"] if body.get("continue_final_message") and last["role"] == "assistant" else ""
        rest = self.answer[len(said) :]
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        part = "" if not said and limit < self.needs else rest[:limit]
        if self.reasons and not said:
            await asyncio.sleep(self.per_step)
            yield {"choices": [{"delta": {self.reasons_as: "hm"}, "finish_reason": None}]}
            if limit < len(rest):
                yield {"choices": [{"delta": {}, "finish_reason": "length"}]}
                return
        for char in part:
            await asyncio.sleep(self.per_step)
            yield {"choices": [{"delta": {"content": char}, "finish_reason": None}]}
        if part != rest or self.finish is not None:
            yield {"choices": [{"delta": {}, "finish_reason": self.finish if part == rest else "length"}]}
        yield {"choices": [], "usage": self._usage(tokens, hit, len(part))}
