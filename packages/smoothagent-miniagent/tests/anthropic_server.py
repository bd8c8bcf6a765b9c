"""A server on loopback that speaks Anthropic's Messages API and plays an agent's model."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ASKING = "Summarize the conversation so far"


@dataclass
class AnthropicServer:
    """What it is asked, and what it answers.

    Attributes:
        turns: tool calls it makes before it says that it is done.
        bodies: requests in the order they came.
    """

    turns: int = 8
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""

    @property
    def main(self) -> list[dict[str, Any]]:
        """The agent's own calls."""
        return [b for b in self.bodies if b["max_tokens"] == 16384]

    @property
    def prefills(self) -> list[dict[str, Any]]:
        """Requests that only warm."""
        return [b for b in self.bodies if b["max_tokens"] == 1]

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """Requests for a summary."""
        return [b for b in self.bodies if b["max_tokens"] not in (1, 16384)]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        blocks: list[dict[str, Any]] = [{"type": "text", "text": f"turn {len(self.main)}"}]
        reason = "end_turn"
        if body in self.summaries:
            blocks = [{"type": "text", "text": "SUMMARY of what was said so far"}]
        elif body["max_tokens"] == 1:
            reason = "max_tokens"
        elif len(self.main) <= self.turns:
            call = {"type": "tool_use", "id": f"c{len(self.main)}", "name": "look"}
            blocks.append({**call, "input": {"number": len(self.main)}})
            reason = "tool_use"
        tokens = len(json.dumps(body["messages"])) // 4
        usage = {"input_tokens": tokens - 10, "output_tokens": 5, "cache_read_input_tokens": 10}
        head = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
        return {**head, "content": blocks, "stop_reason": reason, "usage": usage}


@contextmanager
def serving_anthropic(server: AnthropicServer) -> Generator[AnthropicServer]:
    """Serve on loopback for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.bodies.append(body)
            data = json.dumps(server.answer(body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(timeout=10)
