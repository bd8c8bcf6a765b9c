"""The dialect of ``llama-server`` and xllamacpp: slots, routing, warming and summaries."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from smoothagent.errors import BackendError, BackendProtocolError, BackendRefusedError, ConfigurationError
from smoothagent.serving import chat
from smoothagent.serving.backend import Caps, Generated, Stream, Usage
from smoothagent.serving.connection import Connection, too_long
from smoothagent.serving.costs import Kind
from smoothagent.serving.dialects.base import Ask, Dialect, Options, mapping, rows, whole
from smoothagent.serving.dialects.llamacpp.answer import NOT_FOR_SUMMARIES, Answer
from smoothagent.serving.dialects.llamacpp.copies import Copies, Saving
from smoothagent.serving.dialects.llamacpp.holdings import Holdings
from smoothagent.serving.dialects.llamacpp.pieces import SlotWork
from smoothagent.serving.dialects.llamacpp.rendering import before_media
from smoothagent.serving.dialects.streamed import answer_streamed
from smoothagent.serving.others import Load
from smoothagent.serving.piece import Grant
from smoothagent.serving.slots import SLOTS_PER_CONVERSATION, Lease, SlotTable
from smoothagent.serving.unpaced import Pacing

PROOF = 16
"""Tokens that are evaluated to find out whether KV can be handed over: an empty slot would prove nothing."""
WORTH_COPYING = 64
"""Tokens that a copy of main's KV must save: it takes about as long as evaluating a few."""


