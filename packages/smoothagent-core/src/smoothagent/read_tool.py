"""The tool with which a model reads an offloaded output back, page by page."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from smoothagent.errors import ConfigurationError, StoreError, UnknownReferenceError
from smoothagent.prompt import Prompt
from smoothagent.store import READ_TOOL, OffloadStore, parse_reference

_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_log = logging.getLogger(__name__)

READ_OFFLOADED_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": READ_TOOL,
        "description": (
            "Read a tool output that was moved out of the conversation and replaced by '[output offloaded: …]'. "
            "Returns one page; its first line names the characters returned and the offset of the next page."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "ref": {"type": "string", "description": "The ref in the '[output offloaded: …]' line."},
                "offset": {"type": "integer", "minimum": 0, "description": "First character to return; default 0."},
                "limit": {"type": "integer", "minimum": 1, "description": "Most characters to return."},
            },
            "required": ["ref"],
        },
    },
}
"""The tool's definition for the OpenAI API; put it in the agent's tools and `ReadOffloaded.run` behind it."""


class _RefusedError(Exception):
    """What the model asked for cannot be answered; the message is for the model."""


@dataclass(frozen=True)
class ReadOffloaded:
    """The tool itself. Every answer is text, also where the model asked for something impossible.

    A page is one header line and the text from the next character on: ``[chars 0-4000 of 9000; next
    page: offset=4000]`` or, on the last page, ``[chars 8000-9000 of 9000; end]``. The texts of all
    pages, joined, are the output exactly. Positions count code points.

    Attributes:
        store: where the outputs are.
        page_chars: the most characters a page has, whatever ``limit`` asks.
    """

    store: OffloadStore
    page_chars: int = 4000

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a page that holds nothing."""
        if self.page_chars < 1:
            raise ConfigurationError(f"page_chars={self.page_chars}: a page needs at least 1 character")

    def __call__(self, ref: str, offset: int = 0, limit: int | None = None) -> str:
        """One page of an output.

        Args:
            ref: the id, or the whole reference text.
            offset: first character to return.
            limit: most characters to return; `page_chars` where None.
        """
        try:
            start = _whole(offset, "offset", 0)
            count = self.page_chars if limit is None else min(_whole(limit, "limit", 1), self.page_chars)
            return _page(self._text(ref), start, count)
        except _RefusedError as refusal:
            return f"[{READ_TOOL}: {refusal}]"

    def run(self, arguments_json: str) -> str:
        """Answer a tool call from its raw arguments, as the model wrote them."""
        try:
            arguments = json.loads(arguments_json)
        except (ValueError, RecursionError) as error:
            return f'[{READ_TOOL}: the arguments are not valid JSON ({error}); send {{"ref": "…", "offset": 0}}]'
        if not isinstance(arguments, dict) or "ref" not in arguments:
            return f'[{READ_TOOL}: the argument ref is missing; send {{"ref": "…", "offset": 0}}]'
        given = cast("dict[str, Any]", arguments)
        offset = given.get("offset")
        return self(given["ref"], 0 if offset is None else offset, given.get("limit"))

    def _text(self, ref: object) -> str:
        if not isinstance(ref, str):
            raise _RefusedError(f"ref must be a string, not {_short(ref)}")
        # Models paste the whole line, or keep its quotes.
        key = parse_reference(ref.strip()) or ref.strip().strip("\"'")
        try:
            return self.store.get(key)
        except UnknownReferenceError as error:
            raise _RefusedError(
                f"no output is stored under ref={_short(ref)}; copy the ref from an '[output offloaded: …]' line "
                "exactly, or run the original tool again"
            ) from error
        except StoreError as error:
            # The model gets an answer, so the agent's owner would not hear of it otherwise.
            _log.warning("%s could not read %r: %s", READ_TOOL, key, error)
            raise _RefusedError(f"the output {_short(ref)} cannot be read now; run the original tool again") from error


def _page(text: str, start: int, count: int) -> str:
    total = len(text)
    if start >= total and start > 0:
        raise _RefusedError(f"offset={start} is past the end: the output has {total} chars")
    stop = _between_pairs(text, start, min(start + count, total))
    rest = f"next page: offset={stop}" if stop < total else "end"
    return f"[chars {start}-{stop} of {total}; {rest}]\n{text[start:stop]}"


def _between_pairs(text: str, start: int, stop: int) -> int:
    """``stop``, moved where it would part two surrogates that a JSON decoder on the way would join."""
    if 0 < stop < len(text) and "\ud800" <= text[stop - 1] <= "\udbff" and "\udc00" <= text[stop] <= "\udfff":
        return stop - 1 if stop - 1 > start else stop + 1
    return stop


def _whole(value: object, name: str, least: int) -> int:
    """A count as models send it: 4000, 4000.0 or "4000"."""
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and _DIGITS.fullmatch(value)):
        number = int(value)
    if number is None or number < least:
        raise _RefusedError(f"{name} must be a whole number of at least {least}, not {_short(value)}")
    return number


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"


def has_read_tool(prompt: Prompt) -> bool:
    """Whether the agent can read references back: its tools hold one of the tool's name.

    Definitions nested under ``function`` and flat ones (Responses API, Anthropic) both count.
    """
    for tool in prompt.tools:
        function = tool.get("function")
        named = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else tool
        if named.get("name") == READ_TOOL:
            return True
    return False


def require_read_tool(prompt: Prompt) -> None:
    """Refuse to offload for an agent that could never read the outputs again.

    Raises:
        ConfigurationError: the prompt's tools hold no `READ_OFFLOADED_TOOL`.
    """
    if not has_read_tool(prompt):
        names = [str(cast("Mapping[str, Any]", tool.get("function") or tool).get("name")) for tool in prompt.tools]
        raise ConfigurationError(
            f"the agent's tools {names} have no {READ_TOOL!r}, so it could not read offloaded outputs back: add "
            "smoothagent.READ_OFFLOADED_TOOL to its tools and answer the calls with ReadOffloaded(store).run (the "
            "packages for frameworks make a tool of theirs of it: read_offloaded(store)), or pass allow_unreadable=True"
        )
