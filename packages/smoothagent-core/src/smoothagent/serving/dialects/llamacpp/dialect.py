"""llama.cpp's HTTP server: exact token ids, one slot a stream, KV copied between slots.

What was found on the server (build of 2026-10, xllamacpp):

- A request that is not streamed runs to its end though its client has gone; a streamed one stops when
  a write fails. So everything is streamed, with ``return_progress``, which writes after every batch
  of a prefill, too. Its first event tells what is cached before anything is computed.
- While a character is incomplete, its tokens are missing in the stream; ``tokens_predicted`` counts them.
- ``id_slot`` out of range is taken modulo the number of slots, without an error.
- A failed ``restore`` empties the slot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from smoothagent.errors import (
    BackendProtocolError,
    BackendRefusedError,
    BackendUnreachableError,
    ConfigurationError,
    RateLimitedError,
)
from smoothagent.serving import chat
from smoothagent.serving.backend import Caps, Generated, Stream, Usage, Wire
from smoothagent.serving.connection import Connection, too_long
from smoothagent.serving.costs import Kind
from smoothagent.serving.dialects.base import Ask, Dialect, Options, mapping, rows, whole
from smoothagent.serving.dialects.streamed import answer_streamed
from smoothagent.serving.others import Load
from smoothagent.serving.piece import Grant
from smoothagent.serving.slots import SLOTS_PER_CONVERSATION, SlotTable
from smoothagent.serving.unpaced import Pacing

MARK = "\ue000"
"""A private-use character: no template writes it, so the text before it is what precedes a message's text."""
SLACK = 16
"""Tokens a cache may fall short of what is expected (a reply tokenised anew) before the prefix counts as lost."""
KEPT_TEXTS = 8
"""Rendered prompts whose token ids are remembered."""


class _LostError(Exception):
    """The slot no longer holds what was warmed; raised before much is computed again."""

    def __init__(self, cached: int) -> None:
        super().__init__(cached)
        self.cached = cached


@dataclass(slots=True)
class _Pass:
    """What one request to ``/completion`` did."""

    cached: int = 0
    computed: int = 0
    tokens: int = 0
    stop: str | None = None


