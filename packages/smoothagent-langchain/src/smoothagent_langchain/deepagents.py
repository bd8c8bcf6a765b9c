"""Deep Agents' `SummarizationMiddleware` with the summary and its KV cache prepared ahead, and warmed sub-agents.

Theirs is not a subclass of LangChain's: it leaves the messages as they are, notes in private state what the summary
stands for, and saves what was summarized to the agent's backend. All of that is left to it; here it is only told when
to summarize, up to which message, and what the summary is.
"""

# Deep Agents' own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from deepagents.backends.protocol import BackendProtocol
from deepagents.middleware.subagents import SubAgentMiddleware as BuiltInSubAgents
from deepagents.middleware.summarization import DEEPAGENTS_DEFAULT_SUMMARY_PROMPT
from deepagents.middleware.summarization import SummarizationMiddleware as BuiltIn
from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage

from smoothagent import Backend, Message
from smoothagent_langchain.agent import Call, end, lead_of, opened
from smoothagent_langchain.isolation import DelegationHooks
from smoothagent_langchain.summarization import PREFIX, MiddlewareSummaries
from smoothagent_langchain.summarization import SummarizationMiddleware as LangChains
from smoothagent_langchain.threads import Thread, Threads

log = logging.getLogger("smoothagent")


class SummarizationMiddleware(BuiltIn):
    """``deepagents.middleware.summarization.SummarizationMiddleware`` whose summaries are ready when they are due.

    Pass it to ``create_deep_agent(middleware=[…])``, where it takes the default's place. The same arguments, state and
    files as the built-in's. Where old tool arguments are truncated (``truncate_args_settings``) what is warmed ends
    before the first that is.

    Args:
        model: as the built-in's.
        backend: as the built-in's: where the history goes that was summarized.
        soft: as `smoothagent_langchain.SummarizationMiddleware`'s.
        warm: prefill ahead; default yes, except at hosted endpoints.
        server: the agent's model server, if you have a `smoothagent.Backend` made for it.
        max_summary_tokens: length limit of a summary that is asked for at the end of the conversation.
        accept_cut_off: take a summary that ran into that limit.
        **built_in: everything else the built-in takes.

    Raises:
        ValueError: ``soft`` is not between 0 and 1.
    """

    def __init__(
        self,
        model: str | BaseChatModel,
        *,
        backend: BackendProtocol,
        soft: float | None = None,
        warm: bool | None = None,
        server: Backend | None = None,
        max_summary_tokens: int = 2048,
        accept_cut_off: bool = False,
        **built_in: Any,
    ) -> None:
        super().__init__(model, backend=backend, **built_in)
        theirs: dict[str, Any] = {"summary_prompt": DEEPAGENTS_DEFAULT_SUMMARY_PROMPT, **built_in}
        theirs.pop("truncate_args_settings", None)
        # LangChain's part of it, which judges triggers and cuts and writes the summaries: ours knows what is near.
        self._lc_helper = _Judge(
            self._lc_helper.model,
            soft=soft,
            max_summary_tokens=max_summary_tokens,
            accept_cut_off=accept_cut_off,
            backend=server,
            **theirs,
        )
        self.threads = Threads(self._strategy, written=_written, warm=warm, backend=server)

    @property
    def name(self) -> str:
        """The built-in's, by which deepagents replaces its own."""
        return "SummarizationMiddleware"

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """As the built-in, with what is prepared where that is due."""
        turn = self._begin(request)
        if turn is None:
            return super().wrap_model_call(request, handler)
        try:
            turn.decided(turn.thread.on_commit(turn.given))
        except Exception as error:  # whatever it is, the built-in's way is still there
            log.warning("session %s: summarizing as the built-in does: %r", turn.thread.session, error)
            return super().wrap_model_call(request, handler)

        def called(inner: ModelRequest[Any]) -> ModelResponse[Any]:
            call = turn.call = Call(turn.thread, inner, inner.messages)
            with call.main, call.watch.watching():
                return handler(call.routed())

        with _deciding(turn):
            response = super().wrap_model_call(request, called)
        turn.answered(response)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """As the built-in, with what is prepared where that is due."""
        turn = self._begin(request)
        if turn is None:
            return await super().awrap_model_call(request, handler)
        try:
            turn.decided(await turn.thread.aon_commit(turn.given))
        except Exception as error:  # whatever it is, the built-in's way is still there
            log.warning("session %s: summarizing as the built-in does: %r", turn.thread.session, error)
            return await super().awrap_model_call(request, handler)

        async def called(inner: ModelRequest[Any]) -> ModelResponse[Any]:
            call = turn.call = Call(turn.thread, inner, inner.messages)
            async with call.main:
                with call.watch.watching():
                    return await handler(call.routed())

        with _deciding(turn):
            response = await super().awrap_model_call(request, called)
        turn.answered(response)
        return response

    # ---- what the built-in asks itself -----------------------------------------------------------

    def _should_summarize(self, messages: list[AnyMessage], total_tokens: int) -> bool:
        turn = _turn.get()
        return super()._should_summarize(messages, total_tokens) if turn is None else turn.prepared is not None

    def _determine_cutoff_index(self, messages: list[AnyMessage]) -> int:
        prepared = _prepared()
        return super()._determine_cutoff_index(messages) if prepared is None else prepared.cut

    def _create_summary(self, messages_to_summarize: list[AnyMessage]) -> str:
        prepared = _prepared()
        return super()._create_summary(messages_to_summarize) if prepared is None else prepared.text

    async def _acreate_summary(self, messages_to_summarize: list[AnyMessage]) -> str:
        prepared = _prepared()
        return await super()._acreate_summary(messages_to_summarize) if prepared is None else prepared.text

    def _get_session_id(self, state: Mapping[str, Any]) -> str:
        turn = _turn.get()
        return super()._get_session_id(state) if turn is None else turn.strategy.facts.session

    # ---- ours ------------------------------------------------------------------------------------

    def _begin(self, request: ModelRequest[Any]) -> _Turn | None:
        effective = self._get_effective_messages(request)
        thread = opened(self.threads, request)
        if thread is None:
            return None
        strategy = cast("DeepSummaries", thread.strategy)
        facts = strategy.facts
        if not facts.session or request.state.get("_summarization_session_id"):
            facts.session = super()._get_session_id(request.state)
        facts.apart = self._count_tokens([], request.system_message, request.tools)
        return _Turn(thread, strategy, lead_of(thread, request), effective)

    def _strategy(self, model: BaseChatModel) -> DeepSummaries:
        judge = self._lc_helper
        return DeepSummaries(judge, self._content, in_place=judge.asks_in_place(model))

    def _content(self, summary: str, session: str) -> str:
        return str(self._build_new_messages_with_path(summary, self._get_history_path(session))[0].content)


