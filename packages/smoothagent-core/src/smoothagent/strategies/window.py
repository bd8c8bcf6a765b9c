"""Truncation: keep the most recent turns, now and then or on every turn (paper section 3.4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, leading_system
from smoothagent.strategy import CutStrategy, Prediction
from smoothagent.turns import last_safe_cut, safe_cuts, turn_starts


def latest_user(covered: Sequence[Message]) -> list[Message]:
    """The latest user message of what is dropped: it always stays (the law, safe cuts)."""
    for message in reversed(covered):
        if message.role == "user":
            return [message]
    return []


def completed_turns(history: Sequence[Message]) -> list[int]:
    """Starts of the turns that have their assistant message, oldest first."""
    starts = turn_starts(history)
    return starts[: sum(m.role == "assistant" for m in history[leading_system(history) :])]


class _Window(CutStrategy):
    """What both truncations share: dropping all before a turn's start."""

    def __init__(self, *, keep_latest_user: bool) -> None:
        super().__init__()
        self.keep_latest_user = keep_latest_user

    def rewrite(self, covered: Sequence[Message]) -> list[Message]:
        """Nothing but the latest user message stays."""
        return latest_user(covered) if self.keep_latest_user else []

    @property
    def _count(self) -> int:
        """Completed turns; the runtime counts them as they come, so that hooks stay flat."""
        known = self.main.strategy_data.get("turns")
        return int(known) if known is not None else len(completed_turns(self.main.messages))

    def should_lookahead(self) -> bool:
        """The predicted window has begun."""
        target = self._target(self._count)
        return target is not None and 0 < target < self._count

    @abstractmethod
    def _target(self, count: int) -> int | None:
        """Index of the turn that the next window will begin with, or None where turns do not tell."""

    def _at(self, history: Sequence[Message], start: int) -> int:
        """The safe cut at or before ``start``."""
        cut = last_safe_cut(safe_cuts(history), start)
        return leading_system(history) if cut is None else cut

    def _keep_turns(self, history: Sequence[Message], turns: int) -> int:
        starts = completed_turns(history)
        return self._at(history, starts[-turns]) if len(starts) > turns else leading_system(history)

    def _from_turn(self, history: Sequence[Message], index: int) -> Prediction | None:
        """The window that will begin with turn ``index``, once that turn has begun."""
        starts = completed_turns(history)
        if not 0 < index < len(starts):
            return None
        return Prediction(self._at(history, starts[index]), tail=True)

    def _keep_tokens(self, sizes: Sequence[int], history: Sequence[Message], budget: float) -> int:
        """The earliest turn start whose view fits ``budget`` tokens; the newest turn always stays."""
        position = leading_system(history)
        tail, kept_user = sum(sizes[position:]), 0
        room = budget - (self.tokens - tail)
        for start in turn_starts(history):
            if tail + kept_user <= room:
                break
            for i in range(position, start):
                tail -= sizes[i]
                if self.keep_latest_user and history[i].role == "user":
                    kept_user = sizes[i]
            position = max(position, start)
        return self._at(history, position)


