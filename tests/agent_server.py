"""An OpenAI-compatible server on loopback that plays an agent's model: it calls a tool, summarizes when asked to.

It looks like vLLM with a prefix cache over characters, so that lookahead warms it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from smoothagent import RuntimePool
from smoothagent.machine import Stage

ASKING = (
    *("Context Extraction Assistant", "Progressively summarize", "Create a summary of", "This is summary of"),
    *("Transcript so far:", "Summarize the conversation so far"),
)
"""Words of prompts for summaries: LangChain's, LlamaIndex's and the core's."""


class Pooled(Protocol):
    """Whatever has conversations in a pool."""

    pool: RuntimePool[Any]


@dataclass
class AgentServer:
    """What it is asked, and what it answers.

    Attributes:
        turns: tool calls it makes before it says that it is done.
        bodies: chat requests in the order they came.
        answered: those that were answered, in that order.
        summary: what it answers when asked for one; another one for another conversation.
        extra_usage: tokens it reports beyond those it counts.
        watched: whose lookahead `idle` waits for.
        pause: seconds each answer takes.
        hold_from: lookahead requests that come after this many of the agent's calls wait until ``released``; 0: none.
        holding: one of them is waiting.
        fail: statuses to answer lookahead requests with, first come first.
        vllm: whether it says that it is one.
        pieces: cuts the arguments of the calls that it streams.
    """

    turns: int = 12
    summary: str = "SUMMARY {} of what was said so far, in a few words"
    extra_usage: int = 0
    watched: list[Pooled] = field(default_factory=list[Pooled])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    answered: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    pause: float = 0.0
    hold_from: int = 0
    holding: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    fail: list[int] = field(default_factory=list[int])
    vllm: bool = True
    pieces: Callable[[str], Iterable[str]] | None = None
    known: list[str] = field(default_factory=list[str])
    running: int = 0
    url: str = ""

    @property
    def main(self) -> list[dict[str, Any]]:
        """The agent's own calls."""
        return [b for b in self.bodies if kind_of(b) == "main"]

    @property
    def prefills(self) -> list[dict[str, Any]]:
        """Requests that only warm."""
        return [b for b in self.bodies if kind_of(b) == "prefill"]

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """Requests for a summary."""
        return [b for b in self.bodies if kind_of(b) == "summary"]

    def idle(self) -> None:
        """Wait until lookahead has done what it can by now."""
        deadline = time.monotonic() + 30
        while not all(map(_settled, self.watched)):
            assert time.monotonic() < deadline, "lookahead is not ready"
            time.sleep(0.002)

    def hold(self, body: dict[str, Any]) -> None:
        """Keep a lookahead request waiting, if it is one to be held."""
        if self.hold_from and kind_of(body) != "main" and len(self.main) >= self.hold_from:
            self.holding.set()
            self.released.wait(60)

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The assistant's message, and why it ends."""
        match kind_of(body):
            case "prefill":
                return {"role": "assistant", "content": "x"}, "length"
            case "summary":
                # Written a few tokens at a time: what there is of it is continued.
                last = body["messages"][-1]
                said = last["content"] if last["role"] == "assistant" else ""
                asked = json.dumps(body["messages"][:-1] if said else body["messages"])
                rest = self.summary.format(hashlib.sha256(asked.encode()).hexdigest()[:8])[len(said) :]
                part = rest[: 4 * (body.get("max_tokens") or body.get("max_completion_tokens") or 1000)]
                return {"role": "assistant", "content": part}, "stop" if part == rest else "length"
            case _:
                made = len(self.main)
                if made > self.turns:
                    return {"role": "assistant", "content": "done"}, "stop"
                call = {"name": "look", "arguments": json.dumps({"number": made})}
                calls = [{"id": f"call-{made}", "type": "function", "function": call}]
                return {"role": "assistant", "content": f"turn {made}", "tool_calls": calls}, "tool_calls"

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Four characters a token, and what of them was cached."""
        text = "".join(f"<{m['role']}>{m.get('content')}{m.get('tool_calls')}" for m in body["messages"])
        cached = max((_shared(text, k) for k in self.known), default=0)
        self.known.append(text)
        tokens = len(text) // 4 + self.extra_usage
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached // 4}}


def kind_of(body: dict[str, Any]) -> str:
    """Whose request it is."""
    if not body.get("stream") and 1 in (body.get("max_tokens"), body.get("max_completion_tokens")):
        return "prefill"
    messages = body["messages"]
    last = messages[-2] if body.get("continue_final_message") and len(messages) > 1 else messages[-1]
    asks = last["role"] == "user" and any(words in json.dumps(last.get("content")) for words in ASKING)
    return "summary" if asks else "main"


def _settled(threads: Pooled) -> bool:
    runtimes = [r for r, _ in threads.pool._runtimes.values()]  # pyright: ignore[reportPrivateUsage]
    jobs = [r._lookahead.state.job for r in runtimes]  # pyright: ignore[reportPrivateUsage]
    return all(job is None or job.stage is Stage.READY for job in jobs)


def _shared(a: str, b: str) -> int:
    """Characters with which both begin; by halves, since there are many of them."""
    same, end = 0, min(len(a), len(b))
    while same < end:
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def _handler(server: AgentServer) -> type[BaseHTTPRequestHandler]:  # noqa: C901  a handler is a class of closures
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Answers go out in two packets, and the second would wait for the first one's receipt.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path.endswith("/models"):
                self._send(200, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 100_000}]})
            elif self.path == "/version" and server.vllm:
                self._send(200, {"version": "0.30.0"})
            else:
                self._send(404, {"error": {"message": "not here"}})

        def do_POST(self) -> None:
            # A client that has cancelled is gone in the middle.
            with contextlib.suppress(ConnectionError):
                self._post()

        def _post(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            if self.path != "/v1/chat/completions" or "messages" not in body:
                self._send(404, {"error": {"message": "not here"}})
                return
            server.running += 1
            try:
                server.bodies.append(body)
                if kind_of(body) != "main" and server.fail:
                    self._send(server.fail.pop(0), {"error": {"message": "no"}})
                    return
                message, finish = server.answer(body)
                time.sleep(server.pause)
                server.hold(body)
                server.answered.append(body)
                if body.get("stream"):
                    self._stream(body, message, finish)
                else:
                    self._send(200, _completion(server, body, finish, "message", message))
            finally:
                server.running -= 1

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
            """Say nothing."""

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: dict[str, Any], message: dict[str, Any], finish: str) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            calls = [{**c, "index": i} for i, c in enumerate(message.get("tool_calls", ()))]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            whole = _completion(server, body, finish, "delta", delta)
            first: dict[str, Any] = {
                **whole,
                "usage": None,
                "choices": [{**whole["choices"][0], "finish_reason": None}],
            }
            last: dict[str, Any] = {**whole, "usage": None, "choices": [{**whole["choices"][0], "delta": {}}]}
            usage = {**whole, "choices": list[Any]()}
            for event in itertools.chain(self._cut(first, calls), (last, usage)):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _cut(self, first: dict[str, Any], calls: list[dict[str, Any]]) -> Generator[dict[str, Any]]:
            if server.pieces is None or not calls:
                yield first
                return
            choice = first["choices"][0]

            def event(delta: dict[str, Any]) -> dict[str, Any]:
                return {**first, "choices": [{**choice, "delta": delta}]}

            begun = [{**c, "function": {**c["function"], "arguments": ""}} for c in calls]
            yield event({**choice["delta"], "tool_calls": begun})
            for call in calls:
                for piece in server.pieces(call["function"]["arguments"]):
                    yield event({"tool_calls": [{"index": call["index"], "function": {"arguments": piece}}]})

    return Handler


@contextmanager
def serving(server: AgentServer) -> Generator[AgentServer]:
    """Serve on loopback for as long as the context lasts."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(timeout=10)


def _completion(
    server: AgentServer, body: dict[str, Any], finish: str, key: str, value: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": "c",
        "object": f"chat.completion{'.chunk' if key == 'delta' else ''}",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, key: value, "finish_reason": finish}],
        "usage": server.usage(body),
    }
