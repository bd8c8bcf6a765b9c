"""An LLM whose conversations are transformed, and their KV cache warmed, ahead of time."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Self, TypeVar, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms import LLM
from pydantic import PrivateAttr

from smoothagent import Backend, ConfigurationError, LookaheadStrategy, MainRequest
from smoothagent.unseen import is_unseen
from smoothagent.wrap import merged
from smoothagent_llamaindex.aside import AsideBackend, usage_of
from smoothagent_llamaindex.conversations import Conversations, Taken, is_named, opening_of
from smoothagent_llamaindex.isolation import Delegate, Delegates, Started
from smoothagent_llamaindex.models import prompt_for

log = logging.getLogger("smoothagent")
L = TypeVar("L", bound=LLM)


def with_lookahead(
    llm: L,
    strategy: Callable[[], LookaheadStrategy] | None = None,
    *,
    delegates: Mapping[str, Delegate] | None = None,
    warm: bool | None = None,
    backend: Backend | None = None,
    lookahead: bool = True,
    ceiling: int | None = None,
) -> L:
    """A copy of ``llm`` that sends the strategy's view of each conversation, ready and warm when it is due.

    The copy is of the same class, so an agent, a chat engine or a workflow takes it as it takes the original. A call
    belongs to a conversation where it has tools, or an answer among its messages; others pass through as they are.
    Conversations are told by the agent and memory that call (our agents), else by how their messages begin.

    Args:
        llm: any LLM of LlamaIndex's; it stays as it is.
        strategy: makes the strategy of a new conversation, such as ``lambda: KeepRecent(10, at_turns=20)``. None
            transforms nothing.
        delegates: sub-agents by the tools that start them: their prompts are warmed while the model writes the call.
            Their LLMs become copies that tell of their calls.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the LLM's server, if you have one made: with slots of its own, a second server for lookahead work, a
            pacer; default one that is made from the LLM.
        lookahead: False transforms at the trigger, on the critical path.
        ceiling: tokens that an uncommitted request may never reach while a lookahead is late.

    Raises:
        ConfigurationError: ``strategy`` is no factory, or its limits are impossible.
    """
    if strategy is not None:
        _check(strategy, ceiling)
    known = lookahead_of(llm) if isinstance(llm, LookaheadMixin) else None
    made = llm.model_copy()
    # An instance of a subclass made of the LLM's own class: whoever asks for its class finds what there was.
    object.__setattr__(made, "__class__", _class_of(type(llm)))
    own: Any = made
    # What it was given before stays, where nothing takes its place.
    conversations = known.conversations if known is not None else None
    if strategy is not None:
        conversations = Conversations(strategy, warm=warm, backend=backend, lookahead=lookahead, ceiling=ceiling)
    for delegate in (delegates or {}).values():
        if not isinstance(delegate.agent.llm, LookaheadMixin):
            # So that the sub-agent's first call is known when it comes.
            delegate.agent.llm = with_lookahead(delegate.agent.llm)
    heard = known.delegates if known is not None and delegates is None else None
    own._lookahead = Lookahead(conversations, heard or Delegates(delegates or {}, warm=warm, backend=backend))
    return made


def _check(strategy: Callable[[], LookaheadStrategy], ceiling: int | None) -> None:
    """A mistake in the arguments is told where it is made, not at the first conversation."""
    if not callable(strategy) or isinstance(strategy, LookaheadStrategy):
        raise ConfigurationError(
            f"strategy={strategy!r}: pass a factory, such as lambda: KeepRecent(10, at_turns=20): one LLM serves "
            "many conversations, and each needs a strategy of its own"
        )
    one = strategy()
    if strategy() is one:
        raise ConfigurationError(
            f"the factory gives the same {type(one).__name__} again: let it make a new one for each conversation"
        )
    if ceiling is not None and one.waits_for is not None and ceiling < one.waits_for:
        raise ConfigurationError(
            f"ceiling is {ceiling} tokens and hard is {one.waits_for}: the ceiling must be at least hard"
        )


class Lookahead:
    """What an LLM was given for looking ahead.

    Attributes:
        conversations: its conversations; None where nothing is transformed.
        delegates: the sub-agents that its calls may start.
        named_only: only the calls that an agent of ours makes are conversations; others (structured output, an early
            stop) go as they are.
    """

    def __init__(self, conversations: Conversations | None, delegates: Delegates) -> None:
        self.conversations, self.delegates = conversations, delegates
        self.named_only = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied LLM goes on with the same conversations."""
        return self

    def begin(self, llm: LLM, messages: Sequence[ChatMessage], params: Mapping[str, Any]) -> Call | None:
        """The call that is about to be made; None where it is none of a conversation's. It must not fail."""
        try:
            started = Delegates.started_by(llm, messages)
            if started is None and not self._is_conversation(messages, params):
                return None
            return Call(self, llm, messages, params, started)
        except Exception as error:
            log.warning("there is no lookahead: %r", error, exc_info=error)
            return None

    def _is_conversation(self, messages: Sequence[ChatMessage], params: Mapping[str, Any]) -> bool:
        if not messages or (self.conversations is None and not self.delegates):
            return False
        if is_named():
            return True
        # A call that must be of a certain tool asks for a structured answer.
        choice = params.get("tool_choice")
        if isinstance(choice, Mapping):  # Anthropic's form
            choice = cast("Mapping[str, Any]", choice).get("type")
        if self.named_only or choice not in (None, "auto", "none"):
            return False
        return bool(params.get("tools")) or any(m.role == MessageRole.ASSISTANT for m in messages)


