"""The conversations of one LLM object, and which of them a call is about."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM

from smoothagent import Backend, Delegation, LookaheadRuntime, LookaheadStrategy, Prompt, RuntimePool
from smoothagent.forks import after_fork
from smoothagent.lane import process_lane
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike
from smoothagent_llamaindex.models import backend_for, given_for, same_model, to_wire_of

_TWINS = 16
"""Conversations at once that begin alike."""
_OPENINGS = 1024
"""Openings whose conversations are remembered."""

_GRACE = 30.0
"""Seconds for which a conversation that nothing holds may be taken up again."""

_named: ContextVar[str | None] = ContextVar("smoothagent_conversation", default=None)


@contextmanager
def conversation_named(name: str | None) -> Generator[None]:
    """LLM calls inside belong to the conversation of that name; None: their messages tell."""
    token = _named.set(name)
    try:
        yield
    finally:
        _named.reset(token)


def is_named() -> bool:
    """Whether an agent of ours makes the call."""
    return _named.get() is not None


class Conversation(LookaheadRuntime[ChatMessage]):
    """Lookahead for one conversation of an agent's.

    Attributes:
        llm: the LLM it was made for.
        last: the messages it consisted of after its last call.
    """

    def __init__(
        self,
        session: str,
        llm: LLM,
        strategy: LookaheadStrategy,
        backend: Backend,
        *,
        lookahead: bool,
        ceiling: int | None,
    ) -> None:
        codec = LlamaIndexCodec(to_wire_of(llm))
        super().__init__(strategy, backend=backend, codec=codec, session=session, ceiling=ceiling, lookahead=lookahead)
        self.llm = llm
        self.last: list[ChatMessage] = []

    def goes_on_in(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether these messages go on with it, as far as its ends tell; what is spliced is another question."""
        last = self.last
        return len(messages) > len(last) > 0 and alike(messages[len(last) - 1], last[-1])

    def shared_with(self, messages: Sequence[ChatMessage]) -> int:
        """How many of its messages are the first of these."""
        pairs = enumerate(zip(self.last, messages, strict=False))
        return next((i for i, (a, b) in pairs if not alike(a, b)), min(len(self.last), len(messages)))

    def say_once(self, topic: str, text: str) -> None:
        """Warn, once a conversation and topic."""
        self._observer.say_once(topic, text)

    def asked_as(self, prompt: Prompt) -> Prompt:
        """``prompt``, or the same object as before where it says the same: another is counted and digested anew."""
        return self.prompt if prompt == self.prompt else prompt


_all: weakref.WeakSet[Conversations] = weakref.WeakSet()


def ended(name: str, *, for_good: bool, still: Callable[[], bool]) -> None:
    """Whatever held the conversations of this name is gone. Called by the garbage collector, anywhere.

    Args:
        name: which.
        for_good: as `Conversations.end` takes it.
        still: whether something holds them after all: workflows put copies in the place of what they hold.
    """
    process_lane().later(lambda: process_lane().spawn(_end_later(name, for_good, still)))


async def _end_later(name: str, for_good: bool, still: Callable[[], bool]) -> None:
    await asyncio.sleep(_GRACE)
    if not still():
        for conversations in tuple(_all):
            conversations.end(name, for_good=for_good)


class Taken(NamedTuple):
    """A conversation that one call has for itself.

    Attributes:
        owner: whom it is given back to.
        key: which one it is there.
        conversation: itself.
    """

    owner: Conversations
    key: str
    conversation: Conversation

    def give_back(self) -> None:
        """The call has ended."""
        self.owner.give_back(self.key)


