"""A drop-in for langmem's ``SummarizationNode`` whose summaries, and prompts with them, are ready when they are due.

::

    from smoothagent_langchain.langmem import SummarizationNode  # instead of langmem.short_term

The node stands before the model's, so it is commit and boundary in one: what a call of it finds is what is prepared
from, while the model answers and the tools run.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any, NamedTuple, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, BaseMessage, RemoveMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableWithFallbacks, ensure_config
from langchain_core.runnables.base import RunnableBindingBase
from langmem.short_term import RunningSummary
from langmem.short_term import SummarizationNode as BuiltIn
from langmem.short_term.summarization import (
    PreprocessedMessages,
    _prepare_input_to_summarization_model,  # pyright: ignore[reportPrivateUsage]
    _prepare_summarization_result,  # pyright: ignore[reportPrivateUsage]
    _preprocess_messages,  # pyright: ignore[reportPrivateUsage]
)
from pydantic import BaseModel

from smoothagent.forks import after_fork
from smoothagent.turns import last_safe_cut, safe_cuts
from smoothagent.unseen import unseen
from smoothagent_langchain.aside import hidden, quiet
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
        if self.size is not None and case.size > self.size:
            self.growth = case.size - self.size
        self.size = case.size
        self._case, self._node, self._answers = case, node, []

    def warm_ahead(self) -> None:
        """On the lane: warm what the model will be sent once the summary is taken."""
        text, case, node = self.running.ready(), self._case, self._node
        if text is None or case is None or node is None or not self.running.fits(case.existing, case.fresh):
            return
        # A prompt template is a run of its own, which nobody has asked for.
        covered = case.fresh[: self.running.covers]
        self.upcoming.expect([*hidden(lambda: node.sent(node.update(case, text, covered))), *self._answers])

    def end(self) -> None:
        """The conversation is not remembered any more."""
        self.running.drop()
        self.upcoming.forget()

    def _heard(self, message: BaseMessage) -> None:
        self._answers = [*self._answers, message]
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
        key: what tells the conversation from others; None where nothing does.
        talk: the conversation.
    """

    messages: list[AnyMessage]
    context: dict[str, Any]
    summary: RunningSummary | None
    found: PreprocessedMessages
    fresh: list[AnyMessage]
    size: int
    key: str | None
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
    then made as the built-in makes it. A conversation is told by the thread id, else by its summary or first message.

    Args:
        soft: where a summary is begun, as a fraction of the limit; default when the next call will reach it.
        strict: summarize at the limit, waiting for a summary that is late.
        warm: prefill the model's next prompt ahead; default yes, except at hosted endpoints. For that the agent's model
            has to be the one that summarizes (bound to other parameters or not).
        **built_in: everything the built-in takes. A ``model`` that is neither a chat model nor one that is bound,
            retried or has fallbacks is asked when a summary is due, as by the built-in: nothing runs ahead.

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
        self._behind = _quiet(self.model)
        if self._behind is None:
            log.info("a %s is asked for summaries when they are due: nothing runs ahead", type(self.model).__name__)
        self._talks: OrderedDict[str, _Talk] = OrderedDict()
        self._start_afresh()
        after_fork(self._start_afresh)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """Tokens at which the built-in summarizes."""
        return self.max_tokens if self.max_tokens_before_summary is None else self.max_tokens_before_summary

    def _func(self, input: dict[str, Any] | BaseModel) -> dict[str, Any]:  # noqa: A002  theirs
        case = self._case(input)
        if case is None:
            return super()._func(input)
        running = case.talk.running
        if case.due and self._will_do(case):
            running.wait(due=self.strict or not self._may_go_on(case))
        update = self._decided(case)
        if update is None:
            with unseen():
                update = super()._func(input)
        return self._done(case, update)

    async def _afunc(self, input: dict[str, Any] | BaseModel) -> dict[str, Any]:  # noqa: A002
        case = self._case(input)
        if case is None:
            return await super()._afunc(input)
        running = case.talk.running
        if case.due and self._will_do(case):
            await running.await_(due=self.strict or not self._may_go_on(case))
        update = self._decided(case)
        if update is None:
            with unseen():
                update = await super()._afunc(input)
        return self._done(case, update)

    # ---- deciding ------------------------------------------------------------------------------

    def _case(self, given: dict[str, Any] | BaseModel) -> _Case | None:
        """What this call is about; None where there is nothing to speak of, or nothing can run ahead."""
        messages, context = self._parse_input(given)
        if self._behind is None or not any(not isinstance(m, SystemMessage) for m in messages):
            return None
        return self._case_of(messages, context, None)

    def _case_of(self, messages: list[AnyMessage], context: dict[str, Any], talk: _Talk | None) -> _Case:
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
        key = _key(spoken, summary)
        size = self.token_counter(fresh) if fresh else 0
        return _Case(messages, context, summary, found, fresh, size, key, talk or self._talk(key))

    def _talk(self, key: str | None) -> _Talk:
        if key is None:
            return _Talk()
        with self._lock:
            talk = self._talks[key] = self._talks.pop(key, None) or _Talk()
            left = [self._talks.popitem(last=False)[1] for _ in range(len(self._talks) - _TALKS)]
            over = [old for old in left if all(old is not other for other in self._talks.values())]
        for old in over:
            old.end()
        return talk

    def _will_do(self, case: _Case) -> bool:
        """Whether the summary that is being written could be taken."""
        running = case.talk.running
        if not running.fits(case.existing, case.fresh):
            return False
        rest = case.fresh[running.covers :]
        return not rest or self.token_counter(rest) <= self._room(case)

    def _may_go_on(self, case: _Case) -> bool:
        """Whether the messages may go on as they are for once more."""
        return case.size <= self.limit * 1.25

    def _decided(self, case: _Case) -> dict[str, Any] | None:
        """The state's update where no model has to be asked for it; None where the built-in does it all."""
        unchanged = replace(case.found, messages_to_summarize=[])
        if not case.due:
            return self._prepare_state_update(case.context, self._result(case, unchanged, case.summary))
        running = case.talk.running
        taken = running.take(case.existing, case.fresh)
        if taken is not None:
            rest = case.fresh[taken.covered :]
            left = self.token_counter(rest) if rest else 0
            if left <= self._room(case):
                return self.update(case, taken.text, case.fresh[: taken.covered])
            log.info("a summary that was prepared leaves %d tokens, more than fit: another one is made", left)
            return None
        if running.busy and not self.strict and self._may_go_on(case):
            return self._prepare_state_update(case.context, self._result(case, unchanged, case.summary))
        running.drop()
        return None

    def _room(self, case: _Case) -> int:
        system = case.found.existing_system_message
        return self.max_tokens - self.max_summary_tokens - (self.token_counter([system]) if system else 0)

    def update(self, case: _Case, text: str, covered: list[AnyMessage]) -> dict[str, Any]:
        """The state's update where ``text`` summarizes what is ``covered`` and all before it."""
        known = set(case.summary.summarized_message_ids) if case.summary is not None else set[str]()
        ids = [str(message.id) for message in covered]
        summary = RunningSummary(text, known | set(ids), ids[-1])
        return self._prepare_state_update(
            case.context, self._result(case, replace(case.found, messages_to_summarize=covered), summary)
        )

    def sent(self, update: dict[str, Any]) -> list[BaseMessage]:
        """The messages that an update gives the model."""
        return [m for m in update[self.output_messages_key] if not isinstance(m, RemoveMessage)]

    def _result(self, case: _Case, found: PreprocessedMessages, summary: RunningSummary | None) -> Any:
        return _prepare_summarization_result(
            preprocessed_messages=found,
            messages=case.spoken,
            existing_summary=case.summary,
            running_summary=summary,
            final_prompt=self.final_prompt,
        )

    # ---- preparing -----------------------------------------------------------------------------

    def _done(self, case: _Case, update: dict[str, Any]) -> dict[str, Any]:
        """The node's result; what the next call will need is begun. That must not cost the result."""
        try:
            self._go_on(case, update)
        except Exception as error:
            log.warning("nothing is prepared for the next call of the summarization node: %r", error, exc_info=error)
        return update

    def _go_on(self, case: _Case, update: dict[str, Any]) -> None:
        talk, context = case.talk, update.get("context", case.context)
        if context.get("running_summary") is not case.summary:
            case = self._case_of(case.messages, context, talk)
            self._rename(talk, case.key)
        talk.noted(case, self)
        talk.upcoming.watch(self.sent(update), _chat_model(self.model), warm=self.warm)
        running = talk.running
        if running.fits(case.existing, case.fresh) and not running.failed() and not running.hangs():
            return  # it is being written, or waits to be taken
        if self._is_near(case):
            self._begin(case)

    def _rename(self, talk: _Talk, key: str | None) -> None:
        """The next call will know the conversation by its new summary."""
        if key is not None:
            with self._lock:
                self._talks[key] = talk

    def _is_near(self, case: _Case) -> bool:
        if self.soft is not None:
            return case.size >= self.soft * self.limit
        # Before the first growth is known, what there is tells how much may come.
        return case.size + (case.talk.growth or case.size) >= self.limit

    def _begin(self, case: _Case) -> None:
        decoded = [_CODEC.decode(message) for message in case.fresh]
        cuts = safe_cuts(decoded)
        question = max((i for i, m in enumerate(decoded) if m.role == "user"), default=0)
        # The newest question stays as it is, where something comes before it and what follows fits beside a summary.
        cut = last_safe_cut(cuts, question) or 0
        lead = next((i for i, m in enumerate(decoded) if m.role != "system"), len(decoded))
        rest = case.fresh[cut:]
        if cut <= lead or self.token_counter(rest) + case.talk.growth > min(self._room(case), self.limit // 2):
            cut = last_safe_cut(cuts, len(decoded)) or 0
        model = self._behind
        if not cut or model is None:
            return
        covered = case.fresh[:cut]

        def write() -> str:
            asked = _prepare_input_to_summarization_model(
                preprocessed_messages=replace(
                    case.found, messages_to_summarize=covered, n_tokens_to_summarize=self.token_counter(covered)
                ),
                running_summary=case.summary,
                existing_summary_prompt=self.existing_summary_prompt,
                initial_summary_prompt=self.initial_summary_prompt,
                token_counter=self.token_counter,
            )
            return _text(model.invoke(asked))

        talk = case.talk
        lane = talk.upcoming.lane
        future = talk.running.write(lane, write, covered, case.existing)
        future.add_done_callback(lambda _: lane.call(talk.warm_ahead))


def _key(spoken: list[AnyMessage], summary: RunningSummary | None) -> str | None:
    """What tells a conversation from others, and stays the same as its messages are summarized."""
    configurable = ensure_config().get("configurable") or {}
    thread = configurable.get("thread_id")
    if thread is not None:
        # Without the ids of tasks, which are others on each run.
        parts = str(configurable.get("checkpoint_ns") or "").split("|")[:-1]
        return f"{thread}\0{'|'.join(part.partition(':')[0] for part in parts)}"
    known = summary.last_summarized_message_id if summary is not None else None
    return known or (spoken[0].id if spoken else None)


def _text(answer: Any) -> str:
    content = answer.content if isinstance(answer, BaseMessage) else answer
    return content if isinstance(content, str) else str(getattr(answer, "text", ""))


def _chat_model(model: Any) -> BaseChatModel | None:
    while isinstance(model, RunnableBindingBase):
        model = cast("Any", model).bound
    return model if isinstance(model, BaseChatModel) else None


def _quiet(model: Any) -> Runnable[Any, Any] | None:
    """The same for background work, shown in no callback of the user's; None for what cannot be kept quiet."""
    if isinstance(model, RunnableBindingBase):
        binding = cast("Any", model)
        bound = _quiet(binding.bound)
        config: dict[str, Any] = {k: v for k, v in dict(binding.config).items() if k != "callbacks"}
        silent: dict[str, Any] = {"bound": bound, "config": config, "config_factories": list[Any]()}
        return binding.model_copy(update=silent) if bound is not None else None
    if isinstance(model, RunnableWithFallbacks):
        several = cast("Any", model)
        first, others = _quiet(several.runnable), [_quiet(other) for other in several.fallbacks]
        known = first is not None and all(other is not None for other in others)
        return several.model_copy(update={"runnable": first, "fallbacks": others}) if known else None
    return quiet(model) if isinstance(model, BaseChatModel) else None


__all__ = ["RunningSummary", "SummarizationNode"]
