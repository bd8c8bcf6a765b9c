"""One conversation as the runtime sees it: the input, the view that belongs to it, and what a commit makes of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar, cast

from smoothagent.codec import Codec
from smoothagent.errors import HistoryError
from smoothagent.history import History
from smoothagent.limits import Growth
from smoothagent.message import Message, alike, leading_system
from smoothagent.natives import Natives, Snapshot
from smoothagent.prompt import Prompt
from smoothagent.record import CommitRecord, Whole, covered_after, head_after
from smoothagent.remembered import remembered
from smoothagent.strategy import Commit, LookaheadStrategy
from smoothagent.tokens import EstimateCounter, TokenCounter
from smoothagent.turns import last_safe_cut, pending, safe_cuts

M = TypeVar("M")
log = logging.getLogger("smoothagent")


_LEADING = 8
"""Messages that are looked at for system text which a framework keeps apart."""


class Warmth(NamedTuple):
    """Tokens of a new view that were known, and how many of those were prefilled."""

    known: int
    warmed: int


class Conversation(Generic[M]):
    """Follows a history, counts it, and lets the strategy see the view (the law, "Again and again").

    Not thread-safe: the runtime holds its lock.

    Attributes:
        view: what the model is to see, as of the last hook.
        raw: the last input was the raw history of a committed view.
        record: the last commit.
        known: messages of the view that were there at the last segment boundary.
        growth: how fast it grows.
        prompt: what else shapes the tokens.
        counted_at: tokens of the view when the server last told its count, 0 before.
    """

    def __init__(self, codec: Codec[M], counter: TokenCounter, strategy: LookaheadStrategy, prompt: Prompt) -> None:
        self.codec, self.strategy, self.prompt = codec, strategy, prompt
        self.counter = counter = remembered(counter)
        self.growth = Growth()
        self.record: CommitRecord[M] | None = None
        self.raw = False
        self.known = 0
        self._input: History[M] = History(codec, counter.count)
        self._spliced: History[M] = History(codec, counter.count)
        self.view = self._input
        self._was_raw: bool | None = None
        self.counted_at = 0
        self._drift = 1.0
        self._facts: tuple[Prompt, str, int] | None = None

    def follow(self, messages: Sequence[M], prompt: Prompt | None) -> None:
        """The history is now ``messages``. Raises HistoryError where it cannot be one."""
        if prompt is not None and prompt is not self.prompt:
            self.prompt = prompt
        self._input.update(messages)
        self._resolve()
        self._look()

    def reverify(self, messages: Sequence[M]) -> None:
        """Decode and digest everything anew: an object changed in place must not be spliced over."""
        self._input = self._input.verified(messages, self.counter.count)
        self._spliced = History(self.codec, self.counter.count)
        self._resolve()
        self._look()

    def digests(self) -> list[str]:
        """Chain digests of the input."""
        return self._input.digests()

    @property
    def tokens(self) -> int:
        """Tokens of the next prompt."""
        return self.fixed + self.view.total

    @property
    def fixed(self) -> int:
        """Tokens of system text and tools."""
        return self._prompt_facts()[2]

    @property
    def prompt_digest(self) -> str:
        """Digest of the prompt."""
        return self._prompt_facts()[1]

    def count(self, messages: Sequence[Message]) -> int:
        """Tokens of messages, without system text and tools."""
        return sum(map(self.counter.count, messages))

    @property
    def settled_view(self) -> list[Message]:
        """The view without its volatile tail, which the next request will not repeat: no strategy ever covers it."""
        return self.view.messages[: self._settled] if self.prompt.volatile_tail else self.view.messages

    @property
    def _settled(self) -> int:
        return max(self.view.lead, len(self.view) - self.prompt.volatile_tail)

    def snapshot(self) -> Snapshot[M]:
        """The settled view, frozen."""
        view, end = self.view, self._settled
        natives = view.natives[:end]
        facts = dict(self.strategy.main.strategy_data, sizes=view.sizes[:end], natives=natives)
        return Snapshot(view.messages[:end], natives, facts, view.digests()[:end])

    def settled(self) -> int:
        """Length of the view without what ends it unanswered: results and user messages are cold in any case."""
        length = len(self.view)
        while length and self.view.messages[length - 1].role != "assistant":
            length -= 1
        return length

    def is_sent_by(self, messages: object) -> bool:
        """Whether a call with these messages is the conversation's own; system text may stand before them."""
        view = self.view.natives
        if not isinstance(messages, Sequence) or not view:
            return True  # nothing that could be compared
        given = list(cast("Sequence[object]", messages))
        try:
            ahead = leading_system([self.codec.decode(cast("M", m)) for m in given[:_LEADING]]) - self.view.lead
            start = max(0, ahead)
            return len(given) >= start + len(view) and all(map(self._same, view, given[start:]))
        except Exception:
            return True  # the client is given another kind of messages than the codec knows

    def system_before(self, messages: object) -> str | None:
        """The system text that a call of the conversation's puts before its messages; None where there is none."""
        if not isinstance(messages, Sequence):
            return None
        try:
            ahead = [self.codec.decode(cast("M", m)) for m in list(cast("Sequence[object]", messages))[:_LEADING]]
            before = ahead[: max(0, leading_system(ahead) - self.view.lead)]
        except Exception:
            return None  # another kind of messages than the codec knows
        return before[0].text if len(before) == 1 and isinstance(before[0].content, str) else None

    def _same(self, mine: M, theirs: object) -> bool:
        if mine is theirs or mine == theirs:
            return True
        # Harnesses keep reasoning in their history and leave it out of their calls.
        return alike(self.codec.decode(mine), self.codec.decode(cast("M", theirs)), reasoning=False)

    def warmth(self, warmed: Sequence[Message], done: Commit, until: int) -> Warmth:
        """How warm the view of ``done`` is, up to message ``until`` of the present view."""
        new = [*done.head, *self.view.messages[done.covered : max(done.covered, until)]]
        known = hit = 0
        matching = True
        for i, message in enumerate(new):
            size = self.counter.count(message)
            known += size
            matching = matching and i < len(warmed) and alike(warmed[i], message)
            hit += size if matching else 0
        return Warmth(known, hit)

    def splice(self, done: Commit, natives: Natives[M]) -> list[M]:
        """Replace the view's prefix, remember the commit, return the new view."""
        view, record = self.view, self.record
        natives.learn(view.messages, view.natives)
        head = [natives.of(m) for m in done.head]
        after = [*head, *view.natives[done.covered :]]
        boundary, verbatim = self._recorded(done, head)
        covered = covered_after(record, self.raw, boundary)
        digest = self._input.digest(covered)
        assert digest is not None, "a commit covers messages of its input"
        new_head = head_after(view.natives, verbatim, boundary, record, self.raw)
        spliced: History[M] = History(self.codec, self.counter.count)
        # Raises for a result without its call, which only a strategy of the user's can leave.
        spliced.update(after)
        if pending(spliced.messages) > pending(view.messages):
            raise HistoryError(
                f"{type(self.strategy).__name__} replaced {done.covered} messages by {len(done.head)} and left a tool "
                "call without its result: cut only where turns.safe_cuts(history) allows it"
            )
        self.known = max(0, self.known - done.covered) + len(head)
        head_digest = spliced.digest(len(new_head))
        assert head_digest is not None, "the head is part of the view"
        whole = Whole(len(self._input), self._input.last_digest, len(spliced), spliced.last_digest)
        self.record = CommitRecord(covered, digest, new_head, head_digest, whole, after[-1] if after else None)
        self._spliced = self.view = spliced
        self._was_raw = None  # the next input will tell
        self._look()
        self.growth.moved(self.tokens, spliced.assistants)
        return after

    def _recorded(self, done: Commit, head: list[M]) -> tuple[int, list[M]]:
        """What of a commit is recorded: up to where in the view, and what stands for it.

        Ids may be minted anew with each input, so no call of the recorded head may have its result in the tail.
        """
        cuts = safe_cuts(self.view.messages)
        after = next((c for c in cuts if c >= done.covered), None)
        if after is not None:
            return after, [*head, *self.view.natives[done.covered : after]]
        if len(head) != done.covered:
            return done.covered, head
        # A call from before the cut still waits for its result. Messages stand in their places, so the record may
        # end before it; what was rewritten after it is rewritten again on the next raw input.
        before = last_safe_cut(cuts, done.covered) or 0
        return before, head[:before]

    @property
    def counted_with(self) -> float:
        """The factor of the counter with which the messages were counted."""
        return self.counter.factor / self._drift if isinstance(self.counter, EstimateCounter) else 1.0

    def calibrate(self, actual: int, counted: int | None = None, factor: float | None = None) -> None:
        """The server counted ``actual`` prompt tokens for the view, or for one that was ``counted`` with ``factor``."""
        counter = self.counter
        counted = self.tokens if counted is None else counted
        if not isinstance(counter, EstimateCounter) or not counted or actual <= 0:
            return
        self.counted_at = actual
        before = counter.factor
        counter.observe(round(counted * before / (factor or self.counted_with)), actual)
        self._drift *= counter.factor / before
        # Counting all again costs; within 2% it would change no decision.
        if abs(self._drift - 1) > 0.02:
            self._drift = 1.0
            self._facts = None
            for history in {id(h): h for h in (self._input, self._spliced)}.values():
                history.recount()
            self._look()

    def _resolve(self) -> None:
        record = self.record
        natives = record.resolve(self._input, self._was_raw) if record is not None else None
        if record is not None and natives is None:
            # It is kept: the history it belongs to may come back (another branch, a sub-task's messages between).
            log.debug("the history matches neither side of the last commit, which is not applied to it")
        self._was_raw = None if natives is None else natives is not self._input.natives
        if natives is None or natives is self._input.natives:
            self.view, self.raw = self._input, False
            return
        self._spliced.update(natives)
        self.view, self.raw = self._spliced, True

    def _look(self) -> None:
        """Let the strategy see the view."""
        view, main = self.view, self.strategy.main
        main.messages = self.settled_view
        volatile = self.prompt.volatile_tail
        main.strategy_data.update(
            tokens=self.tokens,
            sizes=view.sizes[: self._settled] if volatile else view.sizes,
            natives=view.natives[: self._settled] if volatile else view.natives,
            turns=view.assistants,
            growth=self.growth,
            count=self.counter.count,
        )

    def _prompt_facts(self) -> tuple[Prompt, str, int]:
        facts = self._facts
        if facts is None or facts[0] is not self.prompt:
            facts = self._facts = (self.prompt, self.prompt.digest(), self.counter.fixed(self.prompt))
        return facts