class Conversations:
    """Finds the conversation of a call: by name where an agent of ours makes it, else by its opening messages.

    The chain decides what may be committed (the law, 6), so a wrong guess costs warmth only.

    Args:
        strategy: makes the strategy of a new conversation.
        warm: as `backend_for` says.
        backend: the agent's server, instead of the one that `backend_for` finds.
        lookahead: False transforms on the critical path only.
        ceiling: tokens that an uncommitted request may never reach.
        limit: most conversations at once.
    """

    def __init__(
        self,
        strategy: Callable[[], LookaheadStrategy],
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
        lookahead: bool = True,
        ceiling: int | None = None,
        limit: int = 256,
    ) -> None:
        self._strategy, self._warm, self._backend = strategy, warm, backend
        self._lookahead, self._ceiling = lookahead, ceiling
        # Two LLM objects may serve one name: each has a conversation of its own at the server.
        self._mine = uuid.uuid4().hex[:8]
        self._making: dict[str, tuple[LLM, str | None]] = {}
        self._busy: set[str] = set()
        self._twins: OrderedDict[str, int] = OrderedDict()
        self.pool: RuntimePool[ChatMessage] = RuntimePool(self._make, limit=limit)
        self._start_afresh()
        after_fork(self._start_afresh)
        _all.add(self)

    def _start_afresh(self) -> None:
        # Reentrant: a garbage collection that ends a stream may find it taken.
        self._lock = threading.RLock()
        self._busy = set()

    def take(
        self,
        llm: LLM,
        opening: str,
        messages: Sequence[ChatMessage],
        delegation: Delegation[ChatMessage] | None = None,
    ) -> Taken | None:
        """The conversation that is about to send ``messages``; nobody else gets it until it is given back.

        None where too many that begin alike are under way: that call goes as it is.

        Args:
            llm: the LLM that it is about to call.
            opening: what tells it from others, as `opening_of` says.
            messages: as the agent sends them.
            delegation: what was warmed for it, where it is a sub-agent's first call: it goes on in that stream.
        """
        self.pool.sweep()
        with self._lock:
            key = self._key(opening, messages) if delegation is None else self._new(opening)
            if key is None:
                return None
            self._busy.add(key)
        try:
            conversation = self._open(key, llm, delegation)
            if delegation is not None:
                conversation.go_on_from(delegation)
            return Taken(self, key, conversation)
        except BaseException:
            self.give_back(key)
            raise

    def give_back(self, key: str) -> None:
        """A call has ended. Without the lock, which a garbage collection that ends a stream may find taken."""
        self._busy.discard(key)

    def end(self, name: str, *, for_good: bool) -> None:
        """Whatever held the conversation of this name is gone.

        Args:
            name: which.
            for_good: nobody can go on with it; else it keeps its record, and nothing of the server's.
        """
        with self._lock:
            count = self._twins.pop(name, 0) if for_good else self._twins.get(name, 0)
        for key in (f"{name}\0{i}" for i in range(count)):
            if for_good:
                self.pool.drop(key)
            elif (known := self.pool.peek(key)) is not None:
                known.rest()

    def _key(self, opening: str, messages: Sequence[ChatMessage]) -> str | None:
        """One that goes on in these messages, else the most alike that nobody uses, else a new one."""
        count = self._twins.get(opening, 0)
        free = [key for i in range(count) if (key := f"{opening}\0{i}") not in self._busy]
        known = {key: found for key in free if isinstance(found := self.pool.peek(key), Conversation)}
        for key, conversation in known.items():
            if conversation.goes_on_in(messages):
                return key
        if is_named() and free:
            # Told by its memory, whatever of its history that gives; a second one is for calls at the same time.
            return max(known, key=lambda key: known[key].shared_with(messages), default=free[0])
        # An edited history is still its conversation's, where half of that is in it; others only begin alike.
        likest = max(known, key=lambda key: known[key].shared_with(messages), default=None)
        if likest is not None and 2 * known[likest].shared_with(messages) >= len(known[likest].last):
            return likest
        if unused := [key for key in free if key not in known]:
            return unused[0]
        return likest if count >= _TWINS else self._new(opening)

    def _new(self, opening: str) -> str | None:
        """One that there has not been; None where there are too many that begin alike."""
        count = self._twins.get(opening, 0)
        if count >= _TWINS:
            return None
        self._twins[opening] = count + 1
        self._twins.move_to_end(opening)
        while len(self._twins) > _OPENINGS:
            self._twins.popitem(last=False)
        return f"{opening}\0{count}"

    def _open(self, key: str, llm: LLM, delegation: Delegation[ChatMessage] | None) -> Conversation:
        with self._lock:
            found = self.pool.find(key) if delegation is None else None
            if isinstance(found, Conversation) and (found.llm is llm or same_model(found.llm, llm)):
                return found
            self.pool.drop(key)
            self._making[key] = (llm, None if delegation is None else delegation.session)
            try:
                made = self.pool.get(key)
            finally:
                self._making.pop(key, None)
        assert isinstance(made, Conversation)
        return made

    def _make(self, key: str) -> Conversation:
        llm, session = self._making[key]
        backend = given_for(self._backend, llm) or backend_for(llm, warm=self._warm)
        return Conversation(
            *(session or f"{self._mine}\0{key}", llm, self._strategy(), backend),
            lookahead=self._lookahead,
            ceiling=self._ceiling,
        )


def opening_of(messages: Sequence[ChatMessage], prompt: Prompt) -> str:
    """What tells a conversation from others: its name, or its system text, its tools and its first message."""
    name = _named.get()
    if name is not None:
        return name
    digest = hashlib.sha256()
    for tool in prompt.tools:
        digest.update(repr(tool).encode("utf-8", "surrogatepass"))
    for message in messages:
        digest.update(f"{message.role}{message.content}\0".encode("utf-8", "surrogatepass"))
        if message.role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            break
    return digest.hexdigest()[:32]
