"""The pacer's face for servers that schedule best-effort work themselves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator

from smoothagent.serving.costs import Kind
from smoothagent.serving.others import Watch
from smoothagent.serving.pacer import Pacer, PacerStats
from smoothagent.serving.piece import Grant
from smoothagent.serving.spent import Spent


class Unpaced:
    """Every piece may be the whole."""

    def __init__(self) -> None:
        self.stats = PacerStats()
        self.spent = Spent()
        self.watch: Watch | None = None

    def main_arrived(self, conversation: str) -> None:
        """Nothing to do."""

    def main_first_token(self, conversation: str) -> None:
        """Nothing to do."""

    def main_done(self, conversation: str) -> None:
        """Nothing to do."""

    def promote(self, conversation: str) -> None:
        """Nothing to do."""

    def settle(self, conversation: str) -> None:
        """Nothing to do."""

    def forget(self, conversation: str) -> None:
        """The conversation is over."""
        self.spent.forget(conversation)

    def begin(self) -> None:
        """Nothing to do."""

    def has_long_pauses(self) -> bool:
        """Nothing is known of them."""
        return False

    async def clear(self) -> None:
        """Always."""

    @contextlib.asynccontextmanager
    async def piece(
        self, conversation: str, kind: Kind, *, least: int = 1, at_rest: bool = False, elsewhere: bool = False
    ) -> AsyncGenerator[Grant]:
        """Leave for everything at once."""
        del least, at_rest, elsewhere
        self.stats.pieces += 1
        grant = Grant(conversation, kind, sys.maxsize, beside_decode=False)
        try:
            yield grant
        finally:
            self.spent.add(conversation, kind, grant.done_tokens)


Pacing = Pacer | Unpaced
"""What a dialect's work is paced by."""
