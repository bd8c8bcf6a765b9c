r"""One string field of a tool call's arguments, while the model is still writing them.

A delegation's instruction arrives as fragments of JSON text; what is certain of it can be prefilled at once.
Certain is what no continuation changes: half an escape is held back, and so is a high surrogate
(``\ud83d``) until its low half has come.

The text is scanned once, whatever the fragments, and `jiter` decodes each certain piece. (Parsing the whole
text again per fragment with jiter's ``trailing-strings`` mode is quadratic: 5 GB of work for 100 kB in single
characters; and jiter lets the last of two equal names win, so text already given out could change.)
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Literal

import jiter

_HEX = "[0-9a-fA-F]"
_HIGH = rf"[dD][89abAB]{_HEX}{{2}}"
_LOW = rf"[dD][c-fC-F]{_HEX}{{2}}"
_SIMPLE = r'\\["\\/bfnrt]'
# All of a string body that is complete: text, whole escapes, whole surrogate pairs.
_TEXT = r'[^"\\\x00-\x1f\ud800-\udfff]*'
_UNIT = rf"(?:{_SIMPLE}|\\u(?:[0-9abcefABCEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}|{_HIGH}\\u{_LOW}))"
_CERTAIN = re.compile(rf"{_TEXT}(?:{_UNIT}{_TEXT})*")
# What may still become a unit, at the end of the text received.
_HALF = re.compile(rf"\\(?:u(?:{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?)?\Z")
# Strings that are only skipped may hold lone surrogates: nobody reads them here.
_SKIPPED = re.compile(rf'[^"\\\x00-\x1f]*(?:(?:{_SIMPLE}|\\u{_HEX}{{4}})[^"\\\x00-\x1f]*)*')
_SKIPPED_HALF = re.compile(rf"\\(?:u{_HEX}{{0,3}})?\Z")

_SPACE = re.compile(r"[ \t\n\r]*")
_ATOM = re.compile(r"[-+.0-9A-Za-z]+")
_LITERAL = re.compile(r"true|false|null|NaN|-?Infinity|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")

_Expect = Literal["value", "value or ]", "name", "name or }", ":", ",", "end"]
_Role = Literal["name", "field", "other"]


class FieldStream:
    """Follows the top-level string field ``field`` of a JSON object that arrives in fragments.

    Attributes:
        broken: why nothing more will come (with the character offset, never with text), or None. Text given
            out before stays right; the caller stops warming and loses nothing.
        complete: whether the field's closing quote has been seen.
    """

    def __init__(self, field: str) -> None:
        self.field = field
        self.broken: str | None = None
        self.complete = False
        self._seen = False
        self._stack: list[str] = []
        self._expect: _Expect = "value"
        self._role: _Role | None = None  # of the string we are in
        self._name: list[str] = []  # raw pieces of a top-level name
        self._ours = False  # the value that comes next at the top level is the field's
        self._held = ""  # received but not certain
        self._offset = 0  # of the first character in the data being scanned
        self._high = ""  # half of a character that the transport cut in two

    def feed(self, fragment: str) -> str:
        """Take the next fragment; return the field's text that has become certain, "" if none has.

        Never raises on bad input: see ``broken``.
        """
        if self.broken is not None:
            return ""
        data = self._held + self._whole(fragment)
        self._held = ""
        out: list[str] = []
        pos = 0
        while pos < len(data) and self.broken is None:
            pos = self._token(data, pos) if self._role is None else self._string(data, pos, self._role, out)
        self._offset += len(data) - len(self._held)
        return "".join(out)

    @property
    def pending(self) -> str:
        """What was received and is not certain yet: half an escape, or a number that may go on."""
        return self._held + self._high

    def _whole(self, fragment: str) -> str:
        # A server in a UTF-16 language may cut an astral character between two fragments.
        if fragment.isascii() and not self._high:
            return fragment
        text = self._high + fragment
        self._high = ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._high = text[:-1], text[-1]
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return text

    # -- between strings ---------------------------------------------------------------------------------------------

    def _token(self, data: str, pos: int) -> int:
        space = _SPACE.match(data, pos)
        pos = space.end() if space else pos
        if pos == len(data):
            return pos
        char = data[pos]
        if not self._stack and self._expect == "value" and char != "{":
            return self._stop("the arguments are not a JSON object", pos)
        if self._ours and self._expect == "value" and char != '"':
            return self._stop(f"the field {self.field!r} is not a string", pos)
        if char == '"':
            return self._open_string(pos)
        if char in "{[":
            return self._open(char, pos)
        if char in "}]":
            return self._close(char, pos)
        if char == ":" and self._expect == ":":
            self._expect = "value"
            return pos + 1
        if char == "," and self._expect == ",":
            self._expect = "name" if self._stack[-1] == "{" else "value"
            return pos + 1
        return self._atom(data, pos)

    def _open_string(self, pos: int) -> int:
        if self._expect in ("name", "name or }"):
            self._role = "name"
        elif self._expect in ("value", "value or ]"):
            self._role = "field" if self._ours else "other"
            self._ours = False
        else:
            return self._unexpected(pos)
        return pos + 1

    def _open(self, char: str, pos: int) -> int:
        if self._expect not in ("value", "value or ]"):
            return self._unexpected(pos)
        self._stack.append(char)
        self._expect = "name or }" if char == "{" else "value or ]"
        return pos + 1

    def _close(self, char: str, pos: int) -> int:
        opened, empty = ("{", "name or }") if char == "}" else ("[", "value or ]")
        if not self._stack or self._stack[-1] != opened or self._expect not in (",", empty):
            return self._unexpected(pos)
        self._stack.pop()
        self._expect = "," if self._stack else "end"
        return pos + 1

    def _atom(self, data: str, pos: int) -> int:
        atom = _ATOM.match(data, pos)
        if atom is None or self._expect not in ("value", "value or ]"):
            return self._unexpected(pos)
        if atom.end() == len(data):  # it may go on
            self._held = atom.group()
            return len(data)
        if not _LITERAL.fullmatch(atom.group()):
            return self._unexpected(pos)
        self._expect = ","
        return atom.end()

    # -- in a string -------------------------------------------------------------------------------------------------

    def _string(self, data: str, pos: int, role: _Role, out: list[str]) -> int:
        certain, half = (_CERTAIN, _HALF) if role == "field" else (_SKIPPED, _SKIPPED_HALF)
        match = certain.match(data, pos)
        end = match.end() if match else pos
        if role == "field":
            out.append(_decode(data[pos:end]))
        elif role == "name" and len(self._stack) == 1:
            self._name.append(data[pos:end])
        if end == len(data):
            return end
        if data[end] == '"':
            self._role = None
            self._closed(role, end)
            return end + 1
        if half.match(data, end):
            self._held = data[end:]
            return len(data)
        return self._stop("a control character, a lone surrogate or an unknown escape in a string", end)

    def _closed(self, role: _Role, pos: int) -> None:
        if role != "name":
            self.complete |= role == "field"
            self._expect = ","
            return
        self._expect = ":"
        if len(self._stack) > 1:
            return
        raw, self._name = "".join(self._name), []
        with suppress(ValueError):  # a name that cannot be decoded is not ours
            self._ours = _decode(raw) == self.field
        if self._ours and self._seen:
            self._stop(f"the field {self.field!r} appears twice", pos)
        self._seen |= self._ours

    # -- the end -----------------------------------------------------------------------------------------------------

    def _unexpected(self, pos: int) -> int:
        what = "text after the end of the object" if self._expect == "end" else f"expected {self._expect}"
        return self._stop(what, pos)

    def _stop(self, why: str, pos: int) -> int:
        self.broken = f"{why}, at character {self._offset + pos}"
        self._held = ""
        return pos


def _decode(raw: str) -> str:
    """Decode a string body. Raises ValueError on a lone surrogate, which only a name can hold here."""
    if "\\" not in raw:
        return raw
    text: str = jiter.from_json(b'"' + raw.encode() + b'"')
    return text
