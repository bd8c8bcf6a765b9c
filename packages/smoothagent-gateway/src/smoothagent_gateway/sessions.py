"""Which conversation a request belongs to: by its messages, and by a header where its client names one."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from smoothagent import EstimateCounter, HistoryError, LookaheadRuntime, OpenAICodec, Prompt
from smoothagent.history import History
from smoothagent.message import alike
from smoothagent_gateway.records import Records

Wire = dict[str, Any]
_ONCE_SECONDS = 20.0
"""Seconds after which a conversation of one request, a title perhaps, holds nothing of the server's any more."""
_TURNS = 200
"""Turns that are shown."""


class Space(NamedTuple):
    """Whose requests are compared with each other: a client's, of one name where it gives one.

    Attributes:
        id: tells them apart.
        key: what the client authorizes itself with.
    """

    id: str
    key: str


class Turn(NamedTuple):
    """One request, as it turned out.

    Attributes:
        prompt_tokens: of its prompt; None where not told.
        cached_tokens: of these, found in the server's cache.
        ttft: seconds from its arrival to the first that the model said.
        commit: how it was one: ``hit``, ``late``, ``sync`` or ``none``.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    ttft: float | None
    commit: str


@dataclass(eq=False)
class Session:
    """One conversation.

    Attributes:
        space: whose it is, and what its client calls it.
        name: as headers and page call it.
        runtime: its lookahead.
        seen: the messages of its last request.
        prompt: what else shaped that.
        tail: how many of its last messages are rewritten on every call; None where that is not known yet.
        busy: a request of it is under way.
        requests: how many it had.
        used: when the last one came, on the monotonic clock.
        size: bytes of that.
        turns: the newest ones.
        resting: it holds nothing of the server's.
    """

    space: Space
    name: str
    runtime: LookaheadRuntime[Wire]
    seen: list[Wire] = field(default_factory=list[Wire])
    prompt: Prompt = field(default_factory=Prompt)
    tail: int | None = None
    busy: bool = False
    requests: int = 0
    used: float = 0.0
    size: int = 0
    turns: deque[Turn] = field(default_factory=lambda: deque[Turn](maxlen=_TURNS))
    resting: bool = False

    def told(self, prompt: Prompt) -> Prompt:
        """A request's prompt: the same object as long as it is the same, since another one is counted anew."""
        if self.tail:
            prompt = replace(prompt, volatile_tail=self.tail)
        if prompt != self.prompt:
            self.prompt = prompt
        return self.prompt


