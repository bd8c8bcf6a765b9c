"""A counter that remembers: a tokenizer may run in another process, and each message is counted once."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable

from smoothagent.message import Message
from smoothagent.prompt import Prompt
from smoothagent.tokens import EstimateCounter, TokenCounter

_MOST = 8192
"""Contents whose sizes are remembered."""


def remembered(counter: TokenCounter) -> TokenCounter:
    """``counter``, asked once for each content; an estimate is quicker than looking up, and changes."""
    return counter if isinstance(counter, (EstimateCounter, RememberedCounter)) else RememberedCounter(counter)


class RememberedCounter:
    """Asks another counter once for each content.

    A commit counts what a lookahead has prepared: with a tokenizer behind HTTP (20 references, 3 ms each, measured)
    that would be most of the hook's time, so the lookahead counts it first and the commit finds it here. Sizes are
    kept by digest, so that no text is kept alive (deepagents#1530), and by object, so that no image is digested twice.

    Args:
        counter: pure, as `TokenCounter` says; whatever it raises passes through, and is asked again.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._by_object: dict[int, tuple[weakref.ref[Message], int]] = {}
        self._by_content: dict[bytes, int] = {}

    def count(self, message: Message) -> int:
        """Tokens of one message."""
        known = self._by_object.get(id(message))
        if known is not None and known[0]() is message:
            return known[1]
        digest = _digest(message)
        size = self._by_content.get(digest)
        if size is None:
            size = self._counter.count(message)
            if len(self._by_content) >= _MOST:
                self._by_content = {}  # replaced whole: the lane counts in another thread
            self._by_content[digest] = size
        self._by_object[id(message)] = (weakref.ref(message, self._gone(id(message))), size)
        return size

    def fixed(self, prompt: Prompt) -> int:
        """Tokens of the system text and the tool definitions; the conversation keeps them."""
        return self._counter.fixed(prompt)

    def _gone(self, key: int) -> Callable[[weakref.ref[Message]], None]:
        table = self._by_object

        def gone(ref: weakref.ref[Message]) -> None:
            # Another object may have the number by now.
            if (known := table.get(key)) is not None and known[0] is ref:
                del table[key]

        return gone


def _digest(message: Message) -> bytes:
    """Of all that a counter may read; made by ``repr``, which nothing that is in a message refuses."""
    rest = (message.role, message.tool_calls, message.tool_call_id, message.name, message.extra)
    digest = hashlib.blake2b(repr(rest).encode("utf-8", "surrogatepass"), digest_size=16)
    content = message.content
    text = content if isinstance(content, str) else repr(content)
    digest.update(f"{isinstance(content, str)}{len(text)}:".encode())
    digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()