class _Judge(LangChains):
    default_prompt = DEEPAGENTS_DEFAULT_SUMMARY_PROMPT


@dataclass
class _Facts:
    """What a conversation's requests tell; shared by the strategy's copies.

    Attributes:
        session: names the file that its history goes to: part of the summary's message.
        apart: tokens of the system text and the tools, which Deep Agents' trigger counts, too.
    """

    session: str = ""
    apart: int = 0


class DeepSummaries(MiddlewareSummaries):
    """Summaries in Deep Agents' form: with the path of the file that holds what they stand for.

    Args:
        middleware: judges triggers and cuts.
        content: the summary message's content, of the summary and the session.
        in_place: ask at the end of the conversation.
    """

    def __init__(self, middleware: LangChains, content: Callable[[str, str], str], *, in_place: bool) -> None:
        super().__init__(middleware, in_place=in_place)
        self.facts = _Facts()
        self.texts: dict[str, str] = {}
        self._content = content

    @property
    def apart(self) -> int:
        """Tokens of the system text and the tools."""
        return self.facts.apart

    async def rewrite(self, covered: Sequence[Message]) -> list[Message]:
        """The summary message."""
        [message, *rest] = await super().rewrite(covered)
        text = message.text.removeprefix(PREFIX)
        content = self._content(text, self.facts.session)
        self.texts[content] = text
        return [Message("user", content), *rest]


@dataclass
class _Prepared:
    cut: int
    text: str


class _Turn:
    """One model call of a conversation.

    Args:
        thread: the conversation.
        strategy: its strategy.
        lead: the system messages before those of the state.
        effective: the messages that the model would see.

    Attributes:
        given: both.
        prepared: what to summarize with, if it is time.
        call: the call that was made last.
    """

    def __init__(
        self, thread: Thread, strategy: DeepSummaries, lead: Sequence[BaseMessage], effective: Sequence[BaseMessage]
    ) -> None:
        self.thread, self.strategy = thread, strategy
        self.given = [*lead, *effective]
        self._lead = len(lead)
        self.prepared: _Prepared | None = None
        self.call: Call | None = None
        self._before = thread.last_commit

    def decided(self, view: Sequence[BaseMessage]) -> None:
        """The runtime's view: with a new summary, or as it was."""
        report = self.thread.last_commit
        if report is None or report is self._before:
            return
        # The state's event tells the next request what the summary stands for; a fork from before it knows of none.
        self.thread.restore(None)
        texts = (self.strategy.texts.get(str(m.content)) for m in view)
        self.prepared = next((_Prepared(report.boundary - self._lead, text) for text in texts if text), None)

    def answered(self, response: Any) -> None:
        """The model has answered."""
        if self.call is not None:
            end(self.call, response)


class SubAgentMiddleware(DelegationHooks, BuiltInSubAgents[Any, Any]):
    """``deepagents.middleware.subagents.SubAgentMiddleware`` whose sub-agents start warm.

    As `smoothagent_langchain.IsolationMiddleware` says, which is what to pass to ``create_deep_agent``: that makes the
    built-in itself, of its ``subagents``.

    Args:
        models: chat models of sub-agents that do not use the delegating agent's; model objects in ``subagents`` are
            known, names of models are not.
        warm: prefill ahead; default yes, except at hosted endpoints.
        server: the agents' model server, if you have a `smoothagent.Backend` made for it.
        **built_in: everything the built-in takes.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, BaseChatModel] | None = None,
        warm: bool | None = None,
        server: Backend | None = None,
        **built_in: Any,
    ) -> None:
        super().__init__(**built_in)
        specs = cast("Sequence[Mapping[str, Any]]", built_in.get("subagents") or ())
        own = {s["name"]: s["model"] for s in specs if isinstance(s.get("model"), BaseChatModel)}
        self.warm = warm
        self._prepare_to_delegate({**own, **(models or {})}, server)


_turn: ContextVar[_Turn | None] = ContextVar("smoothagent_deepagents", default=None)


def _prepared() -> _Prepared | None:
    turn = _turn.get()
    return turn.prepared if turn is not None else None


@contextmanager
def _deciding(turn: _Turn) -> Generator[None]:
    token = _turn.set(turn)
    try:
        yield
    finally:
        _turn.reset(token)


def _written(content: str) -> BaseMessage:
    return HumanMessage(content, additional_kwargs={"lc_source": "summarization"})
