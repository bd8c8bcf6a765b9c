"""What an answer says, read beside its way to the client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

_DONE = b"[DONE]"
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST = 32 * 2**20
"""Bytes of an event, or of an answer, beyond which it is not read."""


class Events:
    """Cuts a stream into whole server-sent events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that have become whole."""
        rest = self._rest
        rest += chunk
        events = list[bytes]()
        while (end := _end_of_event(rest)) > 0:
            events.append(bytes(rest[:end]))
            del rest[:end]
        if len(rest) > _LONGEST:  # no event at all
            events.append(bytes(rest))
            rest.clear()
        return events

    @property
    def rest(self) -> bytes:
        """What is no whole event yet."""
        return bytes(self._rest)


def _end_of_event(data: bytearray) -> int:
    found = [(at, at + len(end)) for end in _ENDS if (at := data.find(end)) >= 0]
    return min(found)[1] if found else 0


def data_of(event: bytes) -> bytes:
    """The data of a server-sent event; empty where it has none."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


class Answer:
    """One completion: what it has said so far.

    Attributes:
        usage: token counts, where told.
        whole: it has ended as a model ends one.
        readable: it could be read so far.
    """

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] | None = None
        self.whole = False
        self.readable = True
        self._text = list[str]()
        self._calls: dict[int, dict[str, Any]] = {}
        self._size = 0

    def message(self) -> dict[str, Any] | None:
        """The assistant's message as the next request will have it; None where that cannot be told."""
        if not (self.whole and self.readable):
            return None
        calls = [self._calls[i] for i in sorted(self._calls)]
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
        self._size += len(data)
        if not data or data == _DONE or not self.readable:
            return "", False
        chunk = self._parsed(data)
        choices = chunk.get("choices")
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, Any]", usage)
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
        self._size += len(data)
        whole = self._parsed(data)
        usage = whole.get("usage")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, Any]", usage)
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

    def _parsed(self, data: bytes) -> dict[str, Any]:
        if self._size > _LONGEST:
            self.readable = False
            return {}
        try:
            parsed = json.loads(data)
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
        said = any(delta.get(name) for name in ("content", "tool_calls", "reasoning_content", "reasoning"))
        return text, said

    def _call(self, place: int, call: dict[str, Any]) -> None:
        index = call.get("index", place)
        if not isinstance(index, int):
            self.readable = False
            return
        known = self._calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        if isinstance(call.get("id"), str) and call["id"]:
            known["id"] = call["id"]
        function = call.get("function")
        if isinstance(function, dict):
            for name in ("name", "arguments"):
                piece = cast("dict[str, Any]", function).get(name)
                if isinstance(piece, str):
                    known["function"][name] += piece


def is_usage_alone(event: bytes) -> bool:
    """Whether an event is the one that a stream has only where usage was asked for."""
    data = data_of(event)
    if b'"usage"' not in data:
        return False
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(chunk, dict):
        return False
    told = cast("dict[str, Any]", chunk)
    return told.get("choices") == [] and isinstance(told.get("usage"), dict)