class Call:
    """One call of an LLM.

    Args:
        lookahead: the LLM's.
        llm: itself.
        messages: what the agent sends.
        params: the call's other arguments.
        started: the delegation that this call is the first of, if it is one.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        llm: LLM,
        messages: Sequence[ChatMessage],
        params: Mapping[str, Any],
        started: Started | None,
    ) -> None:
        self._lookahead, self._llm, self._history, self._started = lookahead, llm, list(messages), started
        self._taken: Taken | None = None
        try:
            self._prompt = prompt_for(llm, params)
            opening = opening_of(messages, self._prompt)
            if lookahead.conversations is not None:
                warmed = None if started is None else started.delegation
                self._taken = lookahead.conversations.take(llm, opening, messages, warmed)
                if self._taken is not None:
                    self._started = None  # what was warmed is the conversation's from now on
            key = opening
            if self._taken is not None:
                key, conversation = self._taken.key, self._taken.conversation
                self._prompt = conversation.asked_as(self._prompt)
                if isinstance(conversation.backend, AsideBackend):
                    conversation.backend.params = dict(params)
            self._ear = lookahead.delegates.listen(key)
            self._request = self._marked(key)
        except BaseException:
            self.close()
            raise

    def _marked(self, key: str) -> MainRequest:
        """What marks, paces and measures it."""
        if self._started is not None:
            return self._started.request()
        if self._taken is not None:
            return self._taken.conversation.main_request()
        return MainRequest(Paced(self._lookahead.delegates.backend_of(self._llm), key))

    def view(self) -> list[ChatMessage]:
        """What to send."""
        if self._taken is None:
            return self._history
        try:
            return self._taken.conversation.on_commit(self._history, prompt=self._prompt)
        except Exception as error:  # whatever it is, the agent goes on as without us
            self._goes_without(error)
            return self._history

    async def aview(self) -> list[ChatMessage]:
        """What to send."""
        if self._taken is None:
            return self._history
        try:
            return await self._taken.conversation.aon_commit(self._history, prompt=self._prompt)
        except Exception as error:  # whatever it is, the agent goes on as without us
            self._goes_without(error)
            return self._history

    def _goes_without(self, error: Exception) -> None:
        assert self._taken is not None
        self._taken.conversation.say_once("llm", f"calls go without lookahead: {error!r}")

    @property
    def request(self) -> MainRequest:
        """Marks, paces and measures it."""
        return self._request

    def heard(self, response: ChatResponse) -> None:
        """A piece of the answer has come."""
        try:
            self.request.first_token()
            if response.delta:
                self.request.text(response.delta)
            self._ear.hear(response.message)
        except Exception as error:
            log.warning("an answer is not followed: %r", error, exc_info=error)

    def answered(self, response: ChatResponse | None) -> None:
        """It has ended: a segment is complete, the answer's calls are known and their results are not."""
        if response is None:
            return
        try:
            self._ear.hear(response.message)
            usage = usage_of(response)
            if usage is not None:
                self.request.usage(usage)
            if self._taken is not None:
                conversation = self._taken.conversation
                # A copy: LlamaIndex may still take calls out of its own, where only one at a time is allowed.
                answer = response.message.model_copy(update={"blocks": list(response.message.blocks)})
                conversation.last = [*self._history, answer]
                conversation.on_segment_boundary(conversation.last, prompt=self._prompt)
        except Exception as error:  # it must not cost the answer
            if self._taken is not None:
                self._taken.conversation.say_once("answer", f"nothing is prepared: {error!r}")
            else:
                log.warning("nothing is prepared: %r", error, exc_info=error)

    def close(self) -> None:
        """However it ended."""
        if self._started is not None:
            self._started.ended()
        if self._taken is not None:
            self._taken.give_back()


