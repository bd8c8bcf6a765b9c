"""``attach``: lookahead for an unmodified Mini-Agent agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

from smoothagent import (
    Backend,
    CommitReport,
    ConfigurationError,
    Delegation,
    Ledger,
    LookaheadRuntime,
    LookaheadStrategy,
    MainRequest,
    Offload,
    OpenAIBackend,
    Prompt,
    Summarize,
)
from smoothagent.harmless import harmless
from smoothagent.serving.shared import shared_backend
from smoothagent_miniagent.answering import Streaming
from smoothagent_miniagent.aside import AsideBackend
from smoothagent_miniagent.clients import Create, Kind, kind_of, request_of, rerouted, server_of, to_wire_of
from smoothagent_miniagent.codec import MiniAgentCodec
from smoothagent_miniagent.hearing import Heard, delegates_in
from smoothagent_miniagent.tools import ReadOffloadedTool

log = logging.getLogger("smoothagent")

_SUMMARIZER = "_summarize_messages"
"""Mini-Agent's own, which waits for a summary of every round before a call."""


def attach(
    agent: Any,
    strategy: LookaheadStrategy | Callable[[], LookaheadStrategy] | None = None,
    *,
    warm: bool | None = None,
    backend: Backend | None = None,
    lookahead: bool = True,
    ceiling: int | None = None,
    streamed: bool | None = None,
) -> Attachment:
    """Give an agent lookahead, in its own ``run`` and in the ACP server.

    What its model gets is the strategy's view of ``agent.messages``, which keeps everything; Mini-Agent's own
    summarizer is stood down. With `Offload` the agent gets the tool that reads outputs back.

    Args:
        agent: a Mini-Agent ``Agent``; nothing of it is changed but what `Attachment.detach` puts back.
        strategy: the strategy, or a factory of it; default ``Summarize(agent.token_limit)``.
        warm: prefill ahead; None: where it costs nothing but time, that is, not at hosted endpoints, and with an LLM
            client for Anthropic's API only if True.
        backend: the model's server, if you have one made; default one that is made from the agent's LLM client.
        lookahead: False transforms at the trigger, on the critical path.
        ceiling: tokens that an uncommitted request may never reach while a lookahead is late.
        streamed: ask the server for streams, so that lookahead work goes on while the model writes; None: where it is
            llama.cpp, vLLM or SGLang. The agent gets whole answers, as ever.

    Raises:
        ConfigurationError: it is no agent, is attached already, or the strategy's limits are impossible.
    """
    _check(agent)
    return Attachment(
        agent,
        strategy or default_strategy(agent),
        warm=warm,
        backend=backend,
        lookahead=lookahead,
        ceiling=ceiling,
        streamed=streamed,
    )


class Attachment:
    """An agent's lookahead. Made by `attach`; use it with ``with``, or call `detach`.

    Attributes:
        runtime: the conversation's.
    """

    def __init__(
        self,
        agent: Any,
        strategy: LookaheadStrategy | Callable[[], LookaheadStrategy],
        *,
        warm: bool | None,
        backend: Backend | None,
        lookahead: bool,
        ceiling: int | None,
        streamed: bool | None,
        delegation: Delegation[Any] | None = None,
    ) -> None:
        self._agent, self._before = agent, agent.llm
        self._llm = own_llm(agent.llm)
        self._backend = backend or backend_for(self._llm, warm=warm)
        self._codec = MiniAgentCodec(message_of(agent), to_wire_of(self._llm))
        self._streaming = Streaming(streamed)
        self._said: set[str] = set()
        self._tools: list[str] = []
        self.runtime: LookaheadRuntime[Any] = LookaheadRuntime(
            strategy,
            backend=self._backend,
            codec=self._codec,
            lookahead=lookahead,
            ceiling=ceiling,
            session=None if delegation is None else delegation.session,
        )
        if delegation is not None:
            self.runtime.go_on_from(delegation)
        self._add_tools()
        agent.llm = LookaheadLLM(self, agent, self._llm)
        setattr(agent, _SUMMARIZER, _nothing)

    @property
    def ledger(self) -> Ledger:
        """Counts what lookahead cost and saved."""
        return self.runtime.ledger

    @property
    def last_commit(self) -> CommitReport | None:
        """How the last commit turned out, None before the first."""
        return self.runtime.last_commit

    @property
    def backend(self) -> Backend:
        """The model's server."""
        return self._backend

    def detach(self) -> None:
        """Put back what was there, and free what the server holds; its messages are all there."""
        agent = self._agent
        if isinstance(agent.llm, LookaheadLLM) and agent.llm.is_of(self):
            agent.llm = self._before
            agent.__dict__.pop(_SUMMARIZER, None)
            for name in self._tools:
                agent.tools.pop(name, None)
        for tool in delegates_in(agent.tools):
            tool.give_up()
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # ---- the agent's calls ---------------------------------------------------------------------

    async def generate(self, messages: list[Any], tools: list[Any] | None, more: dict[str, Any]) -> Any:
        """Answer a call of the agent's. Raises what its LLM client raises."""
        if not _is_history(messages, self._agent.messages):
            return await self._llm.generate(messages, tools, **more)
        given, prompt = list(messages), self._prompt(tools)
        if isinstance(self._backend, AsideBackend):
            self._backend.loop, self._backend.tools = asyncio.get_running_loop(), tools
        view = await self._view(given, prompt)
        heard = Heard(self._agent)
        async with self.runtime.main_request() as request:
            response = await self._ask(view, tools, more, request, heard)
        self._goes_on(given, response, prompt)
        return response

    async def _ask(
        self, view: list[Any], tools: list[Any] | None, more: dict[str, Any], request: MainRequest, heard: Heard
    ) -> Any:
        kind = kind_of(self._llm)
        if kind is Kind.OTHER:
            heard.begins(streamed=False)
            response = await self._llm.generate(view, tools, **more)
            request.usage(response.usage)
            return response
        streaming = self._streaming if kind is Kind.OPENAI else Streaming(False)
        server = self._backend.server if isinstance(self._backend, OpenAIBackend) else None
        heard.begins(streamed=streaming.here(server))

        async def through(create: Create, params: dict[str, Any]) -> Any:
            return await streaming.answer(create, params, request, heard.piece, server)

        return await rerouted(self._llm, through).generate(view, tools, **more)

    async def _view(self, given: list[Any], prompt: Prompt) -> list[Any]:
        try:
            return await self.runtime.aon_commit(given, prompt=prompt)
        except ConfigurationError:
            raise
        except Exception as error:  # whatever it is, the agent goes on as without us
            self._say_once("view", f"calls go without lookahead: {error!r}")
            return given

    def _prompt(self, tools: list[Any] | None) -> Prompt:
        try:
            prompt = request_of(self._llm, tools).prompt
        except Exception as error:
            self._say_once("prompt", f"what a request holds besides messages is not known: {error!r}")
            return self.runtime.prompt
        # The same object as long as it is the same prompt: another one is counted and digested anew.
        return self.runtime.prompt if self.runtime.prompt == prompt else prompt

    def _goes_on(self, given: list[Any], response: Any, prompt: Prompt) -> None:
        with harmless("an agent's next prompt"):
            self.runtime.on_segment_boundary([*given, self._codec.answer(response)], prompt=prompt)

    # ---- inside --------------------------------------------------------------------------------

    def _add_tools(self) -> None:
        for store in {id(s): s for s in _stores(self.runtime.strategy)}.values():
            tool = ReadOffloadedTool(store)
            if tool.name not in self._agent.tools:
                self._agent.tools[tool.name] = tool
                self._tools.append(tool.name)

    def _say_once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("agent %s: %s", self.runtime.session, text)


