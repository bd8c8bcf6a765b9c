"""Servers with a shared prefix cache, asked through chat completions: SGLang, vLLM and hosted ones.

A prefill there is a chat request of which the answer is thrown away. In pieces it is the same request
with the conversation's text cut short: each piece finds the one before it in the cache.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

from smoothagent.errors import BackendRefusedError, RateLimitedError
from smoothagent.prompt import Prompt
from smoothagent.serving import chat
from smoothagent.serving.backend import Generated, Usage, Wire
from smoothagent.serving.connection import Connection
from smoothagent.serving.costs import Kind
from smoothagent.serving.dialects.base import Ask, Dialect, Options, rows
from smoothagent.serving.dialects.streamed import Answer, Events, answer_streamed, usage
from smoothagent.serving.piece import Grant
from smoothagent.serving.unpaced import Pacing

CHARS_PER_TOKEN = 3.5
"""Until the server's own counts say better."""
TELLING = 8
"""Tokens that two pieces must differ by to tell how many characters a token has."""
MISSES_TO_STOP = 3
"""Pieces in a row that found nothing of the piece before them in the cache, until warming is switched off."""
STUB = {"role": "user", "content": "."}
"""Stands after system text alone, which many templates refuse: what is before it is cached all the same."""


@dataclass(slots=True)
class Warm:
    """What a conversation's last prefill brought into the cache.

    Attributes:
        texts: its messages, flat.
        tokens: tokens of its whole prompt, tools included.
    """

    texts: list[str] = field(default_factory=list[str])
    tokens: int = 0


