"""What a context-engineering strategy implements (paper section 3.2, Listing 1).

Two ways, either is enough:

* the paper's four methods on ``self.main`` and ``self.la`` (`LookaheadStrategy`);
* ``cut`` and ``rewrite`` (`CutStrategy`), from which the four are derived. Then
  ``View(H, c) = P ‖ rewrite(H[|P|:c]) ‖ H[c:]``.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from smoothagent.errors import ConfigurationError
from smoothagent.limits import Growth
from smoothagent.message import Message, leading_system
from smoothagent.prompt import Prompt
from smoothagent.state import LookaheadState, MainState


class Model(Protocol):
    """The model as a strategy may use it; requests are marked as lookahead work."""

    async def generate(self, messages: Sequence[Message], *, max_tokens: int, accept_cut_off: bool = False) -> str:
        """The text of the model's answer to ``messages``.

        Raises SummaryRejectedError for an answer that is empty, cut off, or calls tools,
        BackendError where the server fails.
        """
        ...


class Commit(NamedTuple):
    """A transformed view: ``head`` stands for the first ``covered`` messages, the rest is verbatim."""

    covered: int
    head: list[Message]


class Prediction(NamedTuple):
    """What the next commit is predicted to send.

    Attributes:
        cut: the boundary c.
        tail: whether ``H[c:]`` will follow verbatim, so that it is worth warming too.
    """

    cut: int
    tail: bool


class LookaheadStrategy(ABC):
    """A strategy in the paper's terms. One object belongs to one conversation.

    ``transform`` runs beside the agent on a copy of the strategy with a frozen ``main`` and its own
    ``la``; the new ``la`` is published on success and thrown away on failure. It may be ``async``.

    Attributes:
        main: the working context, set by the runtime before each call.
        la: the lookahead context.
        model: the model for ``transform``, or None where the runtime has no backend.
        exact: model-free: `commit` recomputes the synchronous result, so nothing prepared can be stale.
        extend_inline: at the commit, run ``transform`` once more over what came after
            ``la.last_segment_end`` (the paper's ``++ T(messages[la.last_segment_end:])``);
            False leaves that tail verbatim.
        defer: a commit may wait for a lookahead in flight, up to the ceiling.
        hard: the token trigger, if there is one.
        needs_model: ``transform`` cannot do without ``model``.
        minimum_saving: fraction of the tokens that a commit must save to be made.
    """

    exact: bool = False
    extend_inline: bool = True
    defer: bool = True
    hard: int | None = None
    needs_model: bool = False
    minimum_saving: float = 0.0

    def __init__(self) -> None:
        self.main = MainState()
        self.la = LookaheadState()
        self.model: Model | None = None
        self._owner: weakref.ref[Any] | None = None

    def belong_to(self, runtime: object) -> None:
        """One strategy, one conversation: its state would else be another's at any moment.

        Raises:
            ConfigurationError: it belongs to another runtime that is not closed.
        """
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner is not runtime and not owner.closed:
            raise ConfigurationError(
                f"this {type(self).__name__} belongs to session {owner.session!r} already: pass a factory "
                f"(lambda: {type(self).__name__}(...)), so that every runtime gets a strategy of its own"
            )
        self._owner = weakref.ref(runtime)

    @abstractmethod
    def should_lookahead(self) -> bool:
        """Whether the newly available segment should be transformed now."""

    @abstractmethod
    def transform(self) -> Awaitable[None] | None:
        """Extend ``la.transformed`` and ``la.last_segment_end`` over ``main.messages``."""

    @abstractmethod
    def should_commit(self) -> bool:
        """Whether the prepared prefix should replace the working one now."""

    def should_promote(self) -> bool:
        """Whether pending lookahead work should be raised; by default when a commit is due."""
        return self.should_commit()

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt this strategy cannot work with. Raises ConfigurationError."""
        del prompt

    def bind(self, model: Model | None) -> None:
        """Called once by the runtime with the model to use."""
        self.model = model

    def commit(self, history: Sequence[Message]) -> Commit | None:
        """What to splice into ``history`` now. None: what is prepared does not fit what is due."""
        del history
        return Commit(self.la.last_segment_end, list(self.la.transformed))

    def tail_fits(self, tail_tokens: int, view_tokens: int, boundary: int) -> str:
        """``ok``, or ``short``/``long`` where a prepared result leaves too little or too much verbatim.

        Args:
            tail_tokens: tokens that would stay verbatim.
            view_tokens: tokens of the next prompt with the result, system text and tools included.
            boundary: messages of ``main.messages`` that the result stands for.
        """
        del tail_tokens, view_tokens, boundary
        return "ok"

    def warmable(self, history: Sequence[Message]) -> list[Message]:
        """The part of the next commit's view that is certain by now: what is worth prefilling."""
        end = self.la.last_segment_end
        tail = history[end:] if self.la.strategy_data.get("tail") else ()
        return [*self.la.transformed, *tail]

    def refuse(self, before: int, after: int) -> str | None:
        """Why a transformation from ``before`` to ``after`` tokens is not worth it, or None."""
        minimum = int(before * self.minimum_saving)
        if before - after < minimum:
            return f"it would save {max(0, before - after)} of {before} tokens, less than {minimum}"
        return None

    def snapshot(self, la: LookaheadState | None = None) -> Self:
        """A shallow copy for the lane, with a frozen ``main`` and a ``la`` of its own."""
        twin = copy.copy(self)
        twin.main = MainState(list(self.main.messages), dict(self.main.strategy_data))
        source = la or self.la
        twin.la = LookaheadState(list(source.transformed), source.last_segment_end, dict(source.strategy_data))
        return twin

    def computed_anew(self) -> bool:
        """Whether the commit that is due now would be computed anew, so that only its warmth can be late."""
        return self.exact

    @property
    def waits_for(self) -> int | None:
        """The token trigger at which a commit may have to wait for a lookahead: the ceiling is a quarter above it."""
        return self.hard

    @property
    def tokens(self) -> int:
        """Tokens of the next prompt, as counted by the runtime."""
        return int(self.main.strategy_data.get("tokens", 0))

    @property
    def on_critical_path(self) -> bool:
        """Whether ``transform`` runs on the critical path, for the commit that is due, and not ahead of time."""
        return bool(self.main.strategy_data.get("now"))

    @property
    def sizes(self) -> Sequence[int]:
        """Tokens of each message of ``main.messages``."""
        return self.main.strategy_data.get("sizes", ())

    def count(self, message: Message) -> int:
        """Tokens of one message, by the runtime's counter."""
        counter = self.main.strategy_data.get("count")
        return int(counter(message)) if counter is not None else 0

    def main_with(self, history: Sequence[Message]) -> MainState:
        """The main state this conversation would have with another history."""
        known = {id(m): n for m, n in zip(self.main.messages, self.sizes, strict=False)}
        sizes = [known[id(m)] if id(m) in known else self.count(m) for m in history]
        fixed = self.tokens - sum(self.sizes)
        facts = dict(self.main.strategy_data, sizes=sizes, tokens=fixed + sum(sizes), turns=None)
        return MainState(list(history), facts)

    @property
    def growth(self) -> Growth:
        """Measured growth of this conversation."""
        return self.main.strategy_data.get("growth") or Growth()


class CutStrategy(LookaheadStrategy):
    """A strategy given by where it cuts and what becomes of the part before the cut.

    Attributes:
        exact: as above: a commit is ``View(H', cut(H'))``, computed anew. False where ``rewrite``
            needs a model: then the prepared cut is used.
        positional: ``rewrite`` keeps the number of messages, so positions stay comparable.
    """

    exact = True
    positional: bool = False

    @abstractmethod
    def cut(self, history: Sequence[Message]) -> int:
        """The boundary c >= |P| for a transformation of ``history`` now. Reads all of it."""

    @abstractmethod
    def rewrite(self, covered: Sequence[Message]) -> list[Message] | Awaitable[list[Message]]:
        """What stands for ``covered = H[|P|:c]``. Reads nothing else of the history.

        An unchanged message is returned as the same object.
        """

    @abstractmethod
    def should_commit(self) -> bool:
        """Whether the trigger is reached."""

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """What the next commit will send, asked at a segment boundary; None: too early to say."""
        return Prediction(self.cut(history), tail=False)

    def should_lookahead(self) -> bool:
        """There is something to prepare that is not prepared yet."""
        prediction = self.predict(self.main.messages)
        return prediction is not None and (prediction.tail or prediction.cut > self.la.last_segment_end)

    def transform(self) -> Awaitable[None] | None:
        """Prepare the predicted cut, or the present one on the critical path."""
        history = self.main.messages
        ahead = None if self.on_critical_path else self.predict(history)
        prediction = ahead or Prediction(self.cut(history), tail=True)
        lead = leading_system(history)
        covered = history[lead : prediction.cut]
        # Called later, so that a lookahead cancelled before it begins leaves no coroutine unawaited.
        rewritten = None if inspect.iscoroutinefunction(self.rewrite) else self.rewrite(covered)
        if not isinstance(rewritten, list):
            return self._prepare_later(history[:lead], covered, rewritten, prediction)
        self._prepared(history[:lead], rewritten, prediction)
        return None

    async def _prepare_later(
        self,
        lead: list[Message],
        covered: list[Message],
        begun: Awaitable[list[Message]] | None,
        prediction: Prediction,
    ) -> None:
        rewriting = self.rewrite(covered) if begun is None else begun
        self._prepared(lead, rewriting if isinstance(rewriting, list) else await rewriting, prediction)

    def _prepared(self, lead: list[Message], rewritten: list[Message], prediction: Prediction) -> None:
        self.la.transformed = [*lead, *rewritten]
        self.la.last_segment_end = prediction.cut
        self.la.strategy_data = {**self.la.strategy_data, "tail": prediction.tail}

    def commit(self, history: Sequence[Message]) -> Commit | None:
        """What to splice into ``history`` now, from ``la`` or, where that is model-free, computed anew.

        None: what is prepared does not fit what is due.
        """
        if not self.exact:
            return super().commit(history)
        cut, lead = self.cut(history), leading_system(history)
        rewritten = self.rewrite(history[lead:cut])
        assert isinstance(rewritten, list), f"{type(self).__name__} is exact, so its rewrite must not be async"
        return Commit(cut, [*history[:lead], *rewritten])
