"""Exact token counts, by asking the server that will see the tokens.

The benchmark sizes its steps with them and hands them to the runtime as its counter. What a message costs is
the difference it makes to a rendered prompt, so the template's scaffolding is counted with it. Each distinct
message is asked for once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import httpx

from smoothagent.errors import BackendProtocolError, BackendUnreachableError
from smoothagent.message import Message, ToolCall
from smoothagent.prompt import Prompt

Wire = dict[str, Any]

_SYSTEM: Wire = {"role": "system", "content": "s"}
_USER: Wire = {"role": "user", "content": "u"}
_CALL: Wire = {
    "role": "assistant",
    "content": "a",
    "tool_calls": [{"id": "call", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


class Renderer(Protocol):
    """Counts what a server makes of a text or of a chat."""

    def text(self, text: str) -> int:
        """Tokens of a bare text, without a template or special tokens around it."""
        ...

    def chat(self, messages: Sequence[Wire]) -> int:
        """Tokens of a whole chat prompt, the generation prompt included."""
        ...


class LlamaCppRenderer:
    """llama.cpp: ``/apply-template`` and ``/tokenize``."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def text(self, text: str) -> int:
        """Tokens of a bare text."""
        return self._tokenize(text, special=False)

    def chat(self, messages: Sequence[Wire]) -> int:
        """Tokens of a chat prompt."""
        prompt = _post(self._http, "apply-template", {"messages": messages})["prompt"]
        return self._tokenize(str(prompt), special=True)

    def _tokenize(self, text: str, *, special: bool) -> int:
        body = {"content": text, "add_special": False, "parse_special": special}
        return len(_post(self._http, "tokenize", body)["tokens"])


class ChatTokenizeRenderer:
    """vLLM: ``/tokenize`` renders a chat itself."""

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http, self._model = http, model

    def text(self, text: str) -> int:
        """Tokens of a bare text."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return int(_post(self._http, "tokenize", body)["count"])

    def chat(self, messages: Sequence[Wire]) -> int:
        """Tokens of a chat prompt."""
        return int(_post(self._http, "tokenize", {"model": self._model, "messages": messages})["count"])


class UsageRenderer:
    """Any OpenAI-compatible server: the prompt tokens it reports in usage.

    A request per message is dear, so only the template's scaffolding is asked for; texts are counted by
    ``/tokenize`` where that takes a bare text (SGLang), else weighed by a rate of tokens per character that
    one long request calibrates.
    """

    def __init__(self, http: httpx.Client, model: str, sample: str) -> None:
        self._http, self._model = http, model
        self._tokenizes = _answers(http, "tokenize", {"model": model, "prompt": "u"}, "count")
        short = self._ask([_SYSTEM, _USER])
        longer = self._ask([_SYSTEM, {"role": "user", "content": sample}])
        self._rate = max(0.05, (longer - short) / max(1, len(sample)))
        # Two messages and the generation prompt around two letters.
        self._scaffolding = max(1, (short - 2) // 2)

    def text(self, text: str) -> int:
        """Tokens of a bare text, estimated where the server has no tokenizer."""
        if self._tokenizes:
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            return int(_post(self._http, "tokenize", body)["count"])
        return round(len(text) * self._rate)

    def chat(self, messages: Sequence[Wire]) -> int:
        """Estimated tokens of a chat prompt."""
        return sum(self._scaffolding + self.text(_all_text(m)) for m in messages)

    def _ask(self, messages: Sequence[Wire]) -> int:
        answer = _post(self._http, "v1/chat/completions", {"model": self._model, "messages": messages, "max_tokens": 1})
        return int(answer["usage"]["prompt_tokens"])


class ServerTokens:
    """The counter that the benchmark and the runtime share (``smoothagent.tokens.TokenCounter``)."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: dict[tuple[object, ...], int] = {}
        self._bases: dict[tuple[str, ...], int] = {}

    def text(self, text: str) -> int:
        """Tokens of a bare text."""
        return self._renderer.text(text)

    def count(self, message: Message) -> int:
        """Tokens that a message adds to a prompt."""
        content = message.content if isinstance(message.content, str | None) else repr(message.content)
        key = (message.role, content, message.tool_calls)
        if key not in self._known:
            self._known[key] = self._measure(message)
        return self._known[key]

    def count_wire(self, messages: Sequence[Wire]) -> int:
        """Tokens of a whole history, each message counted once."""
        return sum(self.count(wire_message(m)) for m in messages)

    def fixed(self, prompt: Prompt) -> int:
        """Tokens sent besides the messages: the generation prompt and the system text the prompt carries."""
        system = 0 if prompt.system is None else self.count(Message("system", prompt.system))
        return system + max(0, self._chat(_SYSTEM, _USER) - self._user() - self.count(Message("system", "s")))

    def _measure(self, message: Message) -> int:
        wire = {**message.wire(), "content": message.text}
        match message.role:
            case "system" | "developer":
                # Only one system message may lead, so its difference to the base's is taken; that one's
                # scaffolding is a user message's.
                tokens = self._chat(wire, _USER) - self._chat(_SYSTEM, _USER) + self._user()
            case "assistant":
                # A trailing assistant message would be continued instead of closed.
                tokens = self._chat(_SYSTEM, _USER, wire, _USER) - self._chat(_SYSTEM, _USER) - self._user()
            case "tool":
                before = self._chat(_SYSTEM, _USER, _CALL, _USER) - self._user()
                tokens = self._chat(_SYSTEM, _USER, _CALL, {**wire, "tool_call_id": "call"}) - before
            case _:
                tokens = self._chat(_SYSTEM, _USER, wire) - self._chat(_SYSTEM, _USER)
        return max(1, tokens)

    def _user(self) -> int:
        """Tokens of the base's user message."""
        return self._chat(_SYSTEM, _USER, _USER) - self._chat(_SYSTEM, _USER)

    def _chat(self, *messages: Wire) -> int:
        base = [m for m in messages if m in (_SYSTEM, _USER, _CALL)]
        if len(base) < len(messages):
            return self._renderer.chat(messages)
        roles = tuple(m["role"] for m in messages)
        if roles not in self._bases:
            self._bases[roles] = self._renderer.chat(messages)
        return self._bases[roles]