class LookaheadMixin:
    """Mixed in before an LLM's own class by `with_lookahead`."""

    __slots__ = ()  # or an LLM could not change its class

    _lookahead: Lookahead | None

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As the LLM's own, with the view."""
        call = self._begin(messages, kwargs)
        if call is None:
            return _own(self).chat(messages, **kwargs)
        with contextlib.closing(call):
            view = call.view()
            with call.request as request, _within(self._lookahead, request.extras):
                response = _own(self).chat(view, **kwargs)
            call.answered(response)
        return response

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As the LLM's own, with the view."""
        call = self._begin(messages, kwargs)
        if call is None:
            return await _own(self).achat(messages, **kwargs)
        with contextlib.closing(call):
            view = await call.aview()
            async with call.request as request:
                with _within(self._lookahead, request.extras):
                    response = await _own(self).achat(view, **kwargs)
            call.answered(response)
        return response

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """As the LLM's own, with the view; as with most LLMs nothing happens before the first piece is asked for."""
        if self._lookahead is None or is_unseen() or _is_inside(self._lookahead):
            return _own(self).stream_chat(messages, **kwargs)
        return self._streamed(messages, kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """As the LLM's own, with the view; as with most LLMs nothing happens before the first piece is asked for."""
        if self._lookahead is None or is_unseen() or _is_inside(self._lookahead):
            return await _own(self).astream_chat(messages, **kwargs)
        return self._astreamed(messages, kwargs)

    def _streamed(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Generator[ChatResponse, None, None]:
        call = self._begin(messages, kwargs)
        if call is None:
            yield from _own(self).stream_chat(messages, **kwargs)
            return
        with contextlib.closing(call):
            view, last = call.view(), None
            with call.request as request:
                with _within(self._lookahead, request.extras):
                    answer = _own(self).stream_chat(view, **kwargs)
                pieces = iter(answer)
                try:
                    while True:
                        # Whoever reads must not find himself inside of the call.
                        with _within(self._lookahead, request.extras):
                            response = next(pieces, None)
                        if response is None:
                            break
                        last = response
                        call.heard(last)
                        yield last
                finally:
                    if hasattr(answer, "close"):
                        answer.close()
            call.answered(last)

    async def _astreamed(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> AsyncGenerator[ChatResponse, None]:
        call = self._begin(messages, kwargs)
        if call is None:
            answer = await _own(self).astream_chat(messages, **kwargs)
            try:
                async for response in answer:
                    yield response
            finally:
                if hasattr(answer, "aclose"):
                    await answer.aclose()
            return
        with contextlib.closing(call):
            view, last = await call.aview(), None
            async with call.request as request:
                with _within(self._lookahead, request.extras):
                    answer = await _own(self).astream_chat(view, **kwargs)
                pieces = aiter(answer)
                try:
                    while True:
                        # Whoever reads must not find himself inside of the call.
                        with _within(self._lookahead, request.extras):
                            response = await anext(pieces, None)
                        if response is None:
                            break
                        last = response
                        call.heard(last)
                        yield last
                finally:
                    if hasattr(answer, "aclose"):
                        await answer.aclose()
            call.answered(last)

    def _begin(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Call | None:
        if self._lookahead is None or is_unseen() or _is_inside(self._lookahead):
            return None
        return self._lookahead.begin(cast("LLM", self), messages, kwargs)

    def _get_model_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """As OpenAI's own, with what routes the call: in the request, and in nobody's traces."""
        made: dict[str, Any] = cast("Any", super())._get_model_kwargs(**kwargs)
        inside = _inside.get()
        extras = inside.extras if inside is not None and inside.lookahead is self._lookahead else {}
        return merged(made, dict(extras)) if extras else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the LLM it was made of: what runs in this process does not travel."""
        return _unpickled, (plain(cast("LLM", self)),)


def lookahead_of(llm: LLM) -> Lookahead:
    """What `with_lookahead` gave the LLM."""
    own: Any = llm
    return own._lookahead


def has_strategy(llm: LLM) -> bool:
    """Whether what is sent of an LLM's conversations is a strategy's view."""
    return isinstance(llm, LookaheadMixin) and lookahead_of(llm).conversations is not None


class _Inside(NamedTuple):
    """A call of an LLM's own methods.

    Attributes:
        lookahead: whose.
        extras: what routes the request that it makes.
    """

    lookahead: Lookahead | None
    extras: Mapping[str, Any]


_inside: ContextVar[_Inside | None] = ContextVar("smoothagent_inside", default=None)


@contextlib.contextmanager
def _within(lookahead: Lookahead | None, extras: Mapping[str, Any]) -> Generator[None]:
    """What an LLM's own methods call of the same LLM is no other call: many make a stream of a chat, or so."""
    token = _inside.set(_Inside(lookahead, extras))
    try:
        yield
    finally:
        _inside.reset(token)


def _is_inside(lookahead: Lookahead) -> bool:
    inside = _inside.get()
    return inside is not None and inside.lookahead is lookahead


def plain(llm: LLM) -> LLM:
    """The LLM without what `with_lookahead` gave it."""
    if not isinstance(llm, LookaheadMixin):
        return llm
    copy = llm.model_copy()
    own = next(c for c in type(llm).__mro__[1:] if c is not LookaheadMixin)
    object.__setattr__(copy, "__class__", own)
    private: dict[str, Any] = dict(copy.__pydantic_private__ or {})
    private.pop("_lookahead", None)
    object.__setattr__(copy, "__pydantic_private__", private or None)
    return copy


def _unpickled(llm: LLM) -> LLM:
    return llm


_classes: dict[type[LLM], type[LLM]] = {}


def _class_of(llm: type[LLM]) -> type[LLM]:
    if issubclass(llm, LookaheadMixin):
        return llm
    found = _classes.get(llm)
    if found is None:
        names = {"__module__": llm.__module__, "__qualname__": llm.__qualname__, "__doc__": llm.__doc__}
        more = {"_lookahead": PrivateAttr(default=None)}
        # No method of it is in the class itself, so that none becomes a span of its own in the user's traces.
        made: Any = type(llm)
        found = _classes[llm] = made(llm.__name__, (LookaheadMixin, llm), {**names, **more})
    return found


def _own(llm: object) -> Any:
    """The LLM's own methods."""
    return super(LookaheadMixin, llm)  # pyright: ignore[reportArgumentType]


class Paced:
    """A call that lookahead gives way to, and that is not marked: nothing is known of its conversation."""

    def __init__(self, backend: Backend | None, key: str) -> None:
        self._backend, self._key = backend, f"{key}\0unmarked"

    def request_opens(self) -> None:
        """Nothing is waited for."""

    def request_may_block(self) -> bool:
        """Nothing is waited for."""
        return False

    def request_started(self) -> dict[str, Any]:
        """Lookahead gives way."""
        if self._backend is not None:
            self._backend.main_arrived(self._key)
        return {}

    def request_first_token(self) -> None:
        """Small pieces may run again."""
        if self._backend is not None:
            self._backend.main_first_token(self._key)

    def request_text(self, text: str) -> None:
        """Nothing is prepared."""

    def request_usage(self, usage: Any) -> None:
        """Nothing is counted."""

    def request_done(self) -> None:
        """It is over."""
        if self._backend is not None:
            self._backend.main_done(self._key)
