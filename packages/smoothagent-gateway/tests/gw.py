"""What the tests of this package share: gateways on loopback, and a server behind them that does as it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from smoothagent import KeepRecent, LookaheadStrategy
from smoothagent.machine import Stage
from smoothagent.quoting import quote_again
from smoothagent_gateway import Gateway, Settings

Body = dict[str, Any]


def window() -> LookaheadStrategy:
    return KeepRecent(2, at_turns=5)


@dataclass
class Running:
    """A gateway that serves.

    Attributes:
        gateway: it.
        url: its API's.
    """

    gateway: Gateway
    url: str

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def idle(self) -> None:
        """Wait until lookahead has done what it can by now."""
        wait_for(lambda: all(map(_settled, self.gateway.sessions.all())))


def _settled(session: Any) -> bool:
    job = session.runtime._lookahead.state.job
    return not session.busy and (job is None or job.stage is Stage.READY)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


@contextlib.contextmanager
def running(upstream: str, strategy: Callable[[], LookaheadStrategy] = window, **more: Any) -> Generator[Running]:
    """A gateway before ``upstream``, for as long as the context lasts."""
    gateway = Gateway(Settings(upstream, strategy, port=0, **more))
    config = uvicorn.Config(gateway.app, ws="none", log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        yield Running(gateway, f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
        quote_again()  # which is the process's, and other tests run in it


def http(timeout: float = 30.0) -> httpx.Client:
    return httpx.Client(timeout=timeout, trust_env=False)


@dataclass
class Raw:
    """A server that answers each connection with bytes as they are, and notes what it was sent.

    Attributes:
        answer: makes the pieces of an answer from a request's head and body; an exception breaks it off.
        requests: heads and bodies.
        left: connections that the client has closed before the end of the answer.
    """

    answer: Callable[[bytes, bytes], Sequence[bytes | float]]
    requests: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    left: int = 0
    url: str = ""


@contextlib.contextmanager
def raw(answer: Callable[[bytes, bytes], Sequence[bytes | float]], *, all_of_it: bool = False) -> Generator[Raw]:
    """Serve it; a number among the pieces is a pause in seconds.

    What the gateway asks for itself (what kind of server is this?) is answered with 404, unless ``all_of_it``.
    """
    server = Raw(answer)
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head, body = _request(connection)
            if not head:
                return
            if b"user-agent: asyncopenai" in head.lower() and not all_of_it:
                connection.sendall(answered(b"{}", status=b"404 Not Found"))
                return
            server.requests.append((head, body))
            try:
                for piece in answer(head, body):
                    if isinstance(piece, bytes):
                        connection.sendall(piece)
                    elif _closed(connection, piece, over):
                        server.left += 1
                        return
            except OSError:
                server.left += 1

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    try:
        yield server
    finally:
        over.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def _closed(connection: socket.socket, seconds: float, over: threading.Event) -> bool:
    deadline = time.monotonic() + seconds
    connection.settimeout(0.01)
    try:
        while time.monotonic() < deadline and not over.is_set():
            try:
                if connection.recv(1) == b"":
                    return True
            except TimeoutError:
                continue
        return False
    finally:
        connection.settimeout(None)


def _request(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            return b"", b""
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(v) for k, v in _headers(head) if k == b"content-length"), 0)
    while len(body) < length:
        chunk = connection.recv(65536)
        if not chunk:
            break
        body += chunk
    return head, body


def _headers(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    return [(k.strip().lower(), v.strip()) for k, _, v in lines]


def answered(body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"application/json", more: bytes = b"") -> bytes:
    """A whole answer."""
    head = b"HTTP/1.1 " + status + b"\r\ncontent-type: " + kind + b"\r\ncontent-length: " + str(len(body)).encode()
    return head + b"\r\nconnection: close\r\n" + more + b"\r\n" + body


STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


def chunked(data: bytes) -> bytes:
    """A chunk of HTTP's."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def turns(number: int, output: str = "r" * 200) -> list[Body]:
    """A conversation of so many turns with a tool, and the question before them."""
    messages: list[Body] = [{"role": "system", "content": "S"}, {"role": "user", "content": "the task"}]
    for i in range(number):
        call = {"id": f"call-{i}", "type": "function", "function": {"name": "look", "arguments": f'{{"number": {i}}}'}}
        messages += [
            {"role": "assistant", "content": f"turn {i}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{i}", "content": f"{i} {output}"},
        ]
    return messages
