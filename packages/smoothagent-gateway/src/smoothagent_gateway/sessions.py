"""Which conversation a request belongs to: by its messages, and by a header where its client names one."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from smoothagent import EstimateCounter, LookaheadRuntime, OpenAICodec, Prompt
from smoothagent.history import History
from smoothagent_gateway.body import Body, Kept
from smoothagent_gateway.records import Committed, Records
from smoothagent_gateway.shelf import Shelf, written

Wire = dict[str, Any]
_ONCE_SECONDS = 20.0
"""Seconds after which a conversation of one request, a title perhaps, holds nothing of the server's any more."""
_TURNS = 60
"""Turns that are shown."""


@dataclass(frozen=True, slots=True)
class Space:
    """Whose requests are compared with each other: a client's, of one name where it gives one.

    Attributes:
        id: tells them apart.
        client: tells clients apart, whatever they name.
        name: what the client calls it; None where it does not.
        credentials: headers that the client authorizes itself with.
    """

    id: str
    client: str = field(default="", compare=False)
    name: str | None = field(default=None, compare=False)
    credentials: Mapping[str, str] = field(compare=False, repr=False, default_factory=dict[str, str])


class Turn(NamedTuple):
    """One request, as it turned out.

    Attributes:
        prompt_tokens: of its prompt; None where not told.
        cached_tokens: of these, found in the server's cache.
        ttft: seconds from its arrival to the first that the model said; of an answer that came at once, to that.
        commit: how it was one: ``hit``, ``late``, ``sync`` or ``none``.
        known_tokens: of a commit, tokens of its prompt that were known when its lookahead was made.
        messages: that went on to the server.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    ttft: float | None
    commit: str
    known_tokens: int | None = None
    messages: int = 0


@dataclass(eq=False)
class Session:
    """One conversation.

    Attributes:
        space: whose it is, and what its client calls it.
        name: as headers and page call it.
        runtime: its lookahead.
        system: the system text that its requests begin with, where that is apart.
        seen: the messages of its last request, without that.
        chain: the chain digests of these.
        asks: the first of these that is no system text.
        prompt: what else shaped that.
        answer: the message with its answer, as the next request is taken to have it.
        kept: its last request's body, as the next one goes on from it.
        tail: how many of its last messages are rewritten on every call.
        held: by whose request is under way; None where none is.
        requests: how many it had.
        used: when the last one came, on the monotonic clock.
        size: bytes of that.
        turns: the newest ones.
        resting: it holds nothing of the server's.
    """

    space: Space
    name: str
    runtime: LookaheadRuntime[Wire]
    system: str | None = None
    seen: list[Wire] = field(default_factory=list[Wire])
    chain: list[str] = field(default_factory=list[str])
    asks: int = 0
    prompt: Prompt = field(default_factory=Prompt)
    answer: Wire | None = None
    kept: Kept | None = None
    tail: int = 0
    held: object = None
    requests: int = 0
    used: float = 0.0
    size: int = 0
    turns: deque[Turn] = field(default_factory=lambda: deque[Turn](maxlen=_TURNS))
    resting: bool = False

    @property
    def busy(self) -> bool:
        """Whether a request of it is under way."""
        return self.held is not None

    def told(self, prompt: Prompt) -> Prompt:
        """A request's prompt: the same object as long as it is the same, since another one is counted anew."""
        if self.tail:
            prompt = replace(prompt, volatile_tail=self.tail)
        if prompt != self.prompt:
            self.prompt = prompt
        return self.prompt


