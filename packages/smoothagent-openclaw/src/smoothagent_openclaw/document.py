"""A JSON5 file that is changed in places, and is otherwise left as its user has written it: comments, quotes, order."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from json5.loader import ModelLoader, loads
from json5.model import JSONArray, JSONObject
from json5.utils import JSON5DecodeError

from smoothagent import ConfigurationError

Path = Sequence[str | int]
"""Names of fields and places in lists, from the outermost on."""


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""What stands at a path where there is nothing."""


class _Place(NamedTuple):
    """A value in the text: its node, and from where to where it stands; for a field, where its name begins."""

    node: Any
    begin: int
    end: int
    key: int


class Document:
    """One file's text.

    Args:
        text: JSON5 with an object at its top.
        name: of the file, for errors.

    Raises:
        ConfigurationError: it is no such text.
    """

    def __init__(self, text: str, name: str = "the configuration") -> None:
        self.text, self._name = text, name
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._lines = [0]
        for line in text.split("\n"):  # as the parser counts: U+0085 and its like end none
            self._lines.append(self._lines[-1] + len(line) + 1)
        try:
            self._value: Any = loads(text)
            root: Any = loads(text, loader=ModelLoader()).value
        except (JSON5DecodeError, RecursionError) as error:
            raise ConfigurationError(f"{name} is not JSON5: {error}") from error
        if not isinstance(root, JSONObject):
            raise ConfigurationError(f"{name} holds no object at its top")
        self._root = self._place(root, 0)

    def get(self, path: Path) -> Any:
        """The value at a path; `MISSING` where there is none."""
        value = self._value
        for name in path:
            try:
                value = value[name]
            except (KeyError, IndexError, TypeError):
                return MISSING
        return value

    def set(self, path: Path, value: Any) -> Document:
        """The document with a value at a path; objects on the way are made.

        Raises:
            ConfigurationError: something on the way is no object.
        """
        found, left = self._follow(path)
        if not left:
            indent = self._indent_of(found.begin)
            return self._edited(found.begin, found.end, _written(value, indent))
        if not isinstance(found.node, JSONObject):
            shown = ".".join(map(str, path[: len(path) - len(left)])) or "the top"
            raise ConfigurationError(
                f"{self._name}: {shown} is no object, so that {'.'.join(map(str, path))} cannot be set"
            )
        for name in reversed(left[1:]):
            value = {name: value}
        return self._with_field(found, str(left[0]), value)

    def append(self, path: Path, value: Any) -> Document:
        """The document with one more value at the end of a list, which is made where there is none.

        Raises:
            ConfigurationError: there is something else.
        """
        found, left = self._follow(path)
        if left:
            return self.set(path, [value])
        if not isinstance(found.node, JSONArray):
            raise ConfigurationError(f"{self._name}: {'.'.join(map(str, path))} is no list, so that nothing is added")
        items: list[Any] = list(found.node.values)
        return self._with_item(found, [self._place(i, 0).begin for i in items], items, "", value)

    def remove(self, path: Path) -> Document:
        """The document without a field, or a value of a list; unchanged where there is none."""
        found, left = self._follow(path)
        if left:
            return self
        begin, end = found.key, found.end
        after = self._skipped(end)
        if self.text[after : after + 1] == ",":
            end = after + 1
        else:  # it was the last: the comma before it goes
            before = len(self.text[:begin].rstrip())
            if self.text[before - 1 : before] == ",":
                begin = before - 1
        line = self.text.rfind("\n", 0, begin) + 1
        rest = self.text[end:].partition("\n")[0]
        if not self.text[line:begin].strip() and not rest.strip():  # it stood on lines of its own
            begin, end = max(0, line - len(self._newline)), end + len(rest.removesuffix("\r"))
        return self._edited(begin, end, "")

    # ---- inside --------------------------------------------------------------------------------

    def _edited(self, begin: int, end: int, new: str) -> Document:
        return Document(self.text[:begin] + self._ended(new) + self.text[end:], self._name)

    def _ended(self, new: str) -> str:
        """With the line ends of the file."""
        return new.replace("\r\n", "\n").replace("\n", self._newline)

    def _place(self, node: Any, key: int) -> _Place:
        return _Place(node, self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset), key)

    def _at(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def _follow(self, path: Path) -> tuple[_Place, Path]:
        """The deepest place on a path, and what of the path is left."""
        place = self._root
        for depth, name in enumerate(path):
            found = self._inside(place, name)
            if found is None:
                return place, path[depth:]
            place = found
        return place, ()

    def _inside(self, place: _Place, name: str | int) -> _Place | None:
        if isinstance(place.node, JSONObject):
            found = None
            for pair in place.node.key_value_pairs:
                key: Any = pair.key
                if getattr(key, "name", None) == name or getattr(key, "characters", None) == name:
                    found = self._place(pair.value, self._at(key.lineno, key.col_offset))
            return found
        if isinstance(place.node, JSONArray) and isinstance(name, int) and name < len(place.node.values):
            node: Any = place.node.values[name]
            return self._place(node, self._at(node.lineno, node.col_offset))
        return None

    def _with_field(self, place: _Place, name: str, value: Any) -> Document:
        pairs: list[Any] = list(place.node.key_value_pairs)
        begins = [self._at(pair.key.lineno, pair.key.col_offset) for pair in pairs]
        return self._with_item(place, begins, [pair.value for pair in pairs], f"{json.dumps(name)}: ", value)

    def _with_item(self, place: _Place, begins: list[int], values: list[Any], name: str, value: Any) -> Document:
        """With one more at the end of an object or a list.

        Args:
            place: the object or list.
            begins: where its items begin.
            values: the nodes of their values.
            name: what stands before the new value.
            value: the new one.
        """
        outer, brackets = self._indent_of(place.begin), self.text[place.begin] + self.text[place.end - 1]
        if not values:
            inner = f"{outer}  "
            inside = self.text[place.begin + 1 : place.end - 1].rstrip()  # perhaps a comment
            new = f"{brackets[0]}{inside}\n{inner}{name}{_written(value, inner)}\n{outer}{brackets[1]}"
            return self._edited(place.begin, place.end, new)
        end = self._place(values[-1], 0).end
        if "\n" not in self.text[place.begin : begins[0]]:
            return self._edited(end, end, f", {name}{_written(value, f'{outer}  ')}")
        # On a line of its own, after what is said of the last one on its line.
        inner = self._indent_of(begins[0])
        comma = self._skipped(end)
        trailing = self.text[comma : comma + 1] == ","
        line = self._end_of_line(comma + 1 if trailing else end)
        new = self._ended(f"\n{inner}{name}{_written(value, inner)}")
        text = f"{self.text[:line]}{new}{',' if trailing else ''}{self.text[line:]}"
        return Document(text if trailing else f"{text[:end]},{text[end:]}", self._name)

    def _end_of_line(self, at: int) -> int:
        """Where the line ends, if nothing but space and comments is left of it; else ``at``."""
        end = self.text.find(self._newline, at)
        rest = re.sub(r"/\*.*?\*/|//.*", "", self.text[at:end]) if end >= 0 else "x"
        return end if not rest.strip() and end >= 0 else at

    def _indent_of(self, at: int) -> str:
        line = self.text[self.text.rfind("\n", 0, at) + 1 : at]
        return line[: len(line) - len(line.lstrip())]

    def _skipped(self, at: int) -> int:
        """The place after space and comments."""
        text = self.text
        while at < len(text):
            if text[at].isspace():
                at += 1
            elif text.startswith("//", at):
                end = text.find("\n", at)
                at = len(text) if end < 0 else end
            elif text.startswith("/*", at):
                at = text.index("*/", at) + 2
            else:
                break
        return at


def _written(value: Any, indent: str) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{indent}")