class LookaheadLLM:
    """Stands in for an agent's LLM client; whatever it does not do itself is the client's.

    Args:
        attachment: whose it is.
        agent: the agent.
        llm: its client.
    """

    def __init__(self, attachment: Attachment, agent: Any, llm: Any) -> None:
        vars(self).update(_attachment=attachment, _agent=agent, _llm=llm)

    def is_of(self, owner: Any) -> bool:
        """Whether it is this attachment's, or this agent's."""
        return owner is self._attachment or owner is self._agent

    def inner(self) -> Any:
        """The client."""
        return self._llm

    async def generate(self, messages: list[Any], tools: list[Any] | None = None, **more: Any) -> Any:
        """As the client's; the agent's own history is sent as its strategy's view."""
        return await self._attachment.generate(messages, tools, more)

    def __getattr__(self, name: str) -> Any:
        if "_llm" not in vars(self):  # it is being copied
            raise AttributeError(name)
        return getattr(vars(self)["_llm"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_llm"], name, value)


def own_llm(llm: Any) -> Any:
    """The client itself, where another agent's stand-in is used."""
    return llm.inner() if isinstance(llm, LookaheadLLM) else llm


def default_strategy(agent: Any) -> Callable[[], LookaheadStrategy]:
    """Summaries at the agent's own limit."""
    limit: int = agent.token_limit
    return lambda: Summarize(limit)


def backend_for(llm: Any, *, warm: bool | None) -> Backend:
    """The backend for an LLM client's server; one a server, shared by all who use it in this process."""
    server = server_of(llm)
    if server is None:
        return AsideBackend(llm, warm=bool(warm))
    return shared_backend(server.url, server.key, server.headers, warm=warm)


def message_of(agent: Any) -> Callable[..., Any]:
    """The class of an agent's messages."""
    return cast("Callable[..., Any]", type(agent.messages[0]))


async def _nothing() -> None:
    """In the place of Mini-Agent's summarizer."""


def _is_history(messages: Sequence[Any], own: Sequence[Any]) -> bool:
    """Whether a call is about the agent's own messages: its loops give the list itself."""
    return messages is own or (len(messages) == len(own) and all(a is b for a, b in zip(messages, own, strict=True)))


def _stores(strategy: Any) -> list[Any]:
    stages = [strategy, *getattr(strategy, "front", ()), getattr(strategy, "last", None)]
    return [stage.store for stage in stages if isinstance(stage, Offload) and not stage.allow_unreadable]


def _check(agent: Any) -> None:
    needed = ("llm", "messages", "tools", "token_limit", _SUMMARIZER)
    missing = [name for name in needed if not hasattr(agent, name)]
    if missing:
        raise ConfigurationError(
            f"cannot attach to {type(agent).__qualname__!r}: it has no {', '.join(missing)}; pass a Mini-Agent Agent"
        )
    if isinstance(agent.llm, LookaheadLLM) and agent.llm.is_of(agent):
        raise ConfigurationError("the agent is attached already: detach() what attach() returned first")
    if not agent.messages or not callable(getattr(agent.llm, "generate", None)):
        raise ConfigurationError(
            "cannot attach: the agent has no messages, not even a system prompt, or its llm has no generate()"
        )
