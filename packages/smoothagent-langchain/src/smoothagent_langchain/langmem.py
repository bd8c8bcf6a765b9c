"""A drop-in for langmem's ``SummarizationNode`` whose summaries, and prompts with them, are ready when they are due.

::

    from smoothagent_langchain.langmem import SummarizationNode  # instead of langmem.short_term

The node stands before the model's, so it is commit and boundary in one: what a call of it finds is what is prepared
from, while the model answers and the tools run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import Any, NamedTuple, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableBinding, ensure_config
from langmem.short_term import RunningSummary
from langmem.short_term import SummarizationNode as BuiltIn
from langmem.short_term.summarization import (
    PreprocessedMessages,
    _prepare_input_to_summarization_model,  # pyright: ignore[reportPrivateUsage]
    _prepare_summarization_result,  # pyright: ignore[reportPrivateUsage]
    _preprocess_messages,  # pyright: ignore[reportPrivateUsage]
)
from pydantic import BaseModel

from smoothagent.turns import last_safe_cut, safe_cuts
from smoothagent_langchain.aside import quiet, unseen
from smoothagent_langchain.chains import Upcoming
from smoothagent_langchain.codec import LangChainCodec
from smoothagent_langchain.running import RunningSummary as Running

log = logging.getLogger("smoothagent")

_TALKS = 256
"""Conversations that are remembered."""
_CODEC = LangChainCodec()


class _Talk:
    """One conversation of a node's.

    Attributes:
        running: the summary that is being prepared.
        upcoming: the prompt that it will be part of.
        size: tokens not summarized yet, as of the last call.
        growth: by how much they grew since the call before.
    """

    def __init__(self) -> None:
        self.running = Running()
        self.upcoming = Upcoming(heard=self._heard)
        self.size: int | None = None
        self.growth = 0
        self._case: _Case | None = None
        self._node: SummarizationNode | None = None
        self._answers: list[BaseMessage] = []

    def noted(self, case: _Case, node: SummarizationNode) -> None:
        """The node has been called."""
        self._case, self._node, self._answers = case, node, []

    def warm_ahead(self) -> None:
        """Warm what the model will be sent once the summary is taken."""
        text, case, node = self.running.ready(), self._case, self._node
        if text is None or case is None or node is None:
            return
        history = node.written(case, text, self.running.covers)
        if history is not None:
            self.upcoming.expect([*history, *self._answers])

    def _heard(self, message: BaseMessage) -> None:
        self._answers.append(message)
        self.warm_ahead()


class _Case(NamedTuple):
    """One call of the node.

    Attributes:
        messages: as given.
        context: as given.
        summary: the summary so far.
        found: what the built-in makes of them.
        fresh: messages that are in no summary.
        size: their tokens.
        talk: the conversation.
    """

    messages: list[AnyMessage]
    context: dict[str, Any]
    summary: RunningSummary | None
    found: PreprocessedMessages
    fresh: list[AnyMessage]
    size: int
    talk: _Talk

    @property
    def due(self) -> bool:
        """Whether the built-in would summarize now."""
        return bool(self.found.messages_to_summarize)

    @property
    def existing(self) -> str:
        """The text of the summary so far."""
        return self.summary.summary if self.summary is not None else ""

    @property
    def spoken(self) -> list[AnyMessage]:
        """All messages but the system message, which is never summarized."""
        return self.messages[self.found.existing_system_message is not None :]


class SummarizationNode(BuiltIn):
    """``langmem.short_term.SummarizationNode`` whose summaries are written while tools run.

    The same arguments, state update and prompts as the built-in's. What differs: a summary covers what was known when
    it was begun, a turn or so before ``max_tokens_before_summary``, and what has come since stays verbatim. Where it is
    late the messages go on as they are, up to a quarter above that limit; there it is waited for, at most 30 s, and
    then made as the built-in makes it. A conversation is told by the thread id, or by its first message.

    Args:
        soft: where a summary is begun, as a fraction of the limit; default when the next call will reach it.
        strict: summarize at the limit, waiting for a summary that is late.
        warm: prefill the model's next prompt ahead; default yes, except at hosted endpoints. For that the agent's model
            has to be the one that summarizes (bound to other parameters or not).
        **built_in: everything the built-in takes.

    Raises:
        ValueError: ``soft`` is not between 0 and 1.
    """

    def __init__(
        self, *, soft: float | None = None, strict: bool = False, warm: bool | None = None, **built_in: Any
    ) -> None:
        super().__init__(**built_in)
        if soft is not None and not 0 < soft < 1:
            raise ValueError(f"soft={soft}: a fraction of max_tokens_before_summary, between 0 and 1")
        self.soft, self.strict, self.warm = soft, strict, warm
        self._talks: OrderedDict[str, _Talk] = OrderedDict()

    @property
    def limit(self) -> int:
        """Tokens at which the built-in summarizes."""
        return self.max_tokens if self.max_tokens_before_summary is None else self.max_tokens_before_summary

    def _func(self, input: dict[str, Any] | BaseModel) -> dict[str, Any]:  # noqa: A002  theirs
        case = self._case(input)
        if case.due:
            case.talk.running.wait(self._patience(case))
        update = self._decided(case)
        if update is None:
            with unseen():
                update = super()._func(input)
        return self._done(input, update)

    async def _afunc(self, input: dict[str, Any] | BaseModel) -> dict[str, Any]:  # noqa: A002
        case = self._case(input)
        if case.due:
            await case.talk.running.await_(self._patience(case))
        update = self._decided(case)
        if update is None:
            with unseen():
                update = await super()._afunc(input)
        return self._done(input, update)

    # ---- deciding ------------------------------------------------------------------------------

    def _case(self, given: dict[str, Any] | BaseModel) -> _Case:
        messages, context = self._parse_input(given)
        summary = cast("RunningSummary | None", context.get("running_summary"))
        found = _preprocess_messages(
            messages=messages,
            running_summary=summary,
            max_tokens=self.max_tokens,
            max_tokens_before_summary=self.max_tokens_before_summary,
            max_summary_tokens=self.max_summary_tokens,
            token_counter=self.token_counter,
        )
        spoken = messages[found.existing_system_message is not None :]
        fresh = spoken[found.total_summarized_messages :]
        return _Case(messages, context, summary, found, fresh, self.token_counter(fresh), self._talk(messages))

    def _talk(self, messages: list[AnyMessage]) -> _Talk:
        configurable = ensure_config().get("configurable") or {}
        thread = configurable.get("thread_id")
        first = messages[0].id if messages else None
        namespace = str(configurable.get("checkpoint_ns") or "").rpartition("|")[0]
        key = f"{thread if thread is not None else first}\0{namespace}"
        talk = self._talks.pop(key, None) or _Talk()
        self._talks[key] = talk
        while len(self._talks) > _TALKS:
            old = self._talks.pop(next(iter(self._talks)))
            old.running.drop()
            old.upcoming.forget()
        return talk

    def _patience(self, case: _Case) -> float:
        return Running.patience(due=self.strict or not self._may_go_on(case))

    def _may_go_on(self, case: _Case) -> bool:
        """Whether the messages may go on as they are for once more."""
        return case.size <= self.limit * 1.25

    def _decided(self, case: _Case) -> dict[str, Any] | None:
        """The state's update where no model has to be asked for it; None where the built-in does it all."""
        if not case.due:
            return None
        running = case.talk.running
        taken = running.take(case.existing, case.fresh)
        if taken is not None:
            covered = case.fresh[: taken.covered]
            left = self.token_counter(case.fresh[taken.covered :])
            if left <= self._room(case):
                return self._update(case, taken.text, covered)
            log.info("a summary that was prepared leaves %d tokens, more than fit: another one is made", left)
            return None
        if running.busy and not self.strict and self._may_go_on(case):
            return self._prepare_state_update(
                case.context, self._result(case, replace(case.found, messages_to_summarize=[]), case.summary)
            )
        running.drop()
        return None

    def _room(self, case: _Case) -> int:
        system = case.found.existing_system_message
        return self.max_tokens - self.max_summary_tokens - (self.token_counter([system]) if system else 0)

    def _update(self, case: _Case, text: str, covered: list[AnyMessage]) -> dict[str, Any]:
        known = set(case.summary.summarized_message_ids) if case.summary is not None else set[str]()
        ids = [str(message.id) for message in covered]
        summary = RunningSummary(text, known | set(ids), ids[-1])
        return self._prepare_state_update(
            case.context, self._result(case, replace(case.found, messages_to_summarize=covered), summary)
        )

    def _result(self, case: _Case, found: PreprocessedMessages, summary: RunningSummary | None) -> Any:
        return _prepare_summarization_result(
            preprocessed_messages=found,
            messages=case.spoken,
            existing_summary=case.summary,
            running_summary=summary,
            final_prompt=self.final_prompt,
        )

    # ---- preparing -----------------------------------------------------------------------------

    def _done(
        self,
        given: dict[str, Any] | BaseModel,
        update: dict[str, Any],
    ) -> dict[str, Any]:
        """The node's result; what the next call will need is begun. That must not cost the result."""
        try:
            self._go_on(given, update)
        except Exception as error:
            log.warning("nothing is prepared for the next call of the summarization node: %r", error, exc_info=error)
        return update

    def _go_on(self, given: dict[str, Any] | BaseModel, update: dict[str, Any]) -> None:
        messages, context = self._parse_input(given)
        after = {self.input_messages_key: messages, "context": update.get("context", context)}
        case = self._case(after)
        talk, sent = case.talk, [m for m in update[self.output_messages_key] if m.type != "remove"]
        if talk.size is not None and case.size > talk.size:
            talk.growth = case.size - talk.size
        talk.size = case.size
        talk.noted(case, self)
        talk.upcoming.watch(sent, _chat_model(self.model), warm=self.warm)
        if talk.running.busy and talk.running.fits(case.existing, case.fresh) and not talk.running.failed():
            return  # it is being written, or waits to be taken
        if self._is_near(case):
            self._begin(case)

    def _is_near(self, case: _Case) -> bool:
        if self.soft is not None:
            return case.size >= self.soft * self.limit
        # Before the first growth is known, what there is tells how much may come.
        return case.size + (case.talk.growth or case.size) >= self.limit

    def _begin(self, case: _Case) -> None:
        decoded = [_CODEC.decode(message) for message in case.fresh]
        cut = last_safe_cut(safe_cuts(decoded), len(decoded)) or 0
        if not cut:
            return
        covered = case.fresh[:cut]
        asked = _prepare_input_to_summarization_model(
            preprocessed_messages=replace(
                case.found, messages_to_summarize=covered, n_tokens_to_summarize=self.token_counter(covered)
            ),
            running_summary=case.summary,
            existing_summary_prompt=self.existing_summary_prompt,
            initial_summary_prompt=self.initial_summary_prompt,
            token_counter=self.token_counter,
        )
        model, talk = _quiet(self.model), case.talk
        lane = talk.upcoming.lane
        future = talk.running.start(lane, lambda: _text(model.invoke(asked)), covered, case.existing)
        future.add_done_callback(lambda _: lane.call(talk.warm_ahead))

    def written(self, case: _Case, text: str, covers: int) -> list[BaseMessage] | None:
        """What the model is sent once a summary of the first ``covers`` fresh messages is taken."""
        if not case.talk.running.fits(case.existing, case.fresh):
            return None
        update = self._update(case, text, case.fresh[:covers])
        return [m for m in update[self.output_messages_key] if m.type != "remove"]


def _text(answer: Any) -> str:
    content = answer.content if isinstance(answer, BaseMessage) else answer
    return content if isinstance(content, str) else str(getattr(answer, "text", ""))


def _chat_model(model: Any) -> BaseChatModel | None:
    while isinstance(model, RunnableBinding):
        model = cast("Any", model).bound
    return model if isinstance(model, BaseChatModel) else None


def _quiet(model: Any) -> Runnable[Any, Any]:
    """The same for background work."""
    if isinstance(model, RunnableBinding):
        binding = cast("Any", model)
        return binding.model_copy(update={"bound": _quiet(binding.bound)})
    return quiet(model) if isinstance(model, BaseChatModel) else model


__all__ = ["RunningSummary", "SummarizationNode"]
