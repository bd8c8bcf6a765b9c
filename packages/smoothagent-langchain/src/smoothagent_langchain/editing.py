"""`ContextEditingMiddleware` whose next edits, and their KV cache, are ready when the next call is made.

Once its trigger is reached the built-in edits anew on every call: one more tool output is cleared each time, and all
that follows it is prefilled again. Which one that will be is known as soon as the model has asked for its tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from statistics import mean
from typing import Any, Literal, cast

from langchain.agents.middleware import ClearToolUsesEdit, ModelRequest
from langchain.agents.middleware import ContextEditingMiddleware as BuiltIn
from langchain.agents.middleware.context_editing import ContextEdit, TokenCounter
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, SystemMessage, ToolMessage

from smoothagent import Backend, CutStrategy, Message, Prediction
from smoothagent.message import alike, leading_system
from smoothagent_langchain.agent import Call, messages_of
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.threads import Thread, Threads
from smoothagent_langchain.views import ViewMiddleware

_RECENT = 8
"""Tool outputs that tell how long the next one will be."""
_AHEAD = 4
"""Turns that are looked ahead for the first edit."""


class ContextEditingMiddleware(ViewMiddleware, BuiltIn[Any, Any]):
    """The built-in, with lookahead: what is sent is what the built-in sends.

    Args:
        edits: as the built-in's; edits of your own, too, as long as they add and remove no messages.
        token_count_method: as the built-in's.
        token_counter: as the built-in's.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made: with slots of its own, a second server for lookahead work, a
            pacer; default one that is made from the model.
    """

    def __init__(
        self,
        *,
        edits: Iterable[ContextEdit] | None = None,
        token_count_method: Literal["approximate", "model"] = "approximate",  # noqa: S107  the built-in's name
        token_counter: TokenCounter | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        BuiltIn.__init__(self, edits=edits, token_count_method=token_count_method, token_counter=token_counter)
        self.threads = Threads(self._strategy, warm=warm, backend=backend)

    def _strategy(self, model: BaseChatModel) -> ContextEdits:
        del model
        return ContextEdits()

    def without_lookahead(self, thread: Thread | None, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """The request with its messages edited, of which the conversation's strategy is told."""
        if not request.messages:
            return request
        edits = Edits(self.edits, self._resolve_token_counter(request))
        edited = edits.of(request.messages)
        if thread is not None:
            seen = Seen(edits, list(request.messages), edited)
            if len(edited) != len(request.messages):
                seen = Seen()
                thread.say_once(
                    "edits",
                    f"{', '.join(type(e).__name__ for e in self.edits)} made {len(edited)} messages of "
                    f"{len(request.messages)}; an edit that adds or removes messages is made, but not prepared",
                )
            _strategy_of(thread).see(seen)
        # Copies, as the built-in passes on: middleware inside may write into them.
        return request.override(messages=[_copied(m) for m in edited])

    def sending(self, plain: ModelRequest[Any], view: list[BaseMessage]) -> ModelRequest[Any]:
        """The request as the built-in makes it, which the view is the same as."""
        del view
        return plain

    def answered(self, call: Call, request: ModelRequest[Any], response: Any) -> None:
        """The model has answered: what its tools' results will change is known now."""
        strategy = _strategy_of(call.thread)
        if strategy.seen.raw:
            answer = cast("list[AnyMessage]", messages_of(response))
            strategy.see(replace(strategy.seen, raw=[*request.messages, *answer], edited=None))
        super().answered(call, request, response)


