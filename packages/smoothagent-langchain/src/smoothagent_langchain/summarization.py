"""`SummarizationMiddleware`: the built-in's drop-in, with the summary and its KV cache prepared ahead."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

from langchain.agents.middleware import SummarizationMiddleware as BuiltIn
from langchain.agents.middleware.summarization import DEFAULT_SUMMARY_PROMPT
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from smoothagent import Backend, LookaheadStrategy, Message, Prediction, SmoothAgentError, Summarize
from smoothagent.message import leading_system
from smoothagent.turns import last_safe_cut, safe_cuts
from smoothagent_langchain.agent import LookaheadHooks
from smoothagent_langchain.aside import in_thread, quiet
from smoothagent_langchain.models import answers_in_place, same_model
from smoothagent_langchain.threads import Thread, Threads

log = logging.getLogger("smoothagent")

_IN_PLACE = (
    "\n\nThe conversation history is the conversation above, up to here. Answer with the extracted context only; "
    "do not call tools."
)

PREFIX = "Here is a summary of the conversation to date:\n\n"
"""What the built-in writes before a summary."""

_RECENT = 8
"""The newest messages tell how large the next ones will be."""
_ANY = 1_000_000_000
"""A trigger in tokens that the core's strategy asks for and this one never uses."""


class SummarizationMiddleware(LookaheadHooks, BuiltIn[Any, Any]):
    """``langchain.agents.middleware.SummarizationMiddleware`` whose summaries are ready when they are due.

    The same arguments, defaults, state and messages as the built-in's. What differs: the summary is written, and the
    new prompt prefilled, while tools run, so that the turn that summarizes is like any other. Between ``keep`` and
    twice ``keep`` stays verbatim, since a summary covers what was known when it was begun. Where it is late, the agent
    goes on for up to a quarter of the context more before it waits. A summary that fails leaves the history as it is.

    Args:
        model: writes the summaries. Where it is the agent's model too, the question is asked at the end of the
            conversation, whose cache it hits; a ``summary_prompt``, a ``summarizer`` or another model is used as the
            built-in uses it, about a transcript.
        soft: where preparation begins, as a fraction of the trigger; default where as much is still to come as ``keep``
            keeps.
        strict: summarize exactly at the trigger, waiting for a summary that is late.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made: with slots of its own, a second server for lookahead work, a
            pacer; default one that is made from the model.
        max_summary_tokens: length limit of a summary that is asked for at the end of the conversation.
        accept_cut_off: take a summary that ran into that limit; otherwise it is rejected.
        **built_in: everything else the built-in takes.

    Raises:
        ValueError: as the built-in; or ``soft`` is not between 0 and 1.
    """

    default_prompt = DEFAULT_SUMMARY_PROMPT
    """The ``summary_prompt`` that is none of the user's."""

    def __init__(
        self,
        model: str | BaseChatModel,
        *,
        soft: float | None = None,
        strict: bool = False,
        warm: bool | None = None,
        backend: Backend | None = None,
        max_summary_tokens: int = 2048,
        accept_cut_off: bool = False,
        **built_in: Any,
    ) -> None:
        super().__init__(model, **built_in)
        if soft is not None and not 0 < soft < 1:
            raise ValueError(f"soft={soft}: a fraction of the trigger, between 0 and 1")
        self.soft, self.strict, self._backend = soft, strict, backend
        self.max_summary_tokens, self.accept_cut_off = max_summary_tokens, accept_cut_off
        if _only_awaitable(self.summarizer):
            # It may hold connections of the agent's loop, and cannot be called in a thread.
            log.info("an async summarizer is called when a summary is due, as by the built-in: nothing runs ahead")
            self.threads = None
        else:
            # Where every prompt counts as having reached the ceiling, a commit that is due is never put off.
            self.threads = Threads(
                self._strategy, written=self._written, warm=warm, backend=backend, ceiling=1 if strict else None
            )

    @property
    def name(self) -> str:
        """The built-in's: deepagents replaces its own by it, and user interfaces know its node."""
        return "SummarizationMiddleware"

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Swap in what is prepared where it is due; as the built-in where the conversation is new here."""
        messages: list[AnyMessage] = state["messages"]
        thread = self._find(messages, runtime)
        if thread is not None:
            lead, before = list(thread.lead), thread.last_commit
            try:
                out = thread.on_commit([*lead, *messages])
            except Exception as error:  # whatever it is, the built-in's way is still there
                log.warning("session %s: summarizing as the built-in does: %r", thread.session, error)
            else:
                return self._update(messages, out[len(lead) :], thread) if thread.last_commit is not before else None
        return super().before_model(state, runtime)

    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Swap in what is prepared where it is due; as the built-in where the conversation is new here."""
        messages: list[AnyMessage] = state["messages"]
        thread = self._find(messages, runtime)
        if thread is not None:
            lead, before = list(thread.lead), thread.last_commit
            try:
                out = await thread.aon_commit([*lead, *messages])
            except Exception as error:  # whatever it is, the built-in's way is still there
                log.warning("session %s: summarizing as the built-in does: %r", thread.session, error)
            else:
                return self._update(messages, out[len(lead) :], thread) if thread.last_commit is not before else None
        return await super().abefore_model(state, runtime)

    def _find(self, messages: list[AnyMessage], runtime: object) -> Thread | None:
        self._ensure_message_ids(messages)
        return self.threads.find(messages, runtime) if self.threads is not None else None

    def _update(self, before: list[AnyMessage], after: list[BaseMessage], thread: Thread) -> dict[str, Any]:
        """The state's change for a commit. From here on the state is the view, so no record is needed of it."""
        thread.restore(None)
        if self.threads is not None:
            self.threads.renamed(before, after)
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *after]}

    # ---- what the strategy asks ----------------------------------------------------------------

    @property
    def question(self) -> str:
        """The built-in's own instructions, asked at the end of the conversation, not about a transcript of it."""
        return self.default_prompt.partition("<messages>")[0].rstrip() + _IN_PLACE

    def is_due(self, messages: list[AnyMessage], apart: int = 0) -> bool:
        """Whether the trigger is reached, as the built-in says; ``apart``: tokens of what is not in the messages."""
        return self._should_summarize(messages, self.token_counter(messages) + apart)

    def cutoff(self, messages: list[AnyMessage]) -> int:
        """How many messages the built-in would summarize."""
        return self._determine_cutoff_index(messages)

    def share_of_keep(self, message: AnyMessage) -> float:
        """How much of what ``keep`` keeps one message is."""
        kind, value = self.keep
        if kind == "messages":
            return 1 / value
        limit = value if kind == "tokens" else int((self._get_profile_limits() or 0) * value)
        return self._partial_token_counter([message]) / max(1, limit)

    def to_come(self, messages: list[AnyMessage], apart: int = 0) -> float:
        """How many messages, of the size of the newest ones, the trigger is still away."""
        recent = messages[-_RECENT:]
        total = max(self.token_counter(messages) + apart, _reported(messages))
        each = self._partial_token_counter(recent) / max(1, len(recent))
        clauses = cast("list[dict[str, float]]", self._trigger_clauses)
        away = [max(self._away(kind, value, len(messages), total, each) for kind, value in c.items()) for c in clauses]
        return max(0.0, min(away, default=float("inf")))

    def _away(self, kind: str, value: float, messages: int, total: int, each: float) -> float:
        if kind == "messages":
            return value - messages
        limit = value if kind == "tokens" else (self._get_profile_limits() or 0) * value
        return (limit - total) / max(1.0, each)

    async def summary_of_transcript(self, messages: list[AnyMessage]) -> str:
        """The built-in's own summary, made where nothing of it shows."""
        twin = copy.copy(self)
        # The built-in's own retries around a model whose calls show nowhere.
        retried: Any = self._summary_model
        twin._summary_model = retried.model_copy(update={"bound": quiet(self._summary_chat_model)})
        return await in_thread(lambda: twin._create_summary(messages))

    def _strategy(self, model: BaseChatModel) -> LookaheadStrategy:
        return MiddlewareSummaries(self, in_place=self.asks_in_place(model))

    def asks_in_place(self, model: BaseChatModel) -> bool:
        """Whether the question can be put to the agent's own prompt: nothing that the user chose is another way."""
        as_built_in = self.summary_prompt != self.default_prompt or self._summary_chat_model is not self.model
        in_place = self.summarizer is None and not as_built_in and same_model(self.model, model)
        return in_place and answers_in_place(model, self._backend)

    def summary_message(self, text: str) -> AnyMessage:
        """The message of a summary, prefix included."""
        return cast("list[AnyMessage]", self._build_new_messages(text.removeprefix(PREFIX)))[0]

    def _written(self, text: str) -> BaseMessage:
        made = cast("list[AnyMessage]", self._build_new_messages(text.removeprefix(PREFIX)))
        self._ensure_message_ids(made)
        return made[0]


