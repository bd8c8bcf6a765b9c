"""A small OpenAI-compatible server on loopback, for the documentation's examples."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            self._send(200, {"object": "list", "data": [{"id": "my-model", "object": "model"}]})
        else:
            self._send(404, {"error": {"message": "not here"}})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        if not self.path.endswith("/chat/completions"):
            self._send(404, {"error": {"message": "not here"}})
        elif body.get("stream"):
            self._stream(body)
        else:
            self._send(200, _completion(body, "message", {"role": "assistant", "content": "An answer."}))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Say nothing."""

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        chunk = _completion(body, "delta", {"role": "assistant", "content": "An answer."}) | {"usage": None}
        last = {**_completion(body, "delta", {}), "choices": list[Any]()}
        events: list[dict[str, Any]] = [chunk, last]
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def _completion(body: dict[str, Any], key: str, value: dict[str, Any]) -> dict[str, Any]:
    tokens = len(json.dumps(body["messages"])) // 4
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "my-model",
        "choices": [{"index": 0, key: value, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": tokens,
            "completion_tokens": 3,
            "total_tokens": tokens + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@contextmanager
def loopback_server() -> Generator[str]:
    """The base URL of a server that lives as long as the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