class Edits:
    """A middleware's edits with the counter they are judged by.

    Args:
        edits: applied one after another.
        count: tokens of messages.
    """

    def __init__(self, edits: Sequence[ContextEdit] = (), count: TokenCounter = len) -> None:
        self._edits, self._count = edits, count
        self._ours = all(type(edit) is ClearToolUsesEdit for edit in edits)
        self._total: int | None = None
        self._chars = 1

    def of(self, messages: Sequence[AnyMessage]) -> list[AnyMessage]:
        """The messages as the edits leave them, in a list of their own; the messages given are not touched."""
        self._chars = max(1, _chars(messages))

        def counting(counted: Sequence[BaseMessage]) -> int:
            tokens = self._count(counted)
            if self._total is None:
                self._total = tokens
            return tokens

        return self._applied(self._edits, messages, counting)

    def expected_of(self, messages: Sequence[AnyMessage], *, counted: bool) -> list[AnyMessage]:
        """The same for a history that is only expected: copies of the user's edits see it.

        Args:
            messages: the history.
            counted: by the counter; else estimated by what was counted last.
        """
        rate = (self._total or 0) / self._chars
        count: TokenCounter = self._count if counted else lambda given: round(rate * _chars(given))
        try:
            edits = self._edits if self._ours else deepcopy(self._edits)
        except Exception:  # whatever they hold; then nothing can be expected of them
            return list(messages)
        return self._applied(edits, messages, count)

    def far_from(self, turns: float) -> bool:
        """Whether no edit can be due when the history is ``turns`` times as long."""
        if not self._ours or self._total is None:
            return False
        return self._total * turns < min((cast("ClearToolUsesEdit", e).trigger for e in self._edits), default=0)

    def _applied(
        self, edits: Sequence[ContextEdit], messages: Sequence[AnyMessage], count: TokenCounter
    ) -> list[AnyMessage]:
        # The built-in edit makes copies of what it changes, others may not.
        out = list(messages) if self._ours else deepcopy(list(messages))
        for edit in edits:
            edit.apply(out, count_tokens=count)
        return out


@dataclass(frozen=True)
class Seen:
    """The agent's history as a hook was given it.

    Attributes:
        edits: the middleware's.
        raw: the messages, as they are in the agent's state.
        edited: the messages of the request that is being made; None where none is.
    """

    edits: Edits = field(default_factory=Edits)
    raw: list[AnyMessage] = field(default_factory=list[AnyMessage])
    edited: list[AnyMessage] | None = None

    @property
    def system(self) -> int:
        """System messages that the agent has at the beginning of its own."""
        return next((i for i, m in enumerate(self.raw) if not isinstance(m, SystemMessage)), len(self.raw))

    @property
    def sent(self) -> list[AnyMessage]:
        """What is sent now, or will be with the next edit."""
        return self.edited if self.edited is not None else self._expected[0]

    @property
    def is_next(self) -> bool:
        """Whether the next request will be edited, and not only a later one."""
        return self._expected[1] == 0

    @cached_property
    def _expected(self) -> tuple[list[AnyMessage], int]:
        """What the first edited request to come will send of these messages, and how many turns there are before it.

        It is the next one where there was one before. The first, in which all outputs but the newest are cleared at
        once, takes more than one turn to prepare.
        """
        turns = max(1, sum(isinstance(m, AIMessage) for m in self.raw))
        if self.edits.far_from(1 + (_AHEAD + 1) / turns):
            return self.raw, -1
        expected = [*self.raw, *_results_to_come(self.raw)]
        for ahead in range(_AHEAD):
            edited = self.edits.expected_of(expected, counted=ahead == 0)
            if len(edited) != len(expected):
                break
            if any(_differ(a, b) for a, b in zip(edited, self.raw, strict=False)):
                return edited[: len(self.raw)], ahead
            more = _turn_to_come(expected)
            if not more:
                break
            expected += more
        return self.raw, -1


