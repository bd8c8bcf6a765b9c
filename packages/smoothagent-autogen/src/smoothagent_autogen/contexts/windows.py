"""AutoGen's own contexts, with the next prompt warmed ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from autogen_core import ComponentModel
from autogen_core.model_context import BufferedChatCompletionContext as BuiltInBuffered
from autogen_core.model_context import ChatCompletionContext
from autogen_core.model_context import HeadAndTailChatCompletionContext as BuiltInHeadAndTail
from autogen_core.model_context import TokenLimitedChatCompletionContext as BuiltInTokenLimited
from autogen_core.model_context import UnboundedChatCompletionContext as BuiltInUnbounded
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    UserMessage,
)
from autogen_core.tools import ToolSchema
from pydantic import BaseModel

from smoothagent import Backend, Ledger
from smoothagent.harmless import harmless
from smoothagent_autogen.paired import paired
from smoothagent_autogen.seen import SEEN
from smoothagent_autogen.upcoming import After, Expected, Upcoming

T = TypeVar("T")

SKIPPED = UserMessage(content="Skipped messages.", source="System")
"""What stands for the messages between head and tail: the same on every turn, so that the prefix survives."""

_SIZES = 4
"""Tools' newest outputs that the next one may be as long as."""


class Window(ChatCompletionContext):
    """What all of them share: the built-in's messages without orphans, and what of the next ones is certain, warm."""

    _ahead: Upcoming
    _warm: bool | None
    _backend: Backend | None
    _said: int
    _resulted: int
    _before: int
    _calls: bool

    def _set_up(self, warm: bool | None, backend: Backend | None) -> None:
        self._warm, self._backend = warm, backend
        self._ahead = Upcoming()
        SEEN.get_ready()
        self._said, self._resulted, self._before, self._calls = 1, 1, 0, False

    @property
    def ledger(self) -> Ledger:
        """Counts what warming cost and saved."""
        return self._ahead.ledger

    @abstractmethod
    def _window(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        """What `get_messages` would give of ``messages``. Counting tokens may take a while."""

    def _given_by(self, context: ChatCompletionContext, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        """What the built-in ``context`` gives of ``messages``, without orphans."""
        return self._without_orphans(now(context.get_messages()), messages)

    def _without_orphans(self, window: Sequence[LLMMessage], messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        return paired(window, whole=messages)

    async def get_messages(self) -> list[LLMMessage]:
        """As the built-in; where that leaves a tool's result without its call, or a call without its result, neither.

        The same objects as were added, in a new list.
        """
        view = self._without_orphans(await super().get_messages(), self._messages)  # pyright: ignore[reportAbstractUsage]
        with harmless("a context's next prompt"):
            results = bool(self._messages) and isinstance(self._messages[-1], FunctionExecutionResultMessage)
            after: After = "results" if results else "said"
            came = max(1, len(self._messages) - self._before)
            if self._calls:
                self._resulted = came
            else:
                self._said = came
            self._ahead.watch(view, after, warm=self._warm, given=self._backend)
        return view

    async def add_message(self, message: LLMMessage) -> None:
        """As the built-in. The model's answer completes a segment: what it calls is known, and what comes of it not."""
        await super().add_message(message)
        # One that no call of the agent's was answered with is somebody else's, handed over.
        if isinstance(message, AssistantMessage) and self._ahead.answered():
            self._before, self._calls = len(self._messages), not isinstance(message.content, str)
            with harmless("a context's next prompt"):
                self._expect(message)

    def _expect(self, answer: AssistantMessage) -> None:
        """The next window, but for the messages that are still to come."""
        after, *coming = self._coming(answer)
        self._ahead.expect(after, *(self._next(list(self._messages), new) for new in coming))

    def _coming(self, answer: AssistantMessage) -> tuple[After, *tuple[list[LLMMessage], ...]]:
        if isinstance(answer.content, str):
            return "said", [UserMessage(content="", source="user") for _ in range(self._said)]
        # An agent that asks its model but once for each task has something said before the next call, too.
        more = [UserMessage(content="", source="user") for _ in range(self._resulted - 1)]
        return "said" if more else "results", [_results(answer, ""), *more]

    def _next(self, stored: list[LLMMessage], coming: Sequence[LLMMessage]) -> list[LLMMessage]:
        window = self._window([*stored, *coming])
        new = {id(message) for message in coming}
        first = next((i for i, message in enumerate(window) if id(message) in new), len(window))
        return window[:first]

    async def clear(self) -> None:
        """As the built-in."""
        await super().clear()
        self._ahead.forget()
        self._before, self._calls = 0, False

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """As the built-in."""
        await super().load_state(state)
        self._ahead.forget()
        self._before, self._calls = len(self._messages), False


class _Config(BaseModel):
    initial_messages: list[LLMMessage] | None = None
    warm: bool | None = None


class UnboundedConfig(_Config):
    """As the built-in's, and ``warm``."""


class BufferedConfig(_Config):
    """As the built-in's, and ``warm``."""

    buffer_size: int


class HeadAndTailConfig(_Config):
    """As the built-in's, and ``warm``."""

    head_size: int
    tail_size: int


class TokenLimitedConfig(_Config):
    """As the built-in's, and ``warm``."""

    model_client: ComponentModel
    token_limit: int | None = None
    tool_schema: list[ToolSchema] | None = None


class UnboundedChatCompletionContext(Window, BuiltInUnbounded):
    """AutoGen's context with all messages; where an agent reflects on its tools' results, that prompt is warm.

    A reflection is asked for without tools, so it has a prompt of its own, and nothing of it is in the cache. Other
    calls extend what is.

    Args:
        initial_messages: as the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made; default one that is made from the agent's model client. It
            is no part of the component's configuration.
    """

    component_config_schema: Any = UnboundedConfig
    component_provider_override = "smoothagent_autogen.UnboundedChatCompletionContext"

    def __init__(
        self,
        initial_messages: list[LLMMessage] | None = None,
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(initial_messages)
        self._set_up(warm, backend)

    def _window(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        return list(messages)

    def _without_orphans(self, window: Sequence[LLMMessage], messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        del messages  # nothing is left out of them
        return list(window)

    def _to_config(self) -> Any:
        return UnboundedConfig(initial_messages=self._initial_messages, warm=self._warm)

    @classmethod
    def _from_config(cls, config: Any) -> Self:
        return cls(config.initial_messages, warm=config.warm)


class BufferedChatCompletionContext(Window, BuiltInBuffered):
    """AutoGen's context with the newest messages, whose next window is warm when it is asked for.

    The window slides with every message. Between an answer of the model's and its next call as many are expected to
    come as did last time: one, with the results of tools, at first.

    Args:
        buffer_size: as the built-in.
        initial_messages: as the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made; default one that is made from the agent's model client. It
            is no part of the component's configuration.

    Raises:
        ValueError: as the built-in.
    """

    component_config_schema: Any = BufferedConfig
    component_provider_override = "smoothagent_autogen.BufferedChatCompletionContext"

    def __init__(
        self,
        buffer_size: int,
        initial_messages: list[LLMMessage] | None = None,
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(buffer_size, initial_messages)
        self._set_up(warm, backend)

    def _window(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        return self._given_by(BuiltInBuffered(self._buffer_size, list(messages)), messages)

    def _to_config(self) -> Any:
        return BufferedConfig(buffer_size=self._buffer_size, initial_messages=self._initial_messages, warm=self._warm)

    @classmethod
    def _from_config(cls, config: Any) -> Self:
        return cls(config.buffer_size, config.initial_messages, warm=config.warm)


class HeadAndTailChatCompletionContext(Window, BuiltInHeadAndTail):
    """AutoGen's context with the first messages and the newest, whose next tail is warm when it is asked for.

    What stands between them is the same text on every turn. The built-in's tells how many messages it stands for, so
    that nothing after it is ever found in a cache.

    Args:
        head_size: as the built-in.
        tail_size: as the built-in.
        initial_messages: as the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made; default one that is made from the agent's model client. It
            is no part of the component's configuration.

    Raises:
        ValueError: as the built-in.
    """

    component_config_schema: Any = HeadAndTailConfig
    component_provider_override = "smoothagent_autogen.HeadAndTailChatCompletionContext"

    def __init__(
        self,
        head_size: int,
        tail_size: int,
        initial_messages: list[LLMMessage] | None = None,
        *,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(head_size, tail_size, initial_messages)
        self._set_up(warm, backend)

    def _window(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        return self._given_by(BuiltInHeadAndTail(self._head_size, self._tail_size, list(messages)), messages)

    def _without_orphans(self, window: Sequence[LLMMessage], messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        added = {id(message) for message in messages}
        return paired([m if id(m) in added else SKIPPED for m in window], whole=messages)

    def _to_config(self) -> Any:
        return HeadAndTailConfig(
            head_size=self._head_size,
            tail_size=self._tail_size,
            initial_messages=self._initial_messages,
            warm=self._warm,
        )

    @classmethod
    def _from_config(cls, config: Any) -> Self:
        return cls(config.head_size, config.tail_size, config.initial_messages, warm=config.warm)


class TokenLimitedChatCompletionContext(Window, BuiltInTokenLimited):
    """AutoGen's context that leaves out messages of the middle, as many as a token limit asks for.

    Which are left out depends on how long the tools' next results are: the windows are warmed that results as long as
    the newest would give.

    Args:
        model_client: as the built-in.
        token_limit: as the built-in.
        tool_schema: as the built-in.
        initial_messages: as the built-in.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made; default one that is made from the agent's model client. It
            is no part of the component's configuration.

    Raises:
        ValueError: as the built-in.
    """

    component_config_schema: Any = TokenLimitedConfig
    component_provider_override = "smoothagent_autogen.TokenLimitedChatCompletionContext"

    def __init__(
        self,
        model_client: ChatCompletionClient,
        *,
        token_limit: int | None = None,
        tool_schema: list[ToolSchema] | None = None,
        initial_messages: list[LLMMessage] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(
            model_client, token_limit=token_limit, tool_schema=tool_schema, initial_messages=initial_messages
        )
        self._set_up(warm, backend)

    def _window(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        """As the built-in, which leaves out the message in the middle and counts all tokens anew until they fit.

        How many stay is searched for: the more do, the more tokens there are.
        """

        def ends(size: int) -> list[LLMMessage]:
            first = (size + 1) // 2
            return (
                list(messages) if size == len(messages) else [*messages[:first], *messages[first - size :][: size // 2]]
            )

        def fits(window: list[LLMMessage]) -> bool:
            if self._token_limit is None:
                return self._model_client.remaining_tokens(window, tools=self._tool_schema) >= 0
            return self._model_client.count_tokens(window, tools=self._tool_schema) <= self._token_limit

        size, most = 0, len(messages)
        while size < most:
            more = (size + most + 1) // 2
            if fits(ends(more)):
                size = more
            else:
                most = more - 1
        window = ends(size)
        if window and isinstance(window[0], FunctionExecutionResultMessage):
            del window[0]
        return self._without_orphans(window, messages)

    def _expect(self, answer: AssistantMessage) -> None:
        stored = list(self._messages)

        def windows(still: Callable[[], bool]) -> Expected:
            after, *coming = self._coming(answer)
            found: list[list[LLMMessage]] = []
            for new in coming:
                if not still():
                    break
                window = self._next(stored, new)
                if window not in found:
                    found.append(window)
            return after, found

        # Beside the tools, since the client counts the tokens of whole windows.
        if not self._ahead.idle:
            self._ahead.find_out(windows)

    def _coming(self, answer: AssistantMessage) -> tuple[After, *tuple[list[LLMMessage], ...]]:
        if isinstance(answer.content, str):
            said = [m for m in self._messages if isinstance(m, UserMessage)][-_SIZES:]
            # Copies, which are known from what is stored.
            copies: list[list[LLMMessage]] = [[m.model_copy() for _ in range(self._said)] for m in reversed(said)]
            return "said", *copies, *super()._coming(answer)[1:]
        outputs = [m for m in self._messages if isinstance(m, FunctionExecutionResultMessage)][-_SIZES:]
        texts = [max((r.content for r in m.content), key=len, default="") for m in reversed(outputs)]
        after, (_, *more) = super()._coming(answer)
        return after, *([_results(answer, text), *more] for text in texts or [""])

    def _to_config(self) -> Any:
        return TokenLimitedConfig(
            model_client=self._model_client.dump_component(),
            token_limit=self._token_limit,
            tool_schema=self._tool_schema,
            initial_messages=self._initial_messages,
            warm=self._warm,
        )

    @classmethod
    def _from_config(cls, config: Any) -> Self:
        return cls(
            ChatCompletionClient.load_component(config.model_client),
            token_limit=config.token_limit,
            tool_schema=config.tool_schema,
            initial_messages=config.initial_messages,
            warm=config.warm,
        )


def _results(answer: AssistantMessage, text: str) -> LLMMessage:
    """The message that follows an answer with calls."""
    calls = [] if isinstance(answer.content, str) else answer.content
    results = [FunctionExecutionResult(content=text, name=c.name, call_id=c.id, is_error=False) for c in calls]
    return FunctionExecutionResultMessage(content=results)


def now(never_waits: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the built-ins', none of which waits for anything."""
    try:
        never_waits.send(None)
    except StopIteration as done:
        return done.value
    never_waits.close()
    raise RuntimeError("a built-in context waits for something")