class Textual(Dialect):
    """Dialect of servers that take text and find prefixes by themselves."""

    continues: ClassVar[bool] = False
    """The server continues a last assistant message, so that an answer can be made in pieces."""

    def __init__(self, link: Connection, options: Options, served: Sequence[str]) -> None:
        super().__init__(link, options, served)
        self.least = 1
        """Fewest tokens of a piece: a block of the prefix cache."""
        self.limit_field = "max_tokens"
        """What a reply's limit is called: reasoning models of OpenAI's want ``max_completion_tokens``."""
        self.greedy = {"temperature": 0}
        """Makes an answer the likeliest one; empty where the model takes no temperature."""
        self.hits = True
        self.reports_cached: bool | None = None
        self._misses = 0
        self._chars_per_token = CHARS_PER_TOKEN
        self._warm: dict[str, Warm] = {}

    # -- what a server adds ----------------------------------------------------------------

    def marks(self, ask: Ask) -> dict[str, Any]:
        """Fields that mark a request as best-effort."""
        del ask
        return {}

    def open_ended(self, *, cut: bool) -> dict[str, Any]:
        """Fields that keep the template from closing a prefix, ``cut`` inside a message or not."""
        del cut
        return {}

    def suppress_tools(self) -> dict[str, Any]:
        """Fields that keep an answer from calling tools without changing the prompt."""
        return {"tool_choice": "none"}

    def learn(self, error: BackendRefusedError) -> bool:
        """Whether the request is to be sent again, without what the server has just refused."""
        words = error.words
        if "max_completion_tokens" in words and self.limit_field == "max_tokens":
            self.limit_field = "max_completion_tokens"
            return True
        if self.greedy and "temperature" in words:
            self.greedy = {}
            return True
        return False

    # -- prefill ---------------------------------------------------------------------------

    async def prefill(self, ask: Ask, pacer: Pacing, *, partial: bool) -> Usage:
        """Bring the messages into the prefix cache, piece by piece where pieces are paced."""
        texts = [_flat(m) for m in ask.messages]
        total = sum(map(len, texts))
        warm = self._warm.get(ask.conversation, Warm())
        done = common_chars(warm.texts, texts)
        # What follows a change is cold, and so is its part of what was counted for the whole.
        before = round(warm.tokens * done / max(1, sum(map(len, warm.texts))))
        first = True
        seen = Usage(cached_tokens=0)
        computed = 0
        while done < total and self.hits:
            async with pacer.piece(ask.conversation, Kind.PREFILL, least=self.least) as grant:
                upto = min(total, done + max(1, int(grant.tokens * self._chars_per_token)))
                messages, cut = cut_at(ask.messages, texts, upto)
                seen = await self._prefill_once(ask, messages, cut=cut or (partial and upto == total))
                new = max(0, seen.prompt_tokens - (before if seen.cached_tokens is None else seen.cached_tokens))
                if seen.cached_tokens is None:
                    # Unless the server says otherwise, what this piece did not add was there.
                    new = min(new, round((upto - done) / self._chars_per_token))
                grant.report(new)
                computed += new
                self._watch_hits(seen, before)
                if not first:  # the first one also counts the tools, which are no text
                    self._learn_size(upto - done, seen.prompt_tokens - before)
                first, before, done = False, seen.prompt_tokens, upto
                self._warm[ask.conversation] = Warm(_first_chars(texts, upto), before)
        self.stats.prefills += 1
        return Usage(seen.prompt_tokens, 0, max(0, seen.prompt_tokens - computed))

    def _learn_size(self, chars: int, tokens: int) -> None:
        """What a piece added tells how long a token is here."""
        if tokens >= TELLING and chars > 0:
            self._chars_per_token = min(8.0, max(1.0, chars / tokens))

    async def _prefill_once(self, ask: Ask, messages: Sequence[Wire], *, cut: bool) -> Usage:
        stub = [] if any(m.get("role") == "user" for m in messages) else [STUB]
        while True:
            body = {
                **chat.fields(ask.prompt, sampling=False),
                "model": self.model(ask.prompt),
                "messages": [*messages, *stub],
                # Not 0, which some take for no limit: one token comes out of the prefill itself.
                self.limit_field: 1,
                **self.greedy,
                **self.open_ended(cut=cut and not stub),
                **self.marks(ask),
            }
            try:
                answer = await self.send(ask, body)
            except RateLimitedError:
                raise
            except BackendRefusedError as error:
                if not self.learn(error):
                    raise
                continue
            return self._with_misses(usage(answer.get("usage")))

    async def send(self, ask: Ask, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask for a chat completion; a cancelled one is to be stopped on the server."""
        del ask
        return await self.link.post("/chat/completions", body)

    @asynccontextmanager
    async def streaming(self, ask: Ask, body: Mapping[str, Any], *, background: bool) -> AsyncGenerator[Events]:
        """The same, streamed."""
        del ask
        async with self.link.stream("/chat/completions", body, background=background) as events:
            yield events

    def _with_misses(self, seen: Usage) -> Usage:
        """Servers that report cached tokens leave the field out where they found none."""
        if seen.cached_tokens is not None:
            self.reports_cached = True
        return replace(seen, cached_tokens=0) if self.reports_cached and seen.cached_tokens is None else seen

    def _watch_hits(self, seen: Usage, before: int) -> None:
        """Notice a server that finds nothing again, or does not say what it found."""
        if before < 2 * self.least + 64:
            return
        if seen.cached_tokens is None:
            self.reports_cached = False
            return
        self._misses = self._misses + 1 if seen.cached_tokens == 0 else 0
        self.stats.lost += seen.cached_tokens < before // 2
        if self._misses >= MISSES_TO_STOP:
            self.hits = False
            self.notes["hits"] = (
                f"{self.server}: {MISSES_TO_STOP} prefixes in a row were not found in the server's prefix cache "
                f"(cached_tokens 0 of {before}): nothing is warmed any more. Check that prefix caching is on and large "
                "enough."
            )

    # -- answers ---------------------------------------------------------------------------

    async def generate(
        self, ask: Ask, pacer: Pacing, *, max_tokens: int, lookahead: bool, extends_main: bool
    ) -> Generated:
        """One streamed completion, or continuations of a few tokens where lookahead work is paced."""
        self.stats.answers += 1
        if lookahead and self.paced and self.continues:
            if not extends_main:
                await self.prefill(ask, pacer, partial=False)
            answer = await self._in_pieces(ask, pacer, max_tokens)
            if answer is not None:
                return answer

        def opened() -> AbstractAsyncContextManager[Events]:
            return self.streaming(ask, self._question(ask, max_tokens, lookahead=lookahead), background=lookahead)

        while True:
            try:
                return await answer_streamed(opened, pacer, background=lookahead, conversation=ask.conversation)
            except RateLimitedError:
                raise
            except BackendRefusedError as error:
                if not self.learn(error):
                    raise

    def _question(self, ask: Ask, max_tokens: int, *, lookahead: bool) -> dict[str, Any]:
        fields = chat.fields(ask.prompt, sampling=True)
        for name in ("stop", "ignore_eos", "response_format", "json_schema", "logit_bias"):
            fields.pop(name, None)
        return {
            **self.greedy,
            **fields,
            "model": self.model(ask.prompt),
            "messages": list(ask.messages),
            self.limit_field: max_tokens,
            "stream_options": {"include_usage": True},
            **(self.suppress_tools() if ask.prompt.tools else {}),
            **(self.marks(ask) if lookahead else {}),
        }

    async def _in_pieces(self, ask: Ask, pacer: Pacing, max_tokens: int) -> Generated | None:
        """The answer as continuations; None where the model reasons first, which cannot be continued."""
        answer = Answer()
        written = computed = first = 0
        # The conversation itself is the main stream's, and cached; without the server's word, its question was cold.
        before = 0
        least = 1
        while written < max_tokens and not answer.tool_calls:
            events = answer.begin()
            async with pacer.piece(ask.conversation, Kind.DECODE, least=least) as grant:
                asked = min(max_tokens - written, grant.tokens)
                if not await self._continue(ask, answer, asked, grant):
                    continue
                if answer.events > events and not answer.text and not answer.tool_calls:
                    return None
                if answer.usage is not None:
                    prompt = answer.usage.prompt_tokens
                    before = before or self._uncounted(ask, prompt)
                    cached = answer.usage.cached_tokens
                    computed += max(0, prompt - (before if cached is None else cached))
                    first, before = first or prompt, prompt
            new = answer.events - events
            if new and answer.usage is not None:
                # Some servers put several tokens into an event.
                new = max(new, answer.usage.completion_tokens)
            written += new
            if grant.preempted:
                continue
            if answer.finish_reason != "length" or (not new and asked >= max_tokens - written):
                break
            # A piece that ended inside a character brought nothing: the next one must be longer.
            least = 1 if new else 2 * asked
        answer.usage = Usage(max(first, computed), written, max(0, first - computed))
        answer.finish_reason = answer.finish_reason or ("length" if written >= max_tokens else None)
        return answer.generated()

    def _uncounted(self, ask: Ask, prompt: int) -> int:
        """Tokens of a question's prompt that were there before the question."""
        return max(0, prompt - round(len(_flat(ask.messages[-1])) / self._chars_per_token))

    async def _continue(self, ask: Ask, answer: Answer, tokens: int, grant: Grant) -> bool:
        """Add up to ``tokens`` to the answer; False where the server refused and it is to be asked otherwise."""
        body = self._question(ask, tokens, lookahead=True)
        if answer.text:
            body["messages"] = [*ask.messages, {"role": "assistant", "content": answer.text}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        try:
            async with self.streaming(ask, body, background=True) as events:
                async for event in events:
                    grant.report(answer.take(event))
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            if not self.learn(error):
                raise
            return False
        return True

    def release(self, conversation: str) -> None:
        """Forget what was warmed."""
        self._warm.pop(conversation, None)


def _flat(message: Wire) -> str:
    """A message as characters to be counted and compared; its text, if it can be cut, comes last."""
    text = chat.text_of(message)
    rest = {k: v for k, v in message.items() if text is None or k != "content"}
    return json.dumps(rest, sort_keys=True, default=repr) + (text or "")


def cut_at(messages: Sequence[Wire], texts: Sequence[str], chars: int) -> tuple[list[Wire], bool]:
    """The first ``chars`` characters of a conversation as messages, and whether the last one is cut.

    What is not plain text cannot be cut and is taken whole.
    """
    out: list[Wire] = []
    for message, flat in zip(messages, texts, strict=True):
        text = chat.text_of(message)
        if len(flat) > chars and text is not None and not rows(message.get("tool_calls")):
            # A message of which only the frame would fit is begun with one character.
            keep = max(1, chars - (len(flat) - len(text)))
            return [*out, chat.with_text(message, text[:keep])], keep < len(text)
        out.append(message)
        chars -= len(flat)
        if chars <= 0:
            break
    return out, False


def common_chars(warm: Sequence[str], texts: Sequence[str]) -> int:
    """Characters at the start of ``texts`` that ``warm`` begins with, too."""
    done = 0
    for old, new in zip(warm, texts, strict=False):
        if old != new:
            n = min(len(old), len(new))
            same = n if old[:n] == new[:n] else next(i for i in range(n) if old[i] != new[i])
            return done + same
        done += len(new)
    return done


def _first_chars(texts: Sequence[str], chars: int) -> list[str]:
    out: list[str] = []
    for text in texts:
        if chars <= 0:
            break
        out.append(text[:chars])
        chars -= len(text)
    return out


def priority_below(default: int, *, low_first: bool) -> int:
    """The priority of best-effort requests where others have ``default``: the one place that knows the polarity.

    vLLM serves lower numbers first, SGLang higher ones unless ``--schedule-low-priority-values-first``.
    """
    return default + 1 if low_first else default - 1


def named_priority(prompt: Prompt, default: int) -> int:
    """The priority of the agent's own requests: what they name, or the server's default."""
    extra = prompt.params.get("extra_body")
    named = cast("Mapping[str, Any]", extra).get("priority") if isinstance(extra, Mapping) else None
    named = prompt.params.get("priority") if named is None else named
    return named if isinstance(named, int) else default


def flags(info: Mapping[str, Any], *names: str) -> list[bool | None]:
    """Boolean settings out of a server's self-description; None where it does not name one."""
    return [value if isinstance(value := info.get(name), bool) else None for name in names]
