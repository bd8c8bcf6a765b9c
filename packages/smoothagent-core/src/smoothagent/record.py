"""What a commit leaves behind: how to recognise its input and its result again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from smoothagent.history import History

M = TypeVar("M")


class Whole(NamedTuple):
    """Lengths and chain digests of a commit's whole input and of the whole view it returned."""

    input: int
    input_digest: str
    view: int
    view_digest: str


@dataclass(frozen=True, slots=True)
class CommitRecord(Generic[M]):
    """The chain of a commit's covered input, and the head that replaced it (the law, "Again and again").

    Attributes:
        covered: length of the covered input.
        digest: chain digest of the covered input.
        head: the messages that replaced it, in the framework's own type.
        head_digest: chain digest of ``head``.
        whole: tells input and view apart where one begins as the other does, as when a window drops
            all turns after the only user message; None where unknown.
        last: the last object of the returned view, which tells the same where all turns are alike; not persisted.
    """

    covered: int
    digest: str
    head: list[M]
    head_digest: str
    whole: Whole | None = None
    last: M | None = field(default=None, compare=False, repr=False)

    def to_dict(self, wire: Callable[[M], dict[str, Any]]) -> dict[str, Any]:
        """JSON-ready data, for adapters that hand in raw history and must survive a restart."""
        return {
            "covered": self.covered,
            "digest": self.digest,
            "head_digest": self.head_digest,
            "head": [wire(m) for m in self.head],
            "whole": list(self.whole) if self.whole is not None else None,
        }

    @staticmethod
    def from_dict(data: dict[str, Any], load: Callable[[dict[str, Any]], M]) -> CommitRecord[M]:
        """The record that ``to_dict`` wrote; ``load`` makes a framework message of a wire mapping."""
        whole = data.get("whole")
        return CommitRecord(
            data["covered"],
            data["digest"],
            [load(m) for m in data["head"]],
            data["head_digest"],
            Whole(*whole) if whole is not None else None,
        )

    def resolve(self, history: History[M], was_raw: bool | None = None) -> list[M] | None:
        """The view that belongs to an input: ``head`` and what follows.

        The input may extend the raw history or the returned view; None where it is neither.
        ``was_raw`` says what the last input was, for turns that are all alike.
        """
        if self.is_raw(history, was_raw):
            return [*self.head, *history.natives[self.covered :]]
        return history.natives if history.digest(len(self.head)) == self.head_digest else None

    def is_raw(self, history: History[M], was_raw: bool | None = None) -> bool:
        """Whether the input is the raw history (and not the view)."""
        if history.digest(self.covered) != self.digest:
            return False
        if history.digest(len(self.head)) != self.head_digest:
            return True
        # It begins as both do: what it extends whole decides, then what it was before, then the longer match.
        whole = self.whole
        if whole is None:
            return self.covered >= len(self.head) if was_raw is None else was_raw
        extends_input = history.digest(whole.input) == whole.input_digest
        extends_view = history.digest(whole.view) == whole.view_digest
        if extends_input != extends_view:
            return extends_input
        if extends_input:
            # Turns that are all alike. The first input after a commit tells: the view has become shorter.
            return len(history) > whole.input if was_raw is None else was_raw
        return self.covered >= len(self.head) if was_raw is None else was_raw


@dataclass(slots=True)
class CommitReport:
    """One commit, as it turned out.

    Attributes:
        kind: ``lookahead`` (prepared and warm), ``late`` (prepared, not all warm or past its time)
            or ``sync`` (made on the critical path).
        before_tokens: tokens of the request without the commit.
        after_tokens: tokens of the request with it.
        before_messages: messages without it.
        after_messages: messages with it.
        boundary: messages of the old view that were replaced.
        known_tokens: tokens of the new view that were known at the last segment boundary.
        warmed_tokens: tokens of the new view that were prefilled ahead.
        shared_tokens: tokens with which the old view's prompt and the new one's both begin, warm in any case.
        seconds: time spent in ``on_commit``.
        waited: seconds of it spent waiting for a lookahead in flight.
        cached_tokens: cached tokens of the first request after it, once its usage is known.
        ttft: seconds from that request's start to its first token, once known.
    """

    kind: str
    before_tokens: int
    after_tokens: int
    before_messages: int
    after_messages: int
    boundary: int
    known_tokens: int
    warmed_tokens: int
    shared_tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    cached_tokens: int | None = None
    ttft: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return asdict(self)

    def sentence(self) -> str:
        """One line: ``2417 → 1301 tokens, 1217 cached, TTFT 0.41 s``."""
        parts = [f"{self.before_tokens} → {self.after_tokens} tokens"]
        if self.cached_tokens is not None:
            parts.append(f"{self.cached_tokens} cached")
        if self.ttft is not None:
            parts.append(f"TTFT {self.ttft:.2f} s")
        if self.kind != "lookahead":
            parts.append(self.kind)
        return ", ".join(parts)


def covered_after(record: CommitRecord[Any] | None, raw: bool, boundary: int) -> int:
    """Length of the *input* that a commit at ``boundary`` of the view covers."""
    if record is None or not raw:
        return boundary
    return record.covered + max(0, boundary - len(record.head))


def head_after(
    view: Sequence[M], head: Sequence[M], boundary: int, record: CommitRecord[M] | None, raw: bool
) -> list[M]:
    """The new record's head; where the cut lies inside the old head, the rest of that head belongs to it."""
    if record is None or not raw or boundary >= len(record.head):
        return list(head)
    return [*head, *view[boundary : len(record.head)]]