class Sessions:
    """The conversations in memory, and those that a restart has left in `Records`.

    A request belongs to the conversation whose last request it extends, all but a volatile tail. Where none is, or
    that one is being answered, it is a new one; it takes over the commit of the one it has most in common with, which
    holds as far as the messages are the same (`smoothagent.CommitRecord`).

    Args:
        make: makes the runtime of a session.
        records: what a restart has left.
        limit: most conversations at once.
        idle_seconds: how long an unused one is kept.
        memory_bytes: most bytes of their last requests.
        tail: the volatile tail, where it was told.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        make: Callable[[Space, str], LookaheadRuntime[Wire]],
        *,
        records: Records | None = None,
        limit: int = 256,
        idle_seconds: float = 900.0,
        memory_bytes: int = 512 * 2**20,
        tail: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._records, self._clock = make, records, clock
        self._limit, self._idle, self._memory, self._tail = limit, idle_seconds, memory_bytes, tail
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._tails: dict[Space, int] = {}
        self._codec = OpenAICodec()

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[Session]:
        """Those in memory, the newest last."""
        return list(self._sessions.values())

    async def find(self, space: Space, messages: Sequence[Wire]) -> tuple[Session, list[Wire]]:
        """The conversation of a request, and its messages: those it had are the same objects.

        Raises:
            HistoryError: they are no history.
        """
        found = self._known(space, messages)
        if found is None or found[0].busy:
            origin = found[0] if found is not None else self._nearest(space, messages)
            session = await self._new(space, messages, origin)
            return session, list(messages)
        session, length = found
        self._learn(session, messages, length)
        same = session.seen[:length]
        return session, [
            *(mine if mine == new else new for mine, new in zip(same, messages, strict=False)),
            *messages[length:],
        ]

    @contextlib.contextmanager
    def using(self, session: Session, messages: list[Wire], size: int) -> Generator[None]:
        """While a request is answered."""
        session.busy = True
        session.seen, session.size, session.resting = messages, size, False
        session.requests += 1
        session.used = self._clock()
        self._sessions.pop(session.name, None)
        self._sessions[session.name] = session
        self._free(session)
        try:
            yield
        finally:
            session.busy = False
            session.used = self._clock()

    def remember(self, session: Session) -> None:
        """It was committed: what a restart needs is written."""
        record = session.runtime.record
        if self._records is not None and record is not None:
            self._records.put(session.space.id, session.name, record)

    def close(self) -> None:
        """All are over."""
        for session in self._sessions.values():
            session.runtime.close()
        self._sessions.clear()

    # ---- which it is ---------------------------------------------------------------------------

    def _known(self, space: Space, messages: Sequence[Wire]) -> tuple[Session, int] | None:
        """The conversation that is extended, and how many messages it has in common with the request."""
        found = list[tuple[int, bool, float, Session]]()
        for session in self._sessions.values():
            if session.space != space:
                continue
            least = len(session.seen) - (1 if session.tail is None else session.tail)
            length = self._shared(session.seen, messages)
            if length >= max(1, least) and self._has_a_question(messages[:length]):
                found.append((length, not session.busy, session.used, session))
        if not found:
            return None
        length, _, _, session = max(found, key=lambda one: one[:3])
        return session, length

    def _nearest(self, space: Space, messages: Sequence[Wire]) -> Session | None:
        """One with a commit, that has most in common with the request."""
        shared = [
            (self._shared(s.seen, messages), s.used, s)
            for s in self._sessions.values()
            if s.space == space and s.runtime.record is not None
        ]
        length, _, session = max(shared, key=lambda one: one[:2], default=(0, 0.0, None))
        return session if length else None

    def _shared(self, seen: Sequence[Wire], messages: Sequence[Wire]) -> int:
        for i, (mine, theirs) in enumerate(zip(seen, messages, strict=False)):
            if mine is not theirs and mine != theirs and not self._alike(mine, theirs):
                return i
        return min(len(seen), len(messages))

    def _alike(self, mine: Wire, theirs: Wire) -> bool:
        said, asked = mine.get("content"), theirs.get("content")
        if isinstance(said, str) and isinstance(asked, str) and said != asked:
            return False  # of most conversations' messages this tells, and decoding all of them would take its time
        # Clients mint ids anew, and leave reasoning out.
        return mine.get("role") == theirs.get("role") and alike(
            self._codec.decode(mine), self._codec.decode(theirs), reasoning=False
        )

    def _has_a_question(self, messages: Sequence[Wire]) -> bool:
        return any(m.get("role") not in ("system", "developer") for m in messages)

    def _learn(self, session: Session, messages: Sequence[Wire], shared: int) -> None:
        """Whether its last message is one that is rewritten on every call."""
        grown = len(messages) - len(session.seen)
        if self._tail is not None or grown <= 0:
            return
        if shared == len(session.seen):
            session.tail = 0
        elif messages[-1].get("role") == session.seen[-1].get("role"):
            session.tail = 1
        self._tails[session.space] = session.tail or 0

    async def _new(self, space: Space, messages: Sequence[Wire], origin: Session | None) -> Session:
        name, record = uuid.uuid4().hex[:12], None
        if origin is not None:
            record = origin.runtime.record
        elif self._records is not None and len(messages) > 2:
            found = await self._records.find(space.id, self._digests(messages))
            if found is not None:
                record = found.record
                name = found.name if found.name not in self._sessions else name
        self._let_go()
        session = Session(space, name, self._make(space, name), tail=self._tail)
        if self._tail is None:
            session.tail = self._tails.get(space)
        session.runtime.restore(record)
        return session

    def _digests(self, messages: Sequence[Wire]) -> list[str]:
        history: History[Wire] = History(self._codec, EstimateCounter().count)
        with contextlib.suppress(HistoryError):
            history.update(messages)
        return history.digests()

    # ---- bounds --------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """A conversation of one request, a title perhaps, holds nothing of the server's after a while."""
        now = self._clock()
        for session in self._sessions.values():
            if session.requests == 1 and not (session.busy or session.resting) and now > session.used + _ONCE_SECONDS:
                session.runtime.rest()
                session.resting = True

    def _free(self, wanted: Session) -> None:
        now, total = self._clock(), sum(s.size for s in self._sessions.values())
        for session in list(self._sessions.values()):
            expired = now > session.used + self._idle
            if len(self._sessions) <= self._limit and total <= self._memory and not expired:
                break
            if session.busy or session is wanted:
                continue
            del self._sessions[session.name]
            total -= session.size
            session.runtime.close()
        while len(self._tails) > 4 * self._limit:
            self._tails.pop(next(iter(self._tails)))


def space_of(authorization: str | None, name: str | None) -> Space:
    """The space of a request with these two headers."""
    parts = f"{authorization or ''}\0{name or ''}"
    kind, _, key = (authorization or "").partition(" ")
    digest = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return Space(digest, key.strip() if kind.lower() == "bearer" else "")
