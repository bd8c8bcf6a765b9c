"""A request's JSON body: what it says, and where, so that what is not to be changed stays as it was sent, to the byte.

Parsed and written again, numbers, repeated names and escapes would not be what they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from smoothagent_gateway.asgi import RefusedError

_DIGITS = 4000
"""Digits of the longest number that is read as a whole one; Python reads no more than 4300."""
_ENDS = 48
"""Bytes at its end that tell one beginning from others."""
_space = re.compile(r"[ \t\n\r]*").match


class Span(NamedTuple):
    """A part of a text: from ``begin`` up to ``end``."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of a body, up to the end of one of its messages.

    Attributes:
        call: the fields before ``messages``.
        fields: where these stand.
        name: where ``"messages"`` begins.
        values: the messages.
        items: where these stand.
    """

    call: Mapping[str, Any]
    fields: Mapping[str, Span | None]
    name: int
    values: Sequence[Any]
    items: Sequence[Span]

    def without_last(self) -> Begun | None:
        """The same up to the message before the last; None where there is none."""
        if len(self.values) < 2:
            return None
        return replace(self, values=self.values[:-1], items=self.items[:-1])


@dataclass(frozen=True, slots=True)
class Kept:
    """A body as later ones may go on from it; in bytes, since another one is looked at before it is read.

    Attributes:
        data: up to the end of its last message.
        shorter: bytes up to the end of the one before; of all where there is none.
        ends: with these bytes.
        begun: what is said up to there.
    """

    data: bytes
    shorter: int
    ends: bytes
    begun: Begun

    def shared(self, data: bytes) -> int:
        """Bytes after which ``data`` need not be read again; its last message may be another one by now."""
        shorter = self.shorter
        # Of hundreds that begin with the same system text most are told apart by these.
        if data[max(0, shorter - _ENDS) : shorter] != self.ends:
            return 0
        if data.startswith(self.data):
            return len(self.data)
        return shorter if shorter < len(self.data) and data[:shorter] == self.data[:shorter] else 0

    def begins(self, shared: int) -> Begun | None:
        """What is said up to there."""
        return self.begun if shared == len(self.data) else self.begun.without_last()


class Body:
    """A JSON object.

    Args:
        data: the bytes of it.
        earlier: what it begins with (`Kept`), where that has been read before: it is not read again, and its messages
            are the same objects.

    Attributes:
        data: the same.
        call: what it says; of a repeated name the last value, as parsers have it.
        items: where each of the ``messages`` stands; None where that is no list, is repeated, or cannot be told.

    Raises:
        RefusedError: it is no JSON object.
    """

    def __init__(self, data: bytes, earlier: Begun | None = None) -> None:
        self.data = data
        self._begun: Begun | None = None
        self.call: dict[str, Any] = {}
        self.items: list[Span] | None = None
        self._text = ""
        self._fields: dict[str, Span | None] = {}
        self._end = 0
        try:
            self._text = data.decode()
            self._read(earlier)
        except (ValueError, IndexError, RecursionError):  # not in UTF-8 perhaps; or it is none, which is said better so
            self.items, self._fields, self._end, self._begun = None, {}, 0, None
            self.call = _parsed(data)

    def kept(self) -> Kept | None:
        """Its beginning; None where that cannot be told."""
        begun, text = self._begun, self._text
        if begun is None:
            return None
        ends = [item.end for item in begun.items[-2:]]
        if not text.isascii():
            ends = [len(text[:end].encode()) for end in ends]
        return Kept(self.data[: ends[-1]], ends[0], self.data[max(0, ends[0] - _ENDS) : ends[0]], begun)

    def changed(self, messages: Sequence[Any] | None, given: Sequence[Any], values: Mapping[str, Any]) -> bytes:
        """The text with other messages, and with more fields or other values of them.

        Args:
            messages: what to send; None leaves them. Those of them that are ``given`` stay as they were sent.
            given: objects for the messages of the body, each in its place.
            values: fields.
        """
        edits: dict[str, str] = {name: _written(value) for name, value in values.items()}
        if messages is not None:
            edits["messages"] = self._list(messages, given)
        if not self._end or any(self._fields.get(name, True) is None for name in edits):
            told = {**self.call, **values}
            return _written(told if messages is None else {**told, "messages": list(messages)}).encode()
        text, parts, at, added = self._text, list[str](), 0, list[str]()
        for name, value in edits.items():
            if name not in self._fields:
                added.append(f"{_written(name)}:{value}")
        placed = [(span, edits[name]) for name, span in self._fields.items() if name in edits and span is not None]
        for span, value in sorted(placed):
            parts += [text[at : span.begin], value]
            at = span.end
        parts.append(text[at : self._end])
        if added:
            parts.append("," * bool(self._fields) + ",".join(added))
        return "".join([*parts, text[self._end :]]).encode()

    def _list(self, messages: Sequence[Any], given: Sequence[Any]) -> str:
        items = self.items or ()
        places = {id(one): span for one, span in zip(given, items, strict=False)}
        spans = (places.get(id(one)) for one in messages)
        pairs = zip(spans, messages, strict=True)
        return f"[{','.join(_written(m) if span is None else self._text[span.begin : span.end] for span, m in pairs)}]"

    # ---- reading -------------------------------------------------------------------------------

    def _read(self, earlier: Begun | None) -> None:
        """One pass, in which the values themselves are read by the parser."""
        text = self._text
        if earlier is None:
            at = self._expect(self._skip(0), "{")
        else:
            self.call, self._fields, at = dict(earlier.call), dict(earlier.fields), earlier.name
        while text[at] != "}":
            start = at
            name, at = _decoder.raw_decode(text, at)
            if not isinstance(name, str):
                raise ValueError(at)
            begin = self._expect(self._skip(at), ":")
            if name == "messages" and text[begin] == "[":
                before = self.call, self._fields
                value, end = self._items(begin, earlier)
                if name not in self._fields and self.items:
                    self._begun = Begun(dict(before[0]), dict(before[1]), start, value, self.items)
                earlier = None
            else:
                value, end = _decoder.raw_decode(text, begin)
            if name in self._fields and name == "messages":
                self.items = self._begun = None
            self._fields[name] = None if name in self._fields else Span(begin, end)
            self.call[name] = value
            at = self._skip(end)
            if text[at] == ",":
                at = self._skip(at + 1)
                if text[at] == "}":
                    raise ValueError(at)
            elif text[at] != "}":
                raise ValueError(at)
        if self._skip(at + 1) != len(text):
            raise ValueError(at)
        self._end = at

    def _items(self, begin: int, earlier: Begun | None) -> tuple[list[Any], int]:
        """The list that begins there, and its end."""
        text, values, items = self._text, list[Any](), list[Span]()
        at = self._skip(begin + 1)
        if earlier is not None:
            values, items = list(earlier.values), list(earlier.items)
            at = self._after(items[-1].end)
        while text[at] != "]":
            value, end = _decoder.raw_decode(text, at)
            values.append(value)
            items.append(Span(at, end))
            at = self._after(end)
        self.items = items
        return values, at + 1

    def _after(self, end: int) -> int:
        """Where the next of a list begins, or the list's end is."""
        at = self._skip(end)
        if self._text[at] == ",":
            at = self._skip(at + 1)
            if self._text[at] == "]":
                raise ValueError(at)
        elif self._text[at] != "]":
            raise ValueError(at)
        return at

    def _skip(self, at: int) -> int:
        space = _space(self._text, at)
        assert space is not None, "it may be empty"
        return space.end()

    def _expect(self, at: int, what: str) -> int:
        """The place after ``what`` and the space that follows it."""
        if self._text[at] != what:
            raise ValueError(at)
        return self._skip(at + 1)


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < _DIGITS else float(digits)


_decoder = json.JSONDecoder(parse_int=cast("Any", _whole))


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        call = json.loads(data, parse_int=cast("Any", _whole))
    except RecursionError:
        raise RefusedError(400, "the request's body is nested too deeply to be read", "invalid_json") from None
    except ValueError as error:
        raise RefusedError(400, f"the request's body is not JSON: {_where(error)}", "invalid_json") from None
    if not isinstance(call, dict):
        raise RefusedError(
            400, f"the request's body is a JSON {type(call).__name__}: a chat completion is an object", "invalid_json"
        )
    return cast("dict[str, Any]", call)


def _where(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number in it is too long"


def _written(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
