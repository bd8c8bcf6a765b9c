"""Isolation: tasks go to sub-agents with contexts of their own (paper section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence

from smoothagent.message import Message, leading_system
from smoothagent.strategy import CutStrategy, Prediction


class Isolate(CutStrategy):
    """Leaves the agent's own context alone; what it hands out goes through `LookaheadRuntime.delegate`.

    The segments are the pieces of the sub-agent's prompt: its head when the delegation begins, then
    each chunk of the instruction as the main agent writes it. An agent with another strategy for its
    own context can delegate just as well.
    """

    def should_commit(self) -> bool:
        """Never: the hand-over is the delegation's own commit."""
        return False

    def should_lookahead(self) -> bool:
        """Nothing of the agent's own context is prepared."""
        return False

    def cut(self, history: Sequence[Message]) -> int:
        """Nothing is covered."""
        return leading_system(history)

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """There will be no commit."""
        del history
        return None

    def rewrite(self, covered: Sequence[Message]) -> list[Message]:
        """The same messages."""
        return list(covered)
