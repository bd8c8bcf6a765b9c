"""What an answer says, read beside its way to the client."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import jiter

_DONE = b"[DONE]"
_END = re.compile(rb"\r?\n\r?\n|\r\r")
LONGEST = 8 * 2**20
"""Bytes of an event, or of a whole answer, beyond which it is not read."""


class Events:
    """Cuts a stream into whole server-sent events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0  # where an end may begin that was not whole before

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that have become whole."""
        rest = self._rest
        if not rest and chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return [chunk]  # one event, as servers send them
        rest += chunk
        events, begin = list[bytes](), 0
        for end in _END.finditer(rest, self._seen):
            events.append(bytes(rest[begin : end.end()]))
            begin = end.end()
        if len(rest) - begin > LONGEST:  # no event at all
            events.append(bytes(rest[begin:]))
            begin = len(rest)
        del rest[:begin]
        self._seen = max(0, len(rest) - 3)
        return events

    @property
    def rest(self) -> bytes:
        """What is no whole event yet."""
        return bytes(self._rest)


def data_of(event: bytes) -> bytes:
    """The data of a server-sent event; empty where it has none."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


class Answer:
    """One completion: what it has said so far.

    Attributes:
        usage: token counts, where told.
        whole: it has ended as a model ends one.
        done: nothing more comes of a stream.
        readable: it could be read so far.
    """

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] | None = None
        self.whole = self.done = False
        self.readable = True
        self._text = list[str]()
        self._calls: dict[int, _Call] = {}
        self._size = 0

    def message(self) -> dict[str, Any] | None:
        """The assistant's message as the next request will have it; None where that cannot be told."""
        if not (self.whole and self.readable):
            return None
        calls = [self._calls[i].wire() for i in sorted(self._calls)]
        if not calls and not self._text:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text) or (None if calls else "")}
        return {**message, "tool_calls": calls} if calls else message

    def event(self, event: bytes) -> tuple[str, bool]:
        """Take in an event of a stream.

        Returns:
            The text that it adds, and whether it adds anything that a model has said.
        """
        data = data_of(event)
        if data == _DONE:
            self.done = True
        if not data or data == _DONE or not self.readable:
            return "", False
        chunk = self._parsed(data)
        choices = chunk.get("choices")
        self._counted(chunk)
        text, said = "", False
        for choice in cast("list[Any]", choices) if isinstance(choices, list) else []:
            if not isinstance(choice, dict):
                self.readable = False
                continue
            one = cast("dict[str, Any]", choice)
            if one.get("index", 0) != 0:
                self.readable = False  # several answers: which one goes on is not known
                continue
            delta = one.get("delta")
            if isinstance(delta, dict):
                more, heard = self._delta(cast("dict[str, Any]", delta))
                text, said = text + more, said or heard
            if one.get("finish_reason") is not None:
                self.whole = True
        return text, said

    def body(self, data: bytes) -> str:
        """Take in an answer that is no stream; returns its text."""
        whole = self._parsed(data)
        self._counted(whole)
        choices = whole.get("choices")
        if not isinstance(choices, list) or len(cast("list[Any]", choices)) != 1:
            self.readable = False
            return ""
        choice = cast("list[Any]", choices)[0]
        message = cast("dict[str, Any]", choice).get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            self.readable = False
            return ""
        text, _ = self._delta(cast("dict[str, Any]", message))
        self.whole = True
        return text

    def _counted(self, chunk: Mapping[str, Any]) -> None:
        usage, timings = chunk.get("usage"), chunk.get("timings")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, Any]", usage)
        elif self.usage is None and isinstance(timings, dict):
            self.usage = _of_timings(cast("dict[str, Any]", timings))

    def _parsed(self, data: bytes) -> dict[str, Any]:
        self._size += len(data)
        if self._size > 4 * LONGEST:
            self.readable = False
            return {}
        try:
            parsed = _json(data)
        except (ValueError, RecursionError):
            self.readable = False
            return {}
        if not isinstance(parsed, dict):
            self.readable = False
            return {}
        return cast("dict[str, Any]", parsed)

    def _delta(self, delta: dict[str, Any]) -> tuple[str, bool]:
        content, text = delta.get("content"), ""
        if isinstance(content, str) and content:
            text = content
            self._text.append(content)
        elif content is not None and not isinstance(content, str):
            self.readable = False
        if delta.get("function_call") is not None or delta.get("audio") is not None:
            self.readable = False
        calls = delta.get("tool_calls")
        for place, call in enumerate(cast("list[Any]", calls) if isinstance(calls, list) else []):
            if isinstance(call, dict):
                self._call(place, cast("dict[str, Any]", call))
        said = (content, delta.get("tool_calls"), delta.get("reasoning_content"), delta.get("reasoning"))
        return text, any(said)

    def _call(self, place: int, call: dict[str, Any]) -> None:
        index = call.get("index", place)
        if not isinstance(index, int):
            self.readable = False
            return
        known = self._calls.setdefault(index, _Call())
        if isinstance(call.get("id"), str) and call["id"]:
            known.id = call["id"]
        function = call.get("function")
        if isinstance(function, dict):
            given = cast("dict[str, Any]", function)
            for name, pieces in (("name", known.name), ("arguments", known.arguments)):
                if isinstance(given.get(name), str):
                    pieces.append(given[name])


class _Call:
    """One call, in pieces."""

    def __init__(self) -> None:
        self.id = ""
        self.name = list[str]()
        self.arguments = list[str]()

    def wire(self) -> dict[str, Any]:
        """The call as a message has it."""
        function = {"name": "".join(self.name), "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def _of_timings(timings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What llama.cpp tells in every stream, usage asked for or not."""
    cached, computed, said = (timings.get(name) for name in ("cache_n", "prompt_n", "predicted_n"))
    if not (isinstance(cached, int) and isinstance(computed, int)):
        return None
    return {
        "prompt_tokens": cached + computed,
        "completion_tokens": said if isinstance(said, int) else 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _json(data: bytes) -> Any:
    """What JSON says. Raises ValueError, RecursionError."""
    try:
        return jiter.from_json(data)  # a fifth of the time
    except ValueError:
        return json.loads(data)  # which takes half of a surrogate pair, as it comes where a model's text is cut


def is_usage_alone(event: bytes) -> bool:
    """Whether an event is the one that a stream has only where usage was asked for."""
    data = data_of(event)
    if b'"usage"' not in data:
        return False
    try:
        chunk = _json(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(chunk, dict):
        return False
    told = cast("dict[str, Any]", chunk)
    return told.get("choices") == [] and isinstance(told.get("usage"), dict)