class Sessions:
    """The conversations in memory, and those that a restart has left in `Records`.

    A request belongs to the conversation whose last request it extends, all but that one's last message: some harnesses
    rewrite it on every call, and others ask something aside in its place. Where there is none, or it is being answered,
    the request begins a new one, which goes on from the commit that covers most of it (`Records`). Another system text
    before the same messages makes another conversation, since nothing that was prepared for one is warm for the other;
    what was committed holds for both.

    Args:
        make: makes the runtime of a session.
        records: what commits have left.
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
        records: Records,
        limit: int = 256,
        idle_seconds: float = 900.0,
        memory_bytes: int = 512 * 2**20,
        tail: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._records, self._clock = make, records, clock
        self._limit, self._idle, self._memory, self._tail = limit, idle_seconds, memory_bytes, tail
        self._sessions: Shelf[Session] = Shelf()
        self._tails: OrderedDict[str, int] = OrderedDict()
        self._opening: set[str] = set()
        self._codec = OpenAICodec()

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[Session]:
        """Those in memory, the newest last."""
        return list(self._sessions)

    def read(self, data: bytes) -> Body:
        """A request's body; what a conversation's last one began with is not read again.

        Raises:
            RefusedError: it is no JSON object.
        """
        best, longest = None, 0
        for session in reversed(self._sessions):
            if session.kept is not None and (shared := session.kept.shared(data)) > longest:
                best, longest = session.kept, shared
        return Body(data, None if best is None else best.begins(longest))

    async def find(
        self, space: Space, messages: Sequence[Wire], system: str | None = None
    ) -> tuple[Session, list[Wire]]:
        """The conversation of a request, and its messages: those it had are the same objects.

        Args:
            space: whose it is.
            messages: the request's, without what `system_apart` takes off.
            system: that text.

        Raises:
            HistoryError: they are no history.
        """
        chain: list[str] | None = None
        found, length = _repeating(self._sessions.beginning(_beginning(space, system, messages)), messages)
        if found is None:
            chain = self._digests(messages)
            known = [s for s in reversed(self._sessions) if s.space.id == space.id and s.system == system]
            found, length = _alike(known, chain)
        if found is None or found.busy:
            chain = self._digests(messages) if chain is None else chain
            return await self._new(space, system, chain), list(messages)
        if length < len(found.seen):
            self._taken_back(found, found.chain[:length], len(messages))
        same = [mine if mine == new else new for mine, new in zip(found.seen, messages, strict=False)]
        answer = found.answer
        if answer is not None and len(same) < len(messages) and _is_written_as(answer, messages[len(same)]):
            same.append(answer)
        return found, [*same, *messages[len(same) :]]

    @contextlib.contextmanager
    def using(self, session: Session, holder: object) -> Generator[None]:
        """While a request is answered; `free` ends it before that. One that was never taken is none.

        Args:
            session: the conversation.
            holder: stands for the request: the next one may have begun when this one ends.
        """
        session.held, session.used = holder, self._clock()
        try:
            yield
        finally:
            self.free(session, holder)
            if session.name in self._opening:
                self._opening.discard(session.name)
                session.runtime.close()

    def free(self, session: Session, holder: object) -> None:
        """It has been answered: the next request may be its own."""
        session.used = self._clock()
        if session.held is holder:
            session.held = None

    def take(self, session: Session, messages: list[Wire], size: int, kept: Kept | None = None) -> None:
        """The conversation has gone on with these messages, which its runtime has taken.

        Args:
            session: the conversation.
            messages: its request's.
            size: bytes of that.
            kept: the same, to read the next one from.
        """
        before, chain = session.chain, session.runtime.digests
        self._learn(session, messages, _shared(before, chain))
        session.seen, session.chain, session.size, session.resting = messages, chain, size, False
        session.asks = next((i for i, m in enumerate(messages) if _is_asked(m)), len(messages))
        session.answer, session.kept = None, kept
        session.requests += 1
        self._opening.discard(session.name)
        self._sessions.put(session, _beginning(session.space, session.system, messages))
        if self._crowded:
            self.sweep()

    def remember(self, session: Session, *, first: bool) -> None:
        """It was committed: what its history, a branch of it or a restart needs is kept.

        Args:
            session: the conversation.
            first: nothing of its history was transformed before.
        """
        record = session.runtime.record
        if record is not None:
            self._records.put(session.space.id, Committed(record, session.name, first))

    def sweep(self) -> None:
        """Free what is idle, and the oldest of what is too much. Also for whoever has a clock."""
        now, newest = self._clock(), next(reversed(self._sessions), None)
        for session in list(self._sessions):
            idle = now - session.used
            if session.busy:
                continue
            if idle > self._idle or (self._crowded and session is not newest):
                self._sessions.drop(session.name)
                session.runtime.close()
            elif session.requests == 1 and not session.resting and idle > _ONCE_SECONDS:
                session.runtime.rest()
                session.resting = True
        while len(self._tails) > 4 * self._limit:
            self._tails.popitem(last=False)

    def close(self) -> None:
        """All are over."""
        for session in list(self._sessions):
            self._sessions.drop(session.name)
            session.runtime.close()

    @property
    def _crowded(self) -> bool:
        return len(self._sessions) > self._limit or self._sessions.total > self._memory

    # ---- which it is ---------------------------------------------------------------------------

    def _taken_back(self, session: Session, chain: Sequence[str], length: int) -> None:
        """Its history is not what it was: the commit to go on from may be an earlier one."""
        committed = self._records.known(session.space.id, chain, length)
        record = session.runtime.record
        if committed is not None:
            if committed.record is not record:
                session.runtime.restore(committed.record)
        elif record is not None and self._records.has(session.space.id, record):
            session.runtime.restore(None)

    def _learn(self, session: Session, messages: Sequence[Wire], shared: int) -> None:
        """Whether its last message is one that is rewritten on every call: then the answer has come in its place."""
        before, now = session.seen, messages
        if self._tail is not None or not before or len(now) <= len(before) or shared >= len(now):
            return
        if now[shared].get("role") != "assistant":
            return  # something was asked aside, or the history was edited
        if shared == len(before):
            session.tail = 0
        elif shared == len(before) - 1 and now[-1].get("role") == before[-1].get("role"):
            session.tail = 1
        self._tails[session.space.client] = session.tail

    async def _new(self, space: Space, system: str | None, chain: Sequence[str]) -> Session:
        committed = await self._records.find(space.id, chain)
        name = uuid.uuid4().hex[:12]
        if committed is not None and committed.name not in self._sessions and committed.name not in self._opening:
            name = committed.name
        self._opening.add(name)
        session = Session(space, name, self._make(space, name), system)
        session.tail = self._tail if self._tail is not None else self._tails.get(space.client, 0)
        session.runtime.restore(None if committed is None else committed.record)
        return session

    def _digests(self, messages: Sequence[Wire]) -> list[str]:
        history: History[Wire] = History(self._codec, EstimateCounter().count)
        history.update(messages)
        return history.digests()


def _repeating(known: Sequence[Session], messages: Sequence[Wire]) -> tuple[Session | None, int]:
    """The conversation whose messages are repeated to the letter, which costs nothing to see, and how many are."""
    return _longest((s, _repeated(s.seen, messages, s.asks)) for s in known)


def _alike(known: Sequence[Session], chain: Sequence[str]) -> tuple[Session | None, int]:
    """The same where a client renders them anew: mints ids, leaves reasoning out."""
    lengths = ((s, _shared(s.chain, chain)) for s in known)
    enough = ((s, n) for s, n in lengths if n >= max(1, len(s.chain) - 1) and s.asks < n)
    return _longest(enough)


def _longest(found: Iterable[tuple[Session, int]]) -> tuple[Session | None, int]:
    """The one with most in common; of those one that is not being answered; of those the newest, which comes first."""
    best: tuple[Session | None, int] = (None, 0)
    for session, length in found:
        before = (best[1], best[0] is not None and not best[0].busy)
        if length and (length, not session.busy) > before:
            best = (session, length)
    return best


def _repeated(seen: list[Wire], messages: Sequence[Wire], asks: int) -> int:
    """How many messages are the same, where that is all of ``seen``, or all but the last; else 0.

    Args:
        seen: those of a conversation, which asks first at ``asks``.
        messages: those of a request.
        asks: see there.
    """
    most = len(seen)
    if not asks < len(messages) >= most - 1 or most == 0:
        return 0
    try:
        # Conversations that have most of their text in common (a system prompt) mostly differ in these.
        if any(seen[i] != messages[i] for i in {asks, most - 2} if 0 <= i < most - 1):
            return 0
        for length in (most, most - 1):
            if asks < length <= len(messages) and seen[:length] == messages[:length]:
                return length
    except RecursionError:
        pass
    return 0


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common prefix of two chains: where they differ once they differ from there on."""
    most = min(len(a), len(b))
    return bisect.bisect_left(range(most), True, key=lambda i: a[i] != b[i])