class LlamaCpp(Dialect):
    """Dialect of ``llama-server`` and xllamacpp."""

    server = "llama.cpp"

    def __init__(self, link: Connection, options: Options, served: Sequence[str]) -> None:
        super().__init__(link, options, served)
        self.table = SlotTable(())
        self._window: int | None = None
        self._sees_slots = False
        self._copies = Copies(self.notes)
        self._proved = False
        self._warmed_on: dict[str, SlotWork] = {}
        self._agents = SlotWork(link, Holdings(self._note_loss))
        self._lookahead = self._agents
        if options.lookahead is not None:
            if options.lookahead.root == link.root:
                raise ConfigurationError(
                    f"lookahead_url={options.lookahead.base_url!r} is the agent's own server: leave it out"
                )
            self._lookahead = SlotWork(options.lookahead, Holdings(self._note_loss), elsewhere=True)

    def _work(self, conversation: str, pacer: Pacing) -> SlotWork:
        """Where a conversation's lookahead work is done, until its commit. A slot has the same number on both servers.

        In long tool times the agent's server has all its threads for it; else the lookahead server, which goes on
        beside decoding.
        """
        chosen = self._warmed_on.get(conversation)
        if not self._copies.linked:
            chosen = self._agents
        elif chosen is None:
            chosen = self._agents if pacer.has_long_pauses() else self._lookahead
        self._warmed_on[conversation] = chosen
        return chosen

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
        if self._lookahead is not self._agents:
            await self._compare(props)
        await self._copies.probe(self._agents, self._lookahead)

    async def _compare(self, props: Mapping[str, Any]) -> None:
        """Whether the lookahead server is the agent's server once more, as far as the two tell.

        Raises:
            ConfigurationError: it has another model, template, window or number of slots.
        """
        link = self._lookahead.link
        try:
            theirs = mapping(await link.get("~/props"))
            models = [await side.get("/models") for side in (self.link, link)]
        except BackendError as error:
            self._lookahead = self._agents
            self.notes["lookahead"] = (
                f"llama.cpp: the lookahead server at {link.base_url} cannot be asked ({error}), so lookahead work runs "
                "on the agent's own server."
            )
            return
        ours, other = _settings(props, models[0]), _settings(theirs, models[1])
        for name, value in ours.items():
            if other[name] != value:
                raise ConfigurationError(
                    f"lookahead_url={link.base_url!r}: its {name} is {str(other[name])[:80]!r} and that of the agent's "
                    f"server {self.link.base_url} is {str(value)[:80]!r}; start both with the same model and settings"
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

    def caps(self) -> Caps:
        """What is known now."""
        return Caps(
            server=self.server,
            prefill=self.options.warm is not False and "parallel" not in self.notes,
            tokenize=True,
            cached_tokens=True,
            # Beside the agent's own decoding it would be paid for with that.
            follows_answers=self._copies.linked,
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
        self._agents.holdings.see(slots)
        return slots

    # -- main requests ---------------------------------------------------------------------

    def extras(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """The stream's slot; the server drops kept-alive connections, so each is closed."""
        headers = {"Connection": "close"}
        lease = None if stream is Stream.ASIDE else self.table.lease(conversation)
        # Left to itself the server takes the idle slot with the likest prompt, which may be somebody's.
        slot = self.table.spare(conversation) if lease is None else lease.of(stream)
        if slot is None:
            return {"extra_headers": headers}
        return {"extra_headers": headers, "extra_body": {"id_slot": slot, "cache_prompt": True}}

    def committed(self, conversation: str) -> bool:
        """The two slots swap. What the new lookahead slot holds is main's: unknown here."""
        lease = self.table.find(conversation)
        warmed_on = self._warmed_on.pop(conversation, self._agents)
        if lease is None or (warmed_on is self._lookahead is not self._agents and not self._copies.linked):
            return False  # what was warmed cannot be brought here: main's slot has more of the new prompt than none
        self.table.swap(conversation)
        self._agents.holdings.forget(lease.lookahead)
        return warmed_on is not self._agents

    async def deliver(self, conversation: str) -> bool:
        """Copy what the lookahead server has of the new main stream to the agent's server."""
        lease = self.table.find(conversation)
        if lease is None or not self._copies.linked:
            return False
        slot = lease.main

        def wanted() -> bool:
            # It may be over, or called back, and the slot another's by now.
            return self.table.find(conversation) is lease and lease.main == slot

        return await self._copies.hand_over(self._lookahead, self._agents, slot, wanted)

    def undelivered(self, conversation: str) -> None:
        """The two slots swap back."""
        self.table.swap(conversation)

    def release(self, conversation: str) -> None:
        """The slots are free again."""
        lease = self.table.find(conversation)
        if lease is not None:
            for site in (self._agents, self._lookahead):
                site.holdings.forget(lease.main, lease.summary, lease.lookahead)
        self._warmed_on.pop(conversation, None)
        self.table.release(conversation)

    # -- tokens ----------------------------------------------------------------------------

    async def count(self, ask: Ask) -> int:
        """Tokens of the request, generation prompt included."""
        rendering = self._agents.rendering
        return len(await rendering.ids(await rendering.text(ask, ask.messages, reply=True)))

    # -- prefill ---------------------------------------------------------------------------

    async def prefill(self, ask: Ask, pacer: Pacing, *, partial: bool) -> Usage:
        """Bring the prefix into the lookahead slot, piece by piece."""
        lease = self.table.lease(ask.conversation)
        if lease is None or not ask.messages:
            return Usage()
        messages = before_media(ask.messages)
        if not messages:
            return Usage()
        partial = partial and len(messages) == len(ask.messages)
        await pacer.clear()
        work = self._work(ask.conversation, pacer)
        if partial and not work.elsewhere and messages[-1].get("role") == "assistant":
            return Usage()  # beside the agent's own decoding it would be paid for with that
        ids = await work.rendering.prefix(Ask(ask.conversation, messages, ask.prompt), partial=partial)
        self._check_window(ids)
        work = await self._proved_work(work, ask.conversation, lease, ids, pacer)
        await self._begin_from_main(work, ask.conversation, lease, ids, pacer)
        computed = await work.feed(ask.conversation, lease.lookahead, ids, pacer)
        self.stats.prefills += 1
        return Usage(prompt_tokens=len(ids), cached_tokens=max(0, len(ids) - computed))

    async def _proved_work(
        self, work: SlotWork, conversation: str, lease: Lease, ids: list[int], pacer: Pacing
    ) -> SlotWork:
        """Where the work is done, after the first few tokens have shown whether they can be handed over."""
        while work.elsewhere and self._copies.linked and not self._proved:
            await work.feed(conversation, lease.lookahead, ids[:PROOF], pacer)
            async with pacer.piece(conversation, Kind.COPY, elsewhere=True):
                await self._copies.prove(work, lease.lookahead, self._agents, lease.lookahead)
                self._proved = True
        if work.elsewhere and not self._copies.linked:
            self._warmed_on[conversation] = self._agents
            return self._agents
        return work

    async def _begin_from_main(
        self, work: SlotWork, conversation: str, lease: Lease, ids: list[int], pacer: Pacing
    ) -> None:
        """Copy main's KV where it holds more of the prefix than the lookahead slot: after a commit the two begin alike.

        Main's content is known since the commit that made its slot main: what was warmed there, which its own
        requests extend. A lookahead server still has what it delivered then.
        """
        holdings = work.holdings

        def gain() -> int:
            return holdings.have(lease.main, ids) - holdings.have(lease.lookahead, ids)

        while self._copies.usable and gain() >= WORTH_COPYING:
            async with pacer.piece(conversation, Kind.COPY, at_rest=not work.elsewhere, elsewhere=work.elsewhere):
                common = holdings.have(lease.main, ids)
                # A copy that is broken off leaves nothing that could be relied on.
                holdings.put(lease.lookahead, [])
                held = await self._copies.copy(work, lease.main, work, lease.lookahead)
                holdings.guess(lease.lookahead, ids[: min(common, held)])
                return

    def _note_loss(self, slot: int) -> None:
        self.stats.lost += 1
        self.notes["lost"] = (
            f"llama.cpp: slot {slot} no longer held what was warmed there ({self.stats.lost} times so far). Start the "
            "server with --no-kv-unified and enough --ctx-size, and let no other client use this process's slots."
        )

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
        if not lookahead:
            spare = self.table.spare(ask.conversation)
            slot = spare if lease is None else lease.main if extends_main else lease.summary
            return await self._ask_at_once(ask, pacer, max_tokens, slot)
        if lease is None:
            return await self._ask_in_one_piece(ask, pacer, max_tokens, self.table.spare(ask.conversation))
        if len(before_media(ask.messages)) < len(ask.messages):
            return await self._ask_in_one_piece(ask, pacer, max_tokens, lease.summary)
        await pacer.clear()
        work = self._work(ask.conversation, pacer)
        text = await work.rendering.text(ask, ask.messages, reply=True)
        ids = await work.rendering.ids(text)
        self._check_window(ids)
        work = await self._proved_work(work, ask.conversation, lease, ids, pacer)
        slot, at_rest = await self._place(work, ask.conversation, lease, ids, pacer, extends_main=extends_main)
        computed = await work.feed(ask.conversation, slot, ids[:-1], pacer, at_rest=at_rest)
        answer = Answer(max_tokens, chat.fields(ask.prompt, sampling=True))
        stop = await work.decode(ask.conversation, slot, ids, answer, pacer, at_rest=at_rest)
        return self._generated(answer, stop, ids, computed, opened=text.rstrip().endswith("<think>"))

    def _generated(self, answer: Answer, stop: str, ids: Sequence[int], computed: int, *, opened: bool) -> Generated:
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

    async def _place(
        self, work: SlotWork, conversation: str, lease: Lease, ids: list[int], pacer: Pacing, *, extends_main: bool
    ) -> tuple[int, bool]:
        """The slot a summary is written on, holding main's KV where that is of use; and whether that is main's own."""
        if not extends_main:
            return lease.summary, False
        if not self._copies.usable:
            work.holdings.begin(lease.main, ids[: work.holdings.seen(lease.main) or 0])
            return lease.main, True
        saving: Saving | None = None
        while saving is None:
            async with pacer.piece(conversation, Kind.COPY, at_rest=True):
                # Begun, it is ended, whoever arrives meanwhile: agents with fast tools have no more time than that.
                saving = self._copies.saving(self._agents, lease.main)
                await asyncio.wait({saving})
        grant: Grant | None = None
        while grant is None or grant.preempted:
            async with pacer.piece(conversation, Kind.COPY, elsewhere=work.elsewhere) as grant:
                held = await self._copies.restore(saving, work, lease.summary, linked=work.elsewhere)
                # Where the summary request leaves main's prompt is not known: the server's first answer tells.
                work.holdings.guess(lease.summary, ids[:held])
        return lease.summary, False

    async def _ask_in_one_piece(self, ask: Ask, pacer: Pacing, max_tokens: int, slot: int | None) -> Generated:
        """A whole answer in tool time, begun anew where the agent's request comes between.

        For images, which have no token ids, and conversations without slots of their own.
        """
        while True:
            async with pacer.piece(ask.conversation, Kind.DECODE, at_rest=True) as grant:
                answer = await answer_streamed(
                    lambda: self.link.stream("/chat/completions", self._question(ask, max_tokens, slot)),
                    pacer,
                    background=True,
                    conversation=ask.conversation,
                )
                grant.report(answer.usage.completion_tokens)
                return answer

    async def _ask_at_once(self, ask: Ask, pacer: Pacing, max_tokens: int, slot: int | None) -> Generated:
        """The caller waits, so it is a request like the agent's own."""
        body = self._question(ask, max_tokens, slot)
        return await answer_streamed(
            lambda: self.link.stream("/chat/completions", body, background=False),
            pacer,
            background=False,
            conversation=ask.conversation,
        )

    def _question(self, ask: Ask, max_tokens: int, slot: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "temperature": 0,
            **_without(chat.fields(ask.prompt, sampling=True), NOT_FOR_SUMMARIES),
            "model": self.model(ask.prompt) if self.served or ask.prompt.model else "default",
            "messages": list(ask.messages),
            "max_tokens": max_tokens,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        return body if slot is None else {**body, "id_slot": slot, "cache_prompt": True}


def _decoded(slot: Mapping[str, Any]) -> int:
    """Tokens a slot's request has decoded; older servers send ``next_token`` as a mapping, newer as a list."""
    state = slot.get("next_token")
    first = rows(cast("list[object]", state))[:1] if isinstance(state, list) else [mapping(state)]
    return whole(first[0].get("n_decoded")) or 0 if first else 0


def _settings(props: Mapping[str, Any], models: object) -> dict[str, object]:
    """What two servers must have in common for the one's KV to be the other's."""
    path = props.get("model_path")
    return {
        "n_ctx": whole(mapping(props.get("default_generation_settings")).get("n_ctx")),
        "chat_template": props.get("chat_template"),
        "total_slots": whole(props.get("total_slots")),
        "model": re.split(r"[/\\]", path)[-1] if isinstance(path, str) else None,
        "weights": _weights(models),
    }


def _weights(models: object) -> object:
    """What tells one model's weights from another's, where the server lists it; its path may differ."""
    listed = [*rows(mapping(models).get("data")), dict[str, Any]()]
    meta = mapping(listed[0].get("meta"))
    return {name: meta.get(name) for name in ("n_vocab", "n_embd", "n_params", "size")}


def _without(body: Mapping[str, Any], drop: frozenset[str]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in drop}
