"""Copies of KV between slots, of one server or of two, until it turns out that none can be had."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from smoothagent.errors import BackendProtocolError, BackendRefusedError, RateLimitedError
from smoothagent.serving.dialects.llamacpp.pieces import SlotWork

BAD_COPIES = 3
"""Refused or slow copies in a row after which none is made any more."""
LONGEST_COPY = 1.0
"""Seconds; a copy that takes longer stalls more than it spares. As long as a request waits for a hand-over."""
ALMOST = 0.9
"""Of that, what a hand-over that was given up must have taken to count as slow."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A slot in a file.

    Attributes:
        name: the file's.
        tokens: how many the slot held.
        seconds: how long it took.
    """

    name: str
    tokens: int
    seconds: float


Saving = asyncio.Future[Saved]
"""A slot that is being saved."""


class Copies:
    """Copies KV through the folder that ``--slot-save-path`` names.

    Args:
        notes: where it is told why no copies are made.

    Attributes:
        usable: slots of the agent's server can be copied, as far as is known.
        linked: what the lookahead server saves can be restored on the agent's, and the other way round.
    """

    def __init__(self, notes: MutableMapping[str, str]) -> None:
        self.usable = self.linked = False
        self._notes = notes
        self._bad = self._bad_links = 0

    async def probe(self, agents: SlotWork, lookahead: SlotWork) -> None:
        """Find out whether the server of the agent's requests, and that of the lookahead work, can save slots."""
        self.usable = await agents.can_save()
        if not self.usable:
            self._notes["slot_save_path"] = (
                "llama.cpp: slots cannot be saved, so a summary is written on the main slot and in tool time only; "
                "agents with fast tools may never get one. Start the server with --slot-save-path DIR."
            )
        if lookahead is agents:
            return
        self.linked = self.usable and await lookahead.can_save()
        if not self.linked:
            which = lookahead.link.base_url if self.usable else agents.link.base_url
            self.unlink(f"the server at {which} cannot save slots")

    def saving(self, source: SlotWork, slot: int) -> Saving:
        """Begin to save a slot; the server ends that once it has begun, whoever goes away. `restore` takes it."""
        saving = asyncio.ensure_future(_save(source, slot))
        saving.add_done_callback(lambda f: f.cancelled() or f.exception())
        return saving

    async def copy(self, source: SlotWork, slot: int, target: SlotWork, into: int) -> int:
        """Copy ``slot`` of ``source`` into another of ``target``; returns the tokens that are there now."""
        return await self.restore(self.saving(source, slot), target, into, linked=source is not target)

    async def restore(self, saving: Saving, target: SlotWork, into: int, *, linked: bool) -> int:
        """Restore what is being saved into a slot; returns the tokens that are there now, 0 where that failed.

        Args:
            saving: what is being saved.
            target: the slot's server.
            into: the slot.
            linked: it was saved by the other server.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            saved = await asyncio.shield(saving)
            began = clock()
            held = await target.restore(into, saved.name)
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            self._badly(f"a slot could not be copied ({error})", linked=linked)
            return 0
        took = saved.seconds + clock() - began
        if took > LONGEST_COPY:
            # All slots stand still meanwhile, and nothing stops it when the agent's request comes.
            self._badly(f"a slot took {took:.1f} s to copy, in which no request is served", linked=linked)
        elif held != saved.tokens:
            self._badly(f"of {saved.tokens} tokens that were saved {held} were restored", linked=linked)
            return 0
        elif linked:
            self._bad_links = 0
        else:
            self._bad = 0
        return held

    async def hand_over(self, source: SlotWork, target: SlotWork, slot: int, wanted: Callable[[], bool]) -> bool:
        """Copy a slot to the one of the same number on the other server. Whether it is there.

        Args:
            source: the server that has it.
            target: the server that is to have it.
            slot: its number on both.
            wanted: whether it still is, when it has been saved.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            saving = self.saving(source, slot)
            await asyncio.wait({saving})
            return wanted() and await self.restore(saving, target, slot, linked=True) > 0
        except asyncio.CancelledError:
            if clock() - began >= ALMOST * LONGEST_COPY:
                self._badly(f"handing a slot over took more than {LONGEST_COPY:.0f} s", linked=True)
            raise

    async def prove(self, source: SlotWork, slot: int, target: SlotWork, into: int) -> None:
        """A first copy between two servers: whether their folders are one, and what the one saves suits the other."""
        name = f"smoothagent-proof-{uuid.uuid4().hex}.bin"
        try:
            saved = await source.save(slot, name)
            held = await target.restore(into, name)
        except RateLimitedError:
            raise
        except (BackendRefusedError, BackendProtocolError) as error:
            self.unlink(f"what the lookahead server saved cannot be restored ({error})")
        else:
            if held != saved:
                self.unlink(f"of {saved} tokens that the lookahead server saved {held} could be restored")

    def unlink(self, why: str) -> None:
        """No KV goes from server to server: lookahead work runs where the agent's requests do."""
        self.linked = False
        self._notes["link"] = (
            f"llama.cpp: {why}, so lookahead work runs on the agent's own server. Start both servers with the same "
            "folder as --slot-save-path, in memory (/dev/shm) if it is slow, and with the same settings."
        )

    def _badly(self, how: str, *, linked: bool) -> None:
        """Copying stops for good after some in a row; a single slow one may only have waited for somebody's step."""
        if linked:
            self._bad_links += 1
            if self._bad_links >= BAD_COPIES:
                self.unlink(f"{how}, {BAD_COPIES} times in a row")
            return
        self._bad += 1
        if self._bad >= BAD_COPIES:
            self.usable = False
            self._notes["copy"] = (
                f"llama.cpp: {how}, {BAD_COPIES} times in a row: none is copied any more, so summaries are "
                "written on the main slot in tool time. Let --slot-save-path name a folder in memory (/dev/shm)."
            )


async def _save(source: SlotWork, slot: int) -> Saved:
    clock = asyncio.get_running_loop().time
    began = clock()
    name = source.file_of(slot)
    tokens = await source.save(slot, name)
    return Saved(name, tokens, clock() - began)