class MiddlewareSummaries(Summarize):
    """`Summarize` with the trigger, the cut and the ``keep`` of LangChain's middleware.

    Args:
        middleware: has them.
        in_place: ask at the end of the conversation; else about a transcript, as the built-in does.
    """

    def __init__(self, middleware: SummarizationMiddleware, *, in_place: bool) -> None:
        super().__init__(
            _ANY,
            keep=0,
            max_tokens=middleware.max_summary_tokens,
            question=middleware.question,
            prefix=PREFIX,
            accept_cut_off=middleware.accept_cut_off,
            keep_latest_user=False,
        )
        self.hard = None  # the trigger is the middleware's, in a unit of its own
        self.needs_model = in_place
        self._middleware = middleware

    @property
    def apart(self) -> int:
        """Tokens that the trigger counts besides those of the messages; none by default, as by LangChain's own."""
        return 0

    def should_commit(self) -> bool:
        """As the built-in says."""
        messages = self._natives(self.main.messages)
        return self._middleware.is_due(messages, self.apart) and self._middleware.cutoff(messages) > 0

    def cut(self, history: Sequence[Message]) -> int:
        """As the built-in says, but for calls that still wait for their results."""
        wanted = leading_system(history) + self._middleware.cutoff(self._natives(history))
        return last_safe_cut(safe_cuts(history), wanted) or leading_system(history)

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """The last safe cut that will leave ``keep`` when the trigger is reached, once that is near."""
        messages, lead = self._natives(history), leading_system(history)
        to_come = self._middleware.to_come(messages, self.apart)
        if to_come <= 0 and self._middleware.is_due(messages, self.apart):
            cut = self.cut(history)
        elif self._is_near(messages, to_come):
            cut = self._leaving(history, messages, 1 - to_come * self._each(messages))
        else:
            return None
        return Prediction(cut, tail=True) if cut > lead else None

    def tail_fits(self, tail_tokens: int, view_tokens: int, boundary: int) -> str:
        """``short``, ``ok`` or ``long``, in the unit of ``keep``."""
        del tail_tokens, view_tokens
        history = self.main.messages
        tail = self._natives(history)[boundary - leading_system(history) :]
        kept = sum(map(self._middleware.share_of_keep, tail))
        if kept < 1:
            return "short"
        made = [self._middleware.summary_message(m.text) for m in self.la.transformed[leading_system(history) :]]
        # What the newest answers reported is the size of the prompt as it was.
        fresh = [m.model_copy(update={"usage_metadata": None}) if isinstance(m, AIMessage) else m for m in tail]
        return "long" if kept > 2 or self._middleware.is_due([*made, *fresh], self.apart) else "ok"

    async def ask(self, covered: Sequence[Message]) -> str:
        """The summary, asked for in place or about a transcript."""
        if self.needs_model:
            try:
                return await super().ask(covered)
            except SmoothAgentError:
                if not self.on_critical_path:
                    raise
                # Whatever stands in the way there (a length limit, tools), the built-in's way may still be open.
        return await self._middleware.summary_of_transcript(self._natives(self.main.messages)[: len(covered)])

    def _natives(self, history: Sequence[Message]) -> list[AnyMessage]:
        """LangChain's own messages, without P."""
        natives = cast("Sequence[AnyMessage]", self.main.strategy_data.get("natives", ()))
        return list(natives[leading_system(history) : len(history)])

    def _is_near(self, messages: list[AnyMessage], to_come: float) -> bool:
        soft = self._middleware.soft
        if soft is not None:
            return len(messages) >= soft * (len(messages) + to_come)
        each = self._each(messages)
        # In time for a lookahead of the usual length, but never so early that too much would stay verbatim.
        needed = self.growth.tokens_during_lookahead() / max(1.0, self.tokens / max(1, len(messages)))
        return to_come * each <= min(2.0, max(1.0, needed * each))

    def _each(self, messages: list[AnyMessage]) -> float:
        recent = messages[-_RECENT:]
        return sum(map(self._middleware.share_of_keep, recent)) / max(1, len(recent))

    def _leaving(self, history: Sequence[Message], messages: list[AnyMessage], wanted: float) -> int:
        """The last safe cut after which at least ``wanted`` of ``keep`` follows."""
        lead, kept, start = leading_system(history), 0.0, len(history)
        while start > lead and kept < wanted:
            start -= 1
            kept += self._middleware.share_of_keep(messages[start - lead])
        return last_safe_cut(safe_cuts(history), start) or lead


def _reported(messages: Sequence[AnyMessage]) -> int:
    """Tokens of the last call, prompt and answer, as the server told them; 0 where it did not."""
    last = next((m for m in reversed(messages) if isinstance(m, AIMessage)), None)
    usage = last.usage_metadata if last is not None else None
    return int(usage.get("total_tokens", 0)) if usage else 0


def _only_awaitable(summarizer: object) -> bool:
    """Whether a runnable wraps a coroutine function and nothing else."""
    return summarizer is not None and hasattr(summarizer, "afunc") and not hasattr(summarizer, "func")