class ContextEdits(CutStrategy):
    """The view that a middleware's edits make of the agent's whole history.

    The edits are judged by that history and not by the view, as the built-in's are, so `see` is told of it before
    each hook.
    """

    # They move on with every turn: waiting would only lose what was warmed.
    defer = False
    positional = True

    def __init__(self) -> None:
        super().__init__()
        # Shared with the copies on the lane, for which what is newest is best.
        self._latest = [Seen()]
        self._codec = LangChainCodec()

    @property
    def seen(self) -> Seen:
        """The history as of the last hook."""
        return self._latest[0]

    def see(self, seen: Seen) -> None:
        """The history has changed."""
        self._latest[0] = seen

    def should_commit(self) -> bool:
        """The edits change what the view has not changed yet."""
        return self.seen.edited is not None and self.cut(self.main.messages) > leading_system(self.main.messages)

    def should_promote(self) -> bool:
        """The next call will commit."""
        return self.seen.is_next and self.predict(self.main.messages) is not None

    def cut(self, history: Sequence[Message]) -> int:
        """Behind the last message that is sent otherwise than it is in the view."""
        seen, lead = self.seen, leading_system(history)
        apart = lead - seen.system
        natives = cast("Sequence[BaseMessage]", self.main.strategy_data.get("natives", ()))
        for i in reversed(range(lead, min(len(history), apart + len(seen.sent)))):
            sent = seen.sent[i - apart]
            known = i < len(natives) and natives[i] is sent
            if not known and not alike(history[i], self._codec.decode(sent)):
                return i + 1
        return lead

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """What the edits will change when the results are there that the model has asked for."""
        cut = self.cut(history)
        return Prediction(cut, tail=True) if cut > leading_system(history) else None

    def rewrite(self, covered: Sequence[Message]) -> list[Message]:
        """The messages as they are sent."""
        seen = self.seen
        sent = seen.sent[seen.system : seen.system + len(covered)]
        return [self._rewritten(m, edited) for m, edited in zip(covered, sent, strict=True)]

    def warmable(self, history: Sequence[Message]) -> list[Message]:
        """Nothing where edits were made that are not prepared."""
        return super().warmable(history) if self.seen.raw else []

    def refuse(self, before: int, after: int) -> str | None:
        """Never: the agent's request is edited in any case."""
        del before, after
        return None

    def _rewritten(self, message: Message, sent: AnyMessage) -> Message:
        made = self._codec.decode(sent)
        return message if alike(message, made) else replace(made, origin=message)


def _strategy_of(thread: Thread) -> ContextEdits:
    return cast("ContextEdits", thread.strategy)


def _results_to_come(messages: Sequence[AnyMessage]) -> list[ToolMessage]:
    """Stand-ins for the results of the last message's calls, as long as results have been of late."""
    last = messages[-1] if messages else None
    if not isinstance(last, AIMessage):
        return []
    recent = list(islice((m for m in reversed(messages) if isinstance(m, ToolMessage)), _RECENT))
    content = "x" * round(mean(len(m.text) for m in recent)) if recent else ""
    return [ToolMessage(content, tool_call_id=c["id"] or "", name=c["name"]) for c in last.tool_calls]


def _turn_to_come(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """A stand-in for one more turn like the last one: an answer that calls as many tools, and their results."""
    last = next((m for m in reversed(messages) if isinstance(m, AIMessage)), None)
    if last is None or not last.tool_calls:
        return []
    calls = [{**call, "id": f"to-come-{len(messages)}-{i}"} for i, call in enumerate(last.tool_calls)]
    answer = AIMessage(last.content, tool_calls=calls)
    return [answer, *_results_to_come([*messages, answer])]


def _differ(a: AnyMessage, b: AnyMessage) -> bool:
    if a is b:
        return False
    return a.content != b.content or getattr(a, "tool_calls", None) != getattr(b, "tool_calls", None)


def _chars(messages: Sequence[BaseMessage]) -> int:
    """Characters of the messages' texts and calls, and something for each message."""
    calls = (m.tool_calls for m in messages if isinstance(m, AIMessage))
    return sum(len(m.text) + 16 for m in messages) + sum(len(str(c["args"])) for made in calls for c in made)


def _copied(message: AnyMessage) -> AnyMessage:
    return message.model_copy() if isinstance(message.content, str) else deepcopy(message)
