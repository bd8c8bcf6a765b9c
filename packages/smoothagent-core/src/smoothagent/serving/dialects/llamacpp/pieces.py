"""Work on slots in pieces: evaluate a prompt, decode an answer, copy KV."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from smoothagent.errors import (
    BackendProtocolError,
    BackendRefusedError,
    BackendUnreachableError,
    RateLimitedError,
)
from smoothagent.serving.connection import Connection
from smoothagent.serving.costs import Kind
from smoothagent.serving.dialects.base import mapping, whole
from smoothagent.serving.dialects.llamacpp.answer import Answer
from smoothagent.serving.dialects.llamacpp.holdings import SLACK, Holdings, LostError
from smoothagent.serving.dialects.llamacpp.rendering import Rendering
from smoothagent.serving.piece import Grant
from smoothagent.serving.unpaced import Pacing

LONGEST_SILENCE = 20.0
"""Seconds of requests that a lookahead server may leave unanswered, all together, until it counts as hanging."""


@dataclass(slots=True)
class Pass:
    """What one request to ``/completion`` did. ``stop`` is None until its last event."""

    computed: int = 0
    stop: str | None = None


class SlotWork:
    """Pieces on the slots of one server.

    Args:
        link: the connection.
        holdings: what the slots hold.
        elsewhere: it is not the server of the agent's requests, whose steps its pieces do not lengthen.

    Attributes:
        rendering: the server's template and tokenizer.
    """

    def __init__(self, link: Connection, holdings: Holdings, *, elsewhere: bool = False) -> None:
        # Kept-alive connections are dropped about once in 60 requests (measured).
        link.close_each = True
        self.link, self.holdings, self.elsewhere = link, holdings, elsewhere
        self.rendering = Rendering(link)
        self._silent = 0.0

    async def feed(self, conversation: str, slot: int, ids: list[int], pacer: Pacing, *, at_rest: bool = False) -> int:
        """Evaluate ``ids`` on ``slot``; returns how many tokens were computed."""
        computed, holdings = 0, self.holdings
        while holdings.have(slot, ids) < len(ids):
            async with pacer.piece(conversation, Kind.PREFILL, at_rest=at_rest, elsewhere=self.elsewhere) as grant:
                # The look at the slots that admitted the piece may have shown that the slot lost its prefix.
                have = holdings.have(slot, ids)
                piece = ids[: have + grant.tokens]
                holdings.begin(slot, ids[:have])
                try:
                    done = await self._evaluate(slot, piece, expect=have, at_most=grant.tokens, grant=grant)
                except LostError as lost:
                    holdings.lose(slot, ids[: lost.cached])
                    continue
                holdings.fill(slot, piece)
                computed += done.computed
        return computed

    async def decode(
        self, conversation: str, slot: int, ids: list[int], answer: Answer, pacer: Pacing, *, at_rest: bool
    ) -> str:
        """Decode piece by piece, each a continuation; returns why it ended."""
        lost_prompt: list[int] = []
        while answer.left > 0:
            if lost_prompt:
                answer.computed += await self.feed(conversation, slot, lost_prompt, pacer, at_rest=at_rest)
                lost_prompt = []
            before = len(answer.tokens)
            async with pacer.piece(
                conversation, Kind.DECODE, least=answer.least, at_rest=at_rest, elsewhere=self.elsewhere
            ) as grant:
                prompt = [*ids, *answer.tokens]
                limit = min(answer.left, grant.tokens)
                try:
                    done = await self._evaluate(
                        slot, prompt, expect=len(prompt), at_most=limit, grant=grant, answer=answer
                    )
                except LostError as lost:
                    self.holdings.lose(slot, prompt[: lost.cached])
                    lost_prompt = prompt[:-1]
                    continue
                # A continuation evaluates the last decoded token: that is decoding, not a prompt computed again.
                answer.computed += max(0, done.computed - bool(answer.counts_on))
                answer.counts_on = True
                if done.stop in ("eos", "word"):
                    return done.stop
                # A piece that ends inside a character brings nothing: the next one must be longer.
                answer.least = 1 if len(answer.tokens) > before else answer.least * 2
            if answer.dirty:
                answer.tokens = await self.rendering.tokenize(answer.text, special=False)
                answer.dirty = False
            self.holdings.put(slot, [*ids, *answer.tokens])
        return "limit"

    def file_of(self, slot: int) -> str:
        """The name of the file that a slot is saved to, over the last one."""
        return f"smoothagent-{re.sub('[^A-Za-z0-9]+', '-', self.link.root.partition('//')[2])}-slot{slot}.bin"

    async def save(self, slot: int, name: str) -> int:
        """Save the slot's KV; returns its tokens.

        Raises:
            BackendRefusedError: it could not be saved.
        """
        saved = await self.link.post(f"~/slots/{slot}?action=save", {"filename": name})
        return whole(saved.get("n_saved")) or 0

    async def restore(self, slot: int, name: str) -> int:
        """Replace the slot's KV by what was saved; returns the tokens now there.

        Raises:
            BackendRefusedError: it could not be restored; the slot is empty now.
        """
        restored = await self.link.post(f"~/slots/{slot}?action=restore", {"filename": name})
        return whole(restored.get("n_restored")) or 0

    async def can_save(self) -> bool:
        """Whether slots can be saved; nothing is written to find out."""
        try:
            # Not a file name: refused as such where saving is possible.
            await self.link.post("~/slots/0?action=save", {"filename": "../"})
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            return "filename" in error.words.lower()
        return False

    def _check_hangs(self) -> None:
        if self.elsewhere and self._silent > LONGEST_SILENCE:
            self._silent = 0.0
            raise BackendUnreachableError(
                f"the lookahead server at {self.link.base_url} has left {LONGEST_SILENCE:.0f} s of requests unanswered"
            )

    async def _evaluate(
        self, slot: int, ids: list[int], *, expect: int, at_most: int, grant: Grant, answer: Answer | None = None
    ) -> Pass:
        """One streamed ``/completion``: evaluates ``ids`` and, with ``answer``, decodes on from there."""
        body: dict[str, Any] = {"prompt": ids, "id_slot": slot, "cache_prompt": True, "return_progress": True}
        body |= {"n_predict": 0} if answer is None else answer.request(at_most)
        done, answered, told = Pass(), False, 0
        self._check_hangs()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with self.link.stream("~/completion", body) as events:
                async for event in events:
                    answered = True
                    progress = event.get("prompt_progress")
                    if progress is not None:
                        cached = whole(mapping(progress).get("cache")) or 0
                        if expect - cached > at_most + SLACK:
                            raise LostError(cached)
                        if answer is None:
                            # As it comes: of a piece that is cut short, too, is known what it cost.
                            computed = (whole(mapping(progress).get("processed")) or 0) - cached
                            grant.report(max(0, computed - told))
                            told = max(told, computed)
                    elif event.get("stop"):
                        done.computed = whole(mapping(event.get("timings")).get("prompt_n")) or 0
                        done.stop = str(event.get("stop_type") or "limit")
                    elif answer is not None:
                        grant.report(answer.take(event))
        finally:
            # Arrivals that cut requests short must not hide a server that answers none.
            self._silent = 0.0 if answered else self._silent + clock() - began
        if not answered:
            raise BackendProtocolError(f"POST {self.link.root}/completion answered no events; is this llama.cpp?")
        if done.stop is None:
            raise BackendUnreachableError(f"the stream of POST {self.link.root}/completion ended early")
        if answer is None:
            grant.report(max(0, done.computed - told))
        return done
