"""Prompts as llama.cpp's template and tokenizer make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from smoothagent.errors import BackendProtocolError
from smoothagent.serving import chat
from smoothagent.serving.backend import Wire
from smoothagent.serving.connection import Connection
from smoothagent.serving.dialects.base import Ask, rows

MARK = "\ue000"
"""A private-use character: no template writes it, so the text before it is what precedes a message's text."""
KEPT_TEXTS = 8
"""Rendered prompts whose token ids are remembered."""


class Rendering:
    """Asks the server to render and to tokenize.

    Args:
        link: the connection.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._texts: dict[str, list[int]] = {}

    async def text(self, ask: Ask, messages: Sequence[Wire], *, reply: bool) -> str:
        """The prompt's text; with ``reply`` up to where the model begins to answer."""
        body = {
            **chat.fields(ask.prompt, sampling=False),
            "messages": list(messages),
            "add_generation_prompt": reply,
        }
        text = (await self._link.post("~/apply-template", body)).get("prompt")
        if not isinstance(text, str):
            raise BackendProtocolError(f"POST {self._link.root}/apply-template answered without a prompt")
        return text

    async def prefix(self, ask: Ask, *, partial: bool) -> list[int]:
        """Token ids that every request beginning with the messages begins with, as far as one can know."""
        messages = list(ask.messages)
        last = messages[-1]
        if partial:
            text = chat.text_of(last) or ""
            grown = [*messages[:-1], chat.with_text(last, text + MARK)]
            if last.get("role") == "assistant":
                # As the history will have it, not as an answer that is being continued.
                grown.append(_successor(last))
            longer = await self.text(ask, grown, reply=False)
            # The text may go on in any way: its last token is held back.
            return (await self.ids(longer.partition(MARK)[0]))[:-1]
        if last.get("role") == "assistant" or not any(m.get("role") == "user" for m in messages):
            # Alone, a last assistant message is rendered as one to be continued (or refused, with calls), and
            # some templates refuse a prompt without a user: render with the likely next message, cut before its text.
            longer = await self.text(ask, [*messages, _successor(last)], reply=False)
            if MARK in longer:
                return await self.ids(longer.partition(MARK)[0])
        return await self.ids(await self.text(ask, messages, reply=False))

    async def ids(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        known = self._texts.pop(text, None)
        if known is None:
            known = await self.tokenize(text, special=True)
        self._texts[text] = known
        if len(self._texts) > KEPT_TEXTS:
            del self._texts[next(iter(self._texts))]
        return known

    async def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; with ``special`` the template's own tokens are recognised in it."""
        body = {"content": text, "add_special": special, "parse_special": special}
        ids = (await self._link.post("~/tokenize", body)).get("tokens")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in cast("list[object]", ids)):
            raise BackendProtocolError(f"POST {self._link.root}/tokenize answered without token ids")
        return cast("list[int]", ids)


def before_media(messages: Sequence[Wire]) -> list[Wire]:
    """The messages before the first with a part that is not text: raw ids cannot carry it."""
    out: list[Wire] = []
    for message in messages:
        if any(part.get("type") != "text" for part in rows(message.get("content"))):
            break
        out.append(message)
    return out


def _successor(message: Wire) -> dict[str, Any]:
    calls = rows(message.get("tool_calls"))
    if message.get("role") == "assistant" and calls:
        return {"role": "tool", "tool_call_id": str(calls[0].get("id")), "content": MARK}
    return {"role": "user", "content": MARK}