class LlamaCpp(Dialect):
    """Dialect of ``llama-server`` and xllamacpp."""

    server = "llama.cpp"

    def __init__(self, link: Connection, options: Options, served: Sequence[str]) -> None:
        super().__init__(link, options, served)
        # Kept-alive connections are dropped about once in 60 requests (measured).
        link.close_each = True
        self.table = SlotTable(())
        self._window: int | None = None
        self._can_copy = False
        self._sees_slots = False
        self._warm: dict[int, list[int]] = {}
        self._seen: dict[int, int | None] = {}
        self._guessed: set[int] = set()
        self._texts: dict[str, list[int]] = {}

    async def probe(self) -> None:
        """Read ``/props``, ``/slots`` and whether slots can be saved."""
        props = mapping(await self.link.get("~/props"))
        total = whole(props.get("total_slots")) or 1
        self._window = whole(mapping(props.get("default_generation_settings")).get("n_ctx"))
        allowed = range(total) if self.options.slots is None else self.options.slots
        if any(not 0 <= s < total for s in allowed):
            raise ConfigurationError(
                f"slots={list(allowed)} but the llama.cpp server at {self.link.root} has slots 0 to {total - 1}: "
                f"name existing slots or start it with --parallel {max(allowed) + 1}"
            )
        self.table = SlotTable(allowed)
        await self._probe_slots()
        if len(set(allowed)) < SLOTS_PER_CONVERSATION:
            self.notes["parallel"] = (
                f"llama.cpp: {len(set(allowed))} slots for this process, a conversation takes three (main, summary, "
                f"lookahead): nothing is warmed. Start the server with --parallel 3 or more, a multiple of three."
            )

    async def _probe_slots(self) -> None:
        try:
            self._look_at(await self.link.get("~/slots"))
            self._sees_slots = True
        except (BackendRefusedError, BackendProtocolError):
            self.notes["slots"] = (
                "llama.cpp: the slots endpoint is off, so other clients' requests cannot be seen and lookahead work "
                "may delay them. Start the server with --slots."
            )
        try:
            # Not a file name: refused as such where saving is possible, and nothing is written.
            await self.link.post("~/slots/0?action=save", {"filename": "../"})
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            self._can_copy = "filename" in str(error).lower()
        if not self._can_copy:
            self.notes["slot_save_path"] = (
                "llama.cpp: slots cannot be saved, so a summary is written on the main slot and in tool time only; "
                "agents with fast tools may never get one. Start the server with --slot-save-path DIR."
            )

    def caps(self) -> Caps:
        """What is known now."""
        return Caps(
            server=self.server,
            prefill=self.options.warm is not False and "parallel" not in self.notes,
            tokenize=True,
            cached_tokens=True,
            window=self._window,
            notes=tuple(self.notes.values()),
        )

    async def load(self, own: int) -> Load | None:
        """Slots at work that no conversation of this process leases."""
        del own
        if not self._sees_slots:
            return None
        slots = self._look_at(await self.link.get("~/slots"))
        ours = self.table.leased()
        foreign = [s for s in slots if s.get("is_processing") and s.get("id") not in ours]
        decoding = sum(1 for s in foreign if _decoded(s) > 0)
        return Load(waiting=len(foreign) - decoding, decoding=decoding)

    def _look_at(self, answer: object) -> list[Mapping[str, Any]]:
        if not isinstance(answer, list):
            raise BackendProtocolError(f"GET {self.link.root}/slots answered no list")
        slots = rows(cast("list[object]", answer))
        self._seen = {s["id"]: whole(s.get("n_prompt_tokens")) for s in slots if isinstance(s.get("id"), int)}
        return slots

    # -- main requests ---------------------------------------------------------------------

    def extras(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """The stream's slot; the server drops kept-alive connections, so each is closed."""
        headers = {"Connection": "close"}
        lease = self.table.lease(conversation)
        if lease is None:
            return {"extra_headers": headers}
        return {"extra_headers": headers, "extra_body": {"id_slot": lease.of(stream), "cache_prompt": True}}

    def committed(self, conversation: str) -> None:
        """The two slots swap. What the new lookahead slot holds is main's: unknown here."""
        self.table.swap(conversation)
        lease = self.table.find(conversation)
        if lease is not None:
            self._warm.pop(lease.lookahead, None)

    def release(self, conversation: str) -> None:
        """The slots are free again."""
        lease = self.table.find(conversation)
        if lease is not None:
            for slot in (lease.main, lease.summary, lease.lookahead):
                self._warm.pop(slot, None)
        self.table.release(conversation)

    # -- tokens ----------------------------------------------------------------------------

    async def count(self, ask: Ask) -> int:
        """Tokens of the request, generation prompt included."""
        return len(await self._ids(await self._render(ask, ask.messages, reply=True)))

    async def _render(self, ask: Ask, messages: Sequence[Wire], *, reply: bool) -> str:
        body = {
            **chat.fields(ask.prompt, sampling=False),
            "messages": list(messages),
            "add_generation_prompt": reply,
        }
        text = (await self.link.post("~/apply-template", body)).get("prompt")
        if not isinstance(text, str):
            raise BackendProtocolError(f"POST {self.link.root}/apply-template answered without a prompt")
        return text

    async def _prefix(self, ask: Ask, *, partial: bool) -> list[int]:
        """Token ids that every request beginning with the messages begins with, as far as one can know."""
        messages = list(ask.messages)
        last = messages[-1]
        if partial:
            text = chat.text_of(last) or ""
            longer = await self._render(ask, [*messages[:-1], chat.with_text(last, text + MARK)], reply=False)
            # The text may go on in any way: its last token is held back.
            return (await self._ids(longer.partition(MARK)[0]))[:-1]
        if last.get("role") == "assistant" or not any(m.get("role") == "user" for m in messages):
            # Alone, a last assistant message is rendered as one to be continued (or refused, with calls), and
            # some templates refuse a prompt without a user: render with the likely next message, cut before its text.
            longer = await self._render(ask, [*messages, _successor(last)], reply=False)
            if MARK in longer:
                return await self._ids(longer.partition(MARK)[0])
        return await self._ids(await self._render(ask, messages, reply=False))

    async def _ids(self, text: str) -> list[int]:
        known = self._texts.pop(text, None)
        if known is None:
            known = await self._tokenize(text, special=True)
        self._texts[text] = known
        if len(self._texts) > KEPT_TEXTS:
            del self._texts[next(iter(self._texts))]
        return known

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        body = {"content": text, "add_special": special, "parse_special": special}
        ids = (await self.link.post("~/tokenize", body)).get("tokens")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in cast("list[object]", ids)):
            raise BackendProtocolError(f"POST {self.link.root}/tokenize answered without token ids")
        return cast("list[int]", ids)

    # -- prefill ---------------------------------------------------------------------------

    async def prefill(self, ask: Ask, pacer: Pacing, *, partial: bool) -> Usage:
        """Bring the prefix into the lookahead slot, piece by piece."""
        lease = self.table.lease(ask.conversation)
        if lease is None or not ask.messages:
            return Usage()
        messages = _before_media(ask.messages)
        if not messages:
            return Usage()
        partial = partial and len(messages) == len(ask.messages)
        ids = await self._prefix(Ask(ask.conversation, messages, ask.prompt), partial=partial)
        self._check_window(ids)
        computed = await self._feed(ask.conversation, lease.lookahead, ids, pacer)
        self.stats.prefills += 1
        return Usage(prompt_tokens=len(ids), cached_tokens=max(0, len(ids) - computed))

    async def _feed(self, conversation: str, slot: int, ids: list[int], pacer: Pacing, *, at_rest: bool = False) -> int:
        """Evaluate ``ids`` on ``slot``; returns how many tokens were computed."""
        computed = 0
        while (have := self._have(slot, ids)) < len(ids):
            async with pacer.piece(conversation, Kind.PREFILL, at_rest=at_rest) as grant:
                # The look at the slots that admitted the piece may have shown that the slot lost its prefix.
                have = self._have(slot, ids)
                piece = ids[: have + grant.tokens]
                # The server drops what does not match as soon as it begins, whether or not the piece ends well.
                self._warm[slot] = ids[:have]
                try:
                    done = await self._evaluate(slot, piece, expect=have, at_most=grant.tokens, grant=grant)
                except _LostError as lost:
                    self._note_loss(slot, ids[: lost.cached])
                    continue
                self._guessed.discard(slot)
                self._warm[slot] = piece
                self._seen[slot] = len(piece)
                computed += done.computed
        return computed

    def _have(self, slot: int, ids: Sequence[int]) -> int:
        warm = self._warm.get(slot, [])
        seen = self._seen.get(slot)
        if warm and seen is not None and seen < len(warm) - SLACK:
            self._note_loss(slot, [])
            warm = []
        return common(warm, ids)

    def _note_loss(self, slot: int, kept: list[int]) -> None:
        self._warm[slot] = kept
        self._seen.pop(slot, None)
        if slot in self._guessed:
            self._guessed.discard(slot)
            return
        self.stats.lost += 1
        self.notes["lost"] = (
            f"llama.cpp: slot {slot} no longer held what was warmed there ({self.stats.lost} times so far). Start the "
            "server with --no-kv-unified and enough --ctx-size, and let no other client use this process's slots."
        )

    async def _evaluate(
        self, slot: int, ids: list[int], *, expect: int, at_most: int, grant: Grant, answer: _Decoded | None = None
    ) -> _Pass:
        """One streamed ``/completion``: evaluates ``ids`` and, with ``answer``, decodes on from there."""
        body: dict[str, Any] = {"prompt": ids, "id_slot": slot, "cache_prompt": True, "return_progress": True}
        body |= {"n_predict": 0} if answer is None else answer.request(at_most)
        done, answered = _Pass(), False
        async with self.link.stream("~/completion", body) as events:
            async for event in events:
                answered = True
                progress = event.get("prompt_progress")
                if progress is not None:
                    cached = whole(mapping(progress).get("cache")) or 0
                    if expect - cached > at_most + SLACK:
                        raise _LostError(cached)
                elif event.get("stop"):
                    _finish(done, event)
                elif answer is not None:
                    grant.report(answer.take(event))
        if not answered:
            raise BackendProtocolError(f"POST {self.link.root}/completion answered no events; is this llama.cpp?")
        if done.stop is None:
            raise BackendUnreachableError(f"the stream of POST {self.link.root}/completion ended early")
        if answer is None:
            grant.report(done.computed)
        return done

    def _check_window(self, ids: Sequence[int]) -> None:
        if self._window is not None and len(ids) >= self._window:
            raise too_long(len(ids), self._window)

    # -- answers ---------------------------------------------------------------------------

    async def generate(
        self, ask: Ask, pacer: Pacing, *, max_tokens: int, lookahead: bool, extends_main: bool
    ) -> Generated:
        """A summary in pieces on the summary slot, or one ordinary request where the caller waits."""
        lease = self.table.lease(ask.conversation)
        self.stats.answers += 1
        if not lookahead or lease is None or len(_before_media(ask.messages)) < len(ask.messages):
            return await self._ask_at_once(ask, pacer, max_tokens, lookahead=lookahead, extends_main=extends_main)
        text = await self._render(ask, ask.messages, reply=True)
        ids = await self._ids(text)
        self._check_window(ids)
        slot, at_rest = await self._place(ask.conversation, ids, pacer, extends_main=extends_main)
        computed = await self._feed(ask.conversation, slot, ids[:-1], pacer, at_rest=at_rest)
        answer = _Decoded(max_tokens, chat.fields(ask.prompt, sampling=True))
        stop = await self._decode(ask.conversation, slot, ids, answer, pacer, at_rest=at_rest)
        return self._generated(answer, stop, ids, computed, opened=text.rstrip().endswith("<think>"))

    def _generated(self, answer: _Decoded, stop: str, ids: Sequence[int], computed: int, *, opened: bool) -> Generated:
        said = chat.without_thoughts(answer.text, opened=opened)
        computed += answer.computed
        return Generated(
            text=said or "",
            finish_reason="length" if stop == "limit" or said is None else "stop",
            tool_calls=chat.calls_tools(said or ""),
            usage=Usage(
                prompt_tokens=max(len(ids), computed),
                completion_tokens=len(answer.tokens),
                cached_tokens=max(0, len(ids) - computed),
            ),
        )

    async def _decode(
        self, conversation: str, slot: int, ids: list[int], answer: _Decoded, pacer: Pacing, *, at_rest: bool
    ) -> str:
        """Decode piece by piece, each a continuation; returns why it ended."""
        lost_prompt: list[int] = []
        while answer.left > 0:
            if lost_prompt:
                answer.computed += await self._feed(conversation, slot, lost_prompt, pacer, at_rest=at_rest)
                lost_prompt = []
            before = len(answer.tokens)
            async with pacer.piece(conversation, Kind.DECODE, least=answer.least, at_rest=at_rest) as grant:
                prompt = [*ids, *answer.tokens]
                limit = min(answer.left, grant.tokens)
                try:
                    done = await self._evaluate(
                        slot, prompt, expect=len(prompt), at_most=limit, grant=grant, answer=answer
                    )
                except _LostError as lost:
                    self._note_loss(slot, prompt[: lost.cached])
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
                answer.tokens = await self._tokenize(answer.text, special=False)
                answer.dirty = False
            self._warm[slot] = [*ids, *answer.tokens]
            self._seen.pop(slot, None)
        return "limit"

    async def _place(self, conversation: str, ids: list[int], pacer: Pacing, *, extends_main: bool) -> tuple[int, bool]:
        """The slot a summary is written on, holding main's KV where that is of use; and whether that is main's own."""
        lease = self.table.lease(conversation)
        assert lease is not None
        if not extends_main:
            return lease.summary, False
        if not self._can_copy:
            held = self._seen.get(lease.main)
            self._warm[lease.main] = ids[: held or 0]
            return lease.main, True
        grant: Grant | None = None
        while grant is None or grant.preempted:
            async with pacer.piece(conversation, Kind.COPY, at_rest=True) as grant:
                held = await self._copy(lease.main, lease.summary)
                # Where the summary request leaves main's prompt is not known: the server's first answer tells.
                self._warm[lease.summary] = ids[:held]
                self._guessed.add(lease.summary)
                self._seen.pop(lease.summary, None)
        return lease.summary, False

    async def _copy(self, source: int, target: int) -> int:
        """Copy KV between slots; returns the tokens now in ``target``, 0 where nothing could be copied."""
        name = f"smoothagent-{re.sub('[^A-Za-z0-9]+', '-', self.link.root.partition('//')[2])}-slot{source}.bin"
        try:
            await self.link.post(f"~/slots/{source}?action=save", {"filename": name})
            restored = await self.link.post(f"~/slots/{target}?action=restore", {"filename": name})
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            self.notes["copy"] = f"llama.cpp: a slot could not be copied ({error}); the summary is prefilled anew."
            return 0
        return whole(restored.get("n_restored")) or 0

    async def _ask_at_once(
        self, ask: Ask, pacer: Pacing, max_tokens: int, *, lookahead: bool, extends_main: bool
    ) -> Generated:
        body: dict[str, Any] = {
            "temperature": 0,
            **_without(chat.fields(ask.prompt, sampling=True), NOT_FOR_SUMMARIES),
            "model": self.model(ask.prompt) if self.served or ask.prompt.model else "default",
            "messages": list(ask.messages),
            "max_tokens": max_tokens,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        lease = self.table.lease(ask.conversation)
        if lease is not None:
            body |= {"id_slot": lease.main if extends_main else lease.summary, "cache_prompt": True}
        return await answer_streamed(self.link, body, pacer, background=lookahead, conversation=ask.conversation)


NOT_FOR_SUMMARIES = frozenset({"stop", "ignore_eos", "response_format", "json_schema", "grammar", "logit_bias"})
"""Fields of the agent's own answers that would spoil a summary."""
FOR_COMPLETION = chat.SAMPLING - NOT_FOR_SUMMARIES


class _Decoded:
    """An answer as it grows over pieces."""

    def __init__(self, max_tokens: int, fields: Mapping[str, Any]) -> None:
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.text = ""
        self.dirty = False
        self.least = 1
        self.computed = 0
        self.counts_on = False
        self._sampling = {"temperature": 0, **{k: v for k, v in fields.items() if k in FOR_COMPLETION}}
        self._counted = 0

    @property
    def left(self) -> int:
        return self.max_tokens - len(self.tokens)

    def request(self, tokens: int) -> dict[str, Any]:
        """Fields of the next piece."""
        self._counted = 0
        return {**self._sampling, "n_predict": tokens, "return_tokens": True}

    def take(self, event: Mapping[str, Any]) -> int:
        """Add one event's text and tokens; returns how many tokens were decoded for it."""
        tokens = cast("list[int]", event.get("tokens") or [])
        counted = whole(event.get("tokens_predicted")) or self._counted + len(tokens)
        new, self._counted = counted - self._counted, counted
        self.text += str(event.get("content") or "")
        self.tokens = [*self.tokens, *tokens]
        # A character of several tokens brings only its last one: the text is tokenised anew.
        self.dirty = self.dirty or new != len(tokens)
        return max(new, 0)


def _finish(done: _Pass, event: Mapping[str, Any]) -> None:
    timings = mapping(event.get("timings"))
    done.cached = whole(timings.get("cache_n")) or 0
    done.computed = whole(timings.get("prompt_n")) or 0
    done.tokens = whole(event.get("tokens_predicted")) or 0
    done.stop = str(event.get("stop_type") or "limit")


def _decoded(slot: Mapping[str, Any]) -> int:
    """Tokens a slot's request has decoded; older servers send ``next_token`` as a mapping, newer as a list."""
    state = slot.get("next_token")
    first = rows(cast("list[object]", state))[:1] if isinstance(state, list) else [mapping(state)]
    return whole(first[0].get("n_decoded")) or 0 if first else 0


def _successor(message: Wire) -> dict[str, Any]:
    calls = rows(message.get("tool_calls"))
    if message.get("role") == "assistant" and calls:
        return {"role": "tool", "tool_call_id": str(calls[0].get("id")), "content": MARK}
    return {"role": "user", "content": MARK}


def _before_media(messages: Sequence[Wire]) -> list[Wire]:
    """The messages before the first with a part that is not text: raw ids cannot carry it."""
    out: list[Wire] = []
    for message in messages:
        if any(part.get("type") != "text" for part in rows(message.get("content"))):
            break
        out.append(message)
    return out


def _without(body: Mapping[str, Any], drop: frozenset[str]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in drop}


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