class KeepRecent(_Window):
    """Keep the last K turns whenever a trigger is reached (keep-recent-K, paper section 3.4).

    Args:
        turns: K, completed turns that stay; the part of a turn that has begun always stays.
        at_turns: transform when this many completed turns are in the context.
        at_tokens: transform when the next prompt has this many tokens. One trigger is needed.
        keep_latest_user: keep the latest user message of what is dropped.

    Raises:
        ConfigurationError: no trigger, or one that the kept turns would reach at once.
    """

    def __init__(
        self, turns: int, *, at_turns: int | None = None, at_tokens: int | None = None, keep_latest_user: bool = True
    ) -> None:
        super().__init__(keep_latest_user=keep_latest_user)
        if turns < 1:
            raise ConfigurationError(f"KeepRecent keeps {turns} turns: it must keep at least 1")
        if at_turns is None and at_tokens is None:
            raise ConfigurationError("KeepRecent needs a trigger: pass at_turns= or at_tokens=")
        if at_turns is not None and at_turns <= turns:
            raise ConfigurationError(f"KeepRecent(turns={turns}, at_turns={at_turns}): at_turns must exceed turns")
        if at_tokens is not None and at_tokens <= 0:
            raise ConfigurationError(f"KeepRecent(at_tokens={at_tokens}): it must be positive")
        self.turns, self.at_turns, self.hard = turns, at_turns, at_tokens
        # By turns the commit's turn is known exactly: what is cold then would be as cold a turn later.
        self.defer = at_turns is None

    def should_commit(self) -> bool:
        """Whether either trigger is reached and something can be dropped."""
        count = self._count
        by_turns = self.at_turns is not None and count >= self.at_turns
        by_tokens = self.hard is not None and self.tokens >= self.hard
        return (by_turns or by_tokens) and count > self.turns

    def cut(self, history: Sequence[Message]) -> int:
        """The start of the K-th newest completed turn."""
        return self._keep_turns(history, self.turns)

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """The window of the predicted commit turn: known as soon as its first turn has begun."""
        target = self._target(len(completed_turns(history)))
        return None if target is None else self._from_turn(history, target)

    def _target(self, count: int) -> int | None:
        commit_turns: list[int] = []
        # Asked between a request and its answer, the next commit is a turn later: that turn is not completed yet.
        coming = count + (self.growth.turns == count)
        if self.at_turns is not None:
            commit_turns.append(max(self.at_turns, coming))
        planned = self.growth.planned_turns(self.hard) if self.hard is not None else None
        if planned is not None:
            commit_turns.append(max(coming, self.growth.turns + planned))
        return min(commit_turns) - self.turns if commit_turns else None


class SlidingWindow(_Window):
    """A window of fixed size that moves on as the context grows, by default on every turn.

    Args:
        turns: the window's size in completed turns, or
        tokens: its size in tokens of the whole prompt; exactly one of the two.
        stride: how far it moves at once, in the same unit; a larger one moves less often and
            keeps the prefix for longer. Default: one turn, or what is needed to fit.
        keep_latest_user: keep the latest user message of what is dropped.

    Raises:
        ConfigurationError: both or no size, or a stride that leaves nothing.
    """

    # It moves with every turn, so waiting would only lose what was warmed.
    defer = False

    def __init__(
        self,
        turns: int | None = None,
        *,
        tokens: int | None = None,
        stride: int | None = None,
        keep_latest_user: bool = True,
    ) -> None:
        super().__init__(keep_latest_user=keep_latest_user)
        if (turns is None) == (tokens is None):
            raise ConfigurationError(f"SlidingWindow(turns={turns}, tokens={tokens}): pass exactly one of the two")
        size = turns if turns is not None else tokens
        assert size is not None
        step = stride if stride is not None else (1 if turns is not None else 0)
        if size < 1 or step < 0 or step >= size + (turns is not None):
            raise ConfigurationError(
                f"SlidingWindow: size {size} and stride {step}: need size >= 1 and 0 <= stride < size"
            )
        self.size, self.stride, self.by_turns = size, step, turns is not None
        if not self.by_turns:
            self.hard = size

    def should_commit(self) -> bool:
        """Whether the context exceeds the window and something can be dropped."""
        if self.by_turns:
            return self._count > self.size
        return self.tokens > self.size and self.cut(self.main.messages) > leading_system(self.main.messages)

    def cut(self, history: Sequence[Message]) -> int:
        """The window's start."""
        if self.by_turns:
            return self._keep_turns(history, self._kept_turns)
        sizes = list(self.sizes) or [0] * len(history)
        return self._keep_tokens(sizes, history, self.size - self.stride)

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """The next window's start: exact by turns, by tokens but for the size of pending results."""
        if self.by_turns:
            target = self._target(len(completed_turns(history)))
            return None if target is None else self._from_turn(history, target)
        # What is still to come takes its room too: pending results, the next user message.
        coming = self.growth.still_to_come(self.tokens)
        if self.tokens + coming <= self.size:
            return None
        cut = self._keep_tokens(list(self.sizes), history, self.size - self.stride - coming)
        return Prediction(cut, tail=True) if cut > leading_system(history) else None

    def should_lookahead(self) -> bool:
        """The next window's start is known."""
        if self.by_turns:
            return super().should_lookahead()
        coming = self.growth.still_to_come(self.tokens)
        return self.tokens + coming > self.size and self.predict(self.main.messages) is not None

    def _target(self, count: int) -> int | None:
        return max(self.size + 1, count) - self._kept_turns if self.by_turns else None

    @property
    def _kept_turns(self) -> int:
        return max(1, self.size - max(self.stride, 1) + 1)
