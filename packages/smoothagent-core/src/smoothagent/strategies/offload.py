"""Offloading: bulky tool outputs move to a store, references stay (paper section 3.3)."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Sequence
from typing import NamedTuple

from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, leading_system
from smoothagent.prompt import Prompt
from smoothagent.read_tool import require_read_tool
from smoothagent.store import IN_USE_SECONDS, OffloadStore, Reference, parse_reference, reference_text
from smoothagent.strategy import CutStrategy, Prediction
from smoothagent.turns import pending

PUT_AGAIN = min(3600.0, IN_USE_SECONDS / 8)
"""Seconds after which an output that a prompt refers to is put again."""
_HISTORIES = 3
"""Histories whose outputs are remembered: as it is, as a pipeline sees it, frozen on the lane."""
_REMEMBERED = 8192
"""Outputs whose references are remembered."""


class Offload(CutStrategy):
    """Replace tool outputs by references once the context reaches ``hard`` tokens.

    Each output is written durably before its reference can be committed, so nothing is lost; the
    agent reads it back with the ``read_offloaded`` tool. Calls and results stay in their places.

    Args:
        hard: trigger in tokens of the next prompt.
        keep: the newest n tool outputs stay verbatim.
        store: where outputs go; default `OffloadStore` in the user's data folder.
        min_chars: outputs shorter than this stay, since a reference would not be shorter.
        allow_unreadable: do not ask that the agent has the ``read_offloaded`` tool.

    Raises:
        ConfigurationError: an impossible limit.
    """

    positional = True
    minimum_saving = 0.02

    def __init__(
        self,
        hard: int,
        *,
        keep: int = 3,
        store: OffloadStore | None = None,
        min_chars: int = 200,
        allow_unreadable: bool = False,
    ) -> None:
        super().__init__()
        if hard <= 0 or keep < 0 or min_chars < 0:
            raise ConfigurationError(
                f"Offload(hard={hard}, keep={keep}, min_chars={min_chars}): "
                "hard must be positive, the others not negative"
            )
        self.hard, self.keep, self.min_chars, self.allow_unreadable = hard, keep, min_chars, allow_unreadable
        self.store = store or OffloadStore()
        self._stored: dict[bytes, tuple[Reference, float]] = {}
        self._outputs = _Outputs()

    def check(self, prompt: Prompt) -> None:
        """Refuse an agent that could not read its own outputs again."""
        if not self.allow_unreadable:
            require_read_tool(prompt)

    def should_commit(self) -> bool:
        """Whether the trigger is reached and an output is left to offload."""
        assert self.hard is not None
        return self.tokens >= self.hard and self._has_work(self.main.messages)

    def cut(self, history: Sequence[Message]) -> int:
        """Just before the ``keep``-th newest tool output, counted as the frameworks' built-ins do."""
        return self._cut(history, self.keep)

    def rewrite(self, covered: Sequence[Message]) -> list[Message]:
        """References instead of bulky outputs; everything else is the same object."""
        return [self._offloaded(m) if self._bulky(m) else m for m in covered]

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """The view of the turn that is planned to commit: what will be offloaded then, and what stays.

        Before growth is known only what the next turn would offload.
        """
        outputs, bulky = self._found(history)
        if not bulky:
            return None
        to_come = pending(history)
        turns = self._turns_to_go(history)
        if turns is not None:
            each = len(outputs) / max(1, self._turns(history))
            to_come += round(max(0, turns) * each)
        cut = self._cut(history, self.keep - to_come)
        if bulky[0] >= cut:
            return None
        return Prediction(cut, tail=turns is not None)

    def _turns_to_go(self, history: Sequence[Message]) -> int | None:
        """Turns whose calls are not known yet, before the planned commit; None where growth is not known."""
        assert self.hard is not None
        planned = self.growth.planned_turns(self.hard)
        # Growth counts from the beginning of the last turn: its own calls are known once it has answered.
        return None if planned is None else planned - (self._turns(history) - self.growth.turns)

    def _turns(self, history: Sequence[Message]) -> int:
        known = self.main.strategy_data.get("turns")
        return int(known) if known is not None else sum(m.role == "assistant" for m in history)

    def _cut(self, history: Sequence[Message], keep: int) -> int:
        outputs, _ = self._found(history)
        if keep <= 0:
            return max(len(history), leading_system(history))
        return outputs[-keep] if len(outputs) > keep else leading_system(history)

    def _has_work(self, history: Sequence[Message]) -> bool:
        _, bulky = self._found(history)
        return bool(bulky) and bulky[0] < self.cut(history)

    def _found(self, history: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the outputs are, and which of them are bulky: looked for in what is new, so that hooks stay flat."""
        found = self._outputs.known(history) or _Found((), (), ())
        if len(found.seen) < len(history):
            new = [i for i in range(len(found.seen), len(history)) if history[i].role == "tool"]
            bulky = (*found.bulky, *(i for i in new if self._bulky(history[i])))
            found = self._outputs.note(_Found(tuple(history), (*found.all, *new), bulky))
        return found.all, found.bulky

    def _bulky(self, message: Message) -> bool:
        if message.role != "tool" or not isinstance(message.content, (str, tuple)):
            return False
        if isinstance(message.content, tuple) and any(p.get("type") != "text" for p in message.content):
            return False  # an image or an opaque part is not text that could come back byte for byte
        text = message.text
        return len(text) >= self.min_chars and parse_reference(text) is None

    def _offloaded(self, message: Message) -> Message:
        text = message.text
        return message.with_content(reference_text(self._put(text), text))

    def _put(self, text: str) -> Reference:
        """Store ``text``: at each commit, and for what is only asked at the hooks once an hour.

        At a commit in any case, since somebody may have removed it; and a put counts as a use, which keeps retention
        off what a prompt refers to.
        """
        key, now = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), time.monotonic()
        known = self._stored.get(key)
        if known is not None and now < known[1] + PUT_AGAIN and not self.on_critical_path:
            return known[0]
        reference = self.store.put(text)
        self._stored[key] = (reference, now)
        while len(self._stored) > _REMEMBERED:
            self._stored.pop(next(iter(self._stored)), None)
        return reference


class _Found(NamedTuple):
    """The tool outputs of one history.

    Attributes:
        seen: the messages looked through.
        all: positions of the outputs.
        bulky: positions of those that are worth moving.
    """

    seen: tuple[Message, ...]
    all: tuple[int, ...]
    bulky: tuple[int, ...]


class _Outputs:
    """What was found in the newest histories; shared by the copies of a strategy, which look at others."""

    def __init__(self) -> None:
        self._found: tuple[_Found, ...] = ()

    def known(self, history: Sequence[Message]) -> _Found | None:
        """What was found in a history that this one goes on from."""
        for found in self._found:
            if _begins(history, found.seen):
                return found
        return None

    def note(self, found: _Found) -> _Found:
        """Remember it in the place of what it goes on from; replaced whole, since the lane has this object, too."""
        others = [f for f in self._found if not _begins(found.seen, f.seen)]
        self._found = (found, *others[: _HISTORIES - 1])
        return found


def _begins(history: Sequence[Message], seen: Sequence[Message]) -> bool:
    """Whether ``history`` begins with these very messages: one in another's place may be the same as before it."""
    return len(seen) <= len(history) and all(map(operator.is_, seen, history))
