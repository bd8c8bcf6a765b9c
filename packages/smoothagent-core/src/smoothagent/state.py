"""The two states of a conversation, with the paper's names (section 3.2, Listing 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smoothagent.message import Message


@dataclass(slots=True)
class MainState:
    """The working context.

    Attributes:
        messages: the current view, oldest first.
        strategy_data: per-strategy metadata; the runtime keeps ``tokens`` (of the next prompt),
            ``sizes`` (tokens of each message), ``natives`` (the framework's own messages), ``turns``
            (completed), ``growth`` and ``count`` in it, and ``now`` on the critical path.
    """

    messages: list[Message] = field(default_factory=list[Message])
    strategy_data: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class LookaheadState:
    """Progress of the lookahead stream.

    Attributes:
        transformed: what stands for ``main.messages[:last_segment_end]``, system messages included.
        last_segment_end: end of the prefix that ``transformed`` incorporates.
        strategy_data: mutable state of the strategy, such as file handles or partial summaries.
    """

    transformed: list[Message] = field(default_factory=list[Message])
    last_segment_end: int = 0
    strategy_data: dict[str, Any] = field(default_factory=dict[str, Any])