def _is_written_as(a: object, b: object) -> bool:
    """Equal, and in the same order: templates print calls as they stand."""
    if isinstance(a, dict) and isinstance(b, dict):
        one, other = cast("Wire", a), cast("Wire", b)
        return list(one) == list(other) and all(_is_written_as(one[k], other[k]) for k in one)
    if isinstance(a, list) and isinstance(b, list):
        these, those = cast("list[object]", a), cast("list[object]", b)
        return len(these) == len(those) and all(map(_is_written_as, these, those))
    return type(cast("object", a)) is type(b) and a == b


def _beginning(space: Space, system: str | None, messages: Sequence[Wire]) -> Hashable:
    """What conversations that a request may go on with have in common with it."""
    asked = next((m for m in messages if _is_asked(m)), None)
    return space.id, system, None if asked is None else written(asked)


def _is_asked(message: Wire) -> bool:
    return message.get("role") not in ("system", "developer")


def system_apart(messages: Sequence[Wire]) -> list[Wire]:
    """The message of a request that is its system text and no more, which a `Prompt` has apart; else none.

    Harnesses change it in the middle of a conversation (other tools, the date), which goes on all the same.
    """
    first = messages[0]
    if len(messages) < 2 or first.get("role") != "system" or not isinstance(first.get("content"), str):
        return []
    return [first] if first.keys() == {"role", "content"} and _is_asked(messages[1]) else []


def space_of(given: Mapping[str, str], name: str | None, credentials: Mapping[str, str]) -> Space:
    """The space of a request.

    Args:
        given: what its client authorizes itself with.
        name: the header, and what its client calls the conversation in it; None where it does not.
        credentials: what goes upstream for it.
    """
    client = "\0".join(f"{k}={v}" for k, v in sorted(given.items()))
    called = None if name is None else name.partition("=")[2]
    return Space(_hashed(f"{client}\0{name or ''}"), _hashed(client), called, credentials)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