def open_tokens(http: httpx.Client, model: str, *, sample: str) -> ServerTokens:
    """The best counter the server offers.

    Args:
        http: a client whose base URL is the server's root (without ``/v1``).
        model: the model's name.
        sample: typical text, some thousand characters, to calibrate on where the server has no tokenizer.

    Raises:
        BackendUnreachableError: nothing answers.
        BackendProtocolError: it answers nothing that an OpenAI-compatible server would.
    """
    if _answers(http, "apply-template", {"messages": [_USER]}, "prompt"):
        return ServerTokens(LlamaCppRenderer(http))
    if _answers(http, "tokenize", {"model": model, "messages": [_USER]}, "count"):
        return ServerTokens(ChatTokenizeRenderer(http, model))
    return ServerTokens(UsageRenderer(http, model, sample))


def wire_message(wire: Mapping[str, Any]) -> Message:
    """The neutral message of a wire mapping, as far as tokens go."""
    calls = tuple(_call(c) for c in cast("list[Mapping[str, Any]]", wire.get("tool_calls") or ()))
    return Message(str(wire["role"]), cast("str | None", wire.get("content")), calls, wire.get("tool_call_id"))


def _call(raw: Mapping[str, Any]) -> ToolCall:
    return ToolCall(str(raw["id"]), str(raw["function"]["name"]), str(raw["function"]["arguments"]))


def _all_text(message: Wire) -> str:
    calls = "".join(c["function"]["name"] + c["function"]["arguments"] for c in message.get("tool_calls") or ())
    return str(message.get("content") or "") + calls


def _answers(http: httpx.Client, path: str, body: Mapping[str, Any], field: str) -> bool:
    """Whether the server knows this request: it answers JSON with the field."""
    try:
        answer = http.post(path, json=body)
        return answer.is_success and field in answer.json()
    except httpx.TransportError as error:
        raise BackendUnreachableError(f"nothing answers at {http.base_url}: {error}; is the server running?") from error
    except ValueError:
        return False


def _post(http: httpx.Client, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        answer = http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()
    except httpx.TransportError as error:
        raise BackendUnreachableError(f"nothing answers at {http.base_url}: {error}; is the server running?") from error
    except httpx.HTTPStatusError as error:
        said = error.response.text[:200]
        raise BackendProtocolError(f"{error.request.url} cannot be used for counting tokens: {said}") from error
    except ValueError as error:
        raise BackendProtocolError(f"{http.base_url}{path} did not answer JSON: {error}") from error


def counting_client(base_url: str, api_key: str = "x") -> httpx.Client:
    """A client for `open_tokens`.

    Args:
        base_url: as an OpenAI client wants it, with or without ``/v1``.
        api_key: what the server asks for.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    # llama.cpp drops about one in 60 kept-alive connections.
    return httpx.Client(
        base_url=root,
        headers={"Authorization": f"Bearer {api_key}"},
        trust_env=False,
        timeout=60,
        limits=httpx.Limits(max_keepalive_connections=0),
    )
