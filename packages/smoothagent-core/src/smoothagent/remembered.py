"""A counter that remembers: a tokenizer may run in another process, and each message is counted once."""

from __future__ import annotations

import hashlib

from smoothagent.message import Message, ToolCall, sent_back
from smoothagent.prompt import Prompt
from smoothagent.tokens import EstimateCounter, TokenCounter

_MOST = 8192
"""Messages whose sizes are remembered."""

_Key = tuple[str, str | bytes | None, tuple[ToolCall, ...], str | None, str]


def remembered(counter: TokenCounter) -> TokenCounter:
    """``counter``, asked once for each message; an estimate is quicker than looking up, and changes."""
    return counter if isinstance(counter, (EstimateCounter, RememberedCounter)) else RememberedCounter(counter)


class RememberedCounter:
    """Asks another counter once for each content.

    A commit counts what a lookahead has prepared: with a tokenizer behind HTTP (20 references, 3 ms each, measured)
    that would be most of the hook's time, so the lookahead counts it first and the commit finds it here.

    Args:
        counter: whatever it raises passes through, and is asked again.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._sizes: dict[_Key, int] = {}

    def count(self, message: Message) -> int:
        """Tokens of one message."""
        key = _key(message)
        size = self._sizes.get(key)
        if size is None:
            size = self._counter.count(message)
            if len(self._sizes) >= _MOST:
                self._sizes = {}  # replaced whole: the lane counts in another thread
            self._sizes[key] = size
        return size

    def fixed(self, prompt: Prompt) -> int:
        """Tokens of the system text and the tool definitions; the conversation keeps them."""
        return self._counter.fixed(prompt)


def _key(message: Message) -> _Key:
    content = message.content
    return (
        message.role,
        # Parts may hold images of a megabyte, which are not kept for this.
        hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()
        if isinstance(content, tuple)
        else content,
        message.tool_calls,
        message.name,
        repr(sent_back(message)) if message.extra else "",
    )
