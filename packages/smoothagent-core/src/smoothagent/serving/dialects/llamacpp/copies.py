"""Copies of KV between slots, of one server or of two, until it turns out that none can be had."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping

from smoothagent.errors import BackendRefusedError, RateLimitedError
from smoothagent.serving.dialects.llamacpp.pieces import SlotWork

BAD_COPIES = 3
"""Refused or slow copies in a row after which none is made any more."""
LONGEST_COPY = 1.0
"""Seconds; a copy that takes longer stalls more than it spares."""


Saving = asyncio.Future[tuple[str, float]]
"""A slot that is being saved: its file's name, and the seconds it took."""


class Copies:
    """Copies KV through the folder that ``--slot-save-path`` names.

    Args:
        notes: where it is told why no copies are made.

    Attributes:
        usable: copies can be had, as far as is known.
        linked: between the two servers, too.
    """

    def __init__(self, notes: MutableMapping[str, str]) -> None:
        self.usable = self.linked = False
        self._notes = notes
        self._bad = 0

    async def probe(self, agents: SlotWork, lookahead: SlotWork) -> None:
        """Find out whether the server of the agent's requests, and that of the lookahead work, can save slots."""
        self.usable = await agents.can_save()
        if not self.usable:
            self._notes["slot_save_path"] = (
                "llama.cpp: slots cannot be saved, so a summary is written on the main slot and in tool time only; "
                "agents with fast tools may never get one. Start the server with --slot-save-path DIR."
            )
        elif lookahead is not agents:
            self.linked = await lookahead.can_save()
            if not self.linked:
                self.unlink(f"the lookahead server at {lookahead.link.base_url} cannot save slots")

    async def copy(self, source: SlotWork, slot: int, target: SlotWork, into: int) -> int:
        """Copy ``slot`` of ``source`` into another of ``target``; returns the tokens that are there now."""
        return await self.restore(self.saving(source, slot), target, into)

    def saving(self, source: SlotWork, slot: int) -> Saving:
        """Begin to save a slot; the server ends that once it has begun, whoever goes away. `restore` takes it."""
        saving = asyncio.ensure_future(_timed(source, slot))
        saving.add_done_callback(lambda f: f.cancelled() or f.exception())
        return saving

    async def restore(self, saving: Saving, target: SlotWork, into: int) -> int:
        """Restore what is being saved into a slot; returns the tokens that are there now."""
        clock = asyncio.get_running_loop().time
        try:
            name, seconds = await asyncio.shield(saving)
            began = clock()
            held = await target.restore(into, name)
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            self._badly(f"a slot could not be copied ({error})")
            return 0
        took = seconds + clock() - began
        if took > LONGEST_COPY:
            # All slots stand still meanwhile, and nothing stops it when the agent's request comes.
            self._badly(f"a slot took {took:.1f} s to copy, in which no request is served")
        else:
            self._bad = 0
        return held

    async def prove(self, source: SlotWork, slot: int, target: SlotWork, into: int) -> None:
        """A first copy between two servers, whose folders may not be the same."""
        try:
            await target.restore(into, await source.save(slot))
        except RateLimitedError:
            raise
        except BackendRefusedError as error:
            self.unlink(f"what the lookahead server saved cannot be restored ({error})")

    def unlink(self, why: str) -> None:
        """No KV goes from server to server: lookahead work runs where the agent's requests do."""
        self.linked = False
        self._notes["copy"] = (
            f"llama.cpp: {why}, so lookahead work runs on the agent's own server. Start both servers with the same "
            "folder as --slot-save-path."
        )

    def _badly(self, how: str) -> None:
        """Copying stops for good after some in a row; a single slow one may only have waited for somebody's step."""
        self._bad += 1
        if self._bad >= BAD_COPIES:
            self.usable = self.linked = False
            self._notes["copy"] = (
                f"llama.cpp: {how}, {BAD_COPIES} times in a row: none is copied any more, so summaries are "
                "written on the main slot in tool time. Let --slot-save-path name a folder in memory (/dev/shm)."
            )


async def _timed(source: SlotWork, slot: int) -> tuple[str, float]:
    clock = asyncio.get_running_loop().time
    began = clock()
    name = await source.save(slot)
    return name, clock() - began
