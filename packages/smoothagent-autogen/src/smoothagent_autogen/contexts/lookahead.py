"""A context that a strategy keeps within its limits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import AssistantMessage, LLMMessage

from smoothagent import Backend, CommitReport, ConfigurationError, Ledger, LookaheadStrategy
from smoothagent_autogen.conversation import Conversation

STATE = "smoothagent"
"""The key of what is ours in a saved state; AutoGen's own contexts leave it out."""


class LookaheadChatCompletionContext(ChatCompletionContext):
    """All messages are kept; what is sent of them is the strategy's, prepared and warm when it is due.

    It goes with any agent that sends what ``get_messages`` gives as the end of its calls, as AutoGen's own do. The
    first call of an agent is sent as it is: what else is in a prompt is learnt from it.

    Args:
        strategy: makes the conversation's strategy, such as ``lambda: KeepRecent(10, at_turns=20)``.
        initial_messages: as AutoGen's contexts.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made; default one that is made from the agent's model client.
        lookahead: False transforms at the trigger, on the critical path.
        ceiling: tokens that an uncommitted request may never reach while a lookahead is late.

    Raises:
        ConfigurationError: ``strategy`` is no factory, or its limits are impossible.
    """

    def __init__(
        self,
        strategy: Callable[[], LookaheadStrategy],
        *,
        initial_messages: list[LLMMessage] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        lookahead: bool = True,
        ceiling: int | None = None,
    ) -> None:
        super().__init__(initial_messages)
        if not callable(strategy) or isinstance(strategy, LookaheadStrategy):
            raise ConfigurationError(
                f"strategy={strategy!r}: pass a factory, such as lambda: KeepRecent(10, at_turns=20): a context that "
                "is cleared begins with a new one"
            )
        self._conversation = Conversation(strategy, warm=warm, backend=backend, lookahead=lookahead, ceiling=ceiling)

    @property
    def ledger(self) -> Ledger:
        """Counts what lookahead cost and saved."""
        return self._conversation.ledger

    @property
    def last_commit(self) -> CommitReport | None:
        """How the last commit turned out, None before the first."""
        return self._conversation.runtime.last_commit

    async def get_messages(self) -> list[LLMMessage]:
        """What to send: untouched messages are the objects that were added.

        Raises ConfigurationError for an agent that the strategy cannot work with.
        """
        return await self._conversation.view(self._messages)

    async def add_message(self, message: LLMMessage) -> None:
        """As AutoGen's contexts. The model's answer completes a segment: what follows from it is prepared."""
        await super().add_message(message)
        if isinstance(message, AssistantMessage):
            self._conversation.boundary(self._messages)

    async def clear(self) -> None:
        """Begin a new conversation."""
        await super().clear()
        self._conversation.start_over()

    async def save_state(self) -> Mapping[str, Any]:
        """As AutoGen's contexts, which can read it; the last commit is in it."""
        return {**await super().save_state(), STATE: self._conversation.save()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another one, that begins where this is."""
        made: Any = object.__new__(type(self))
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def __reduce__(self) -> Any:
        """Pickled as what it was made of, with its messages and its last commit."""
        config: Any = getattr(self, "_config", None)
        if config is None:
            raise TypeError(f"{type(self).__name__} cannot be pickled: its strategy is made by a function of yours")
        return _revived, (type(self), config, self._messages, self._conversation.save())

    def _goes_on(self, messages: list[LLMMessage], saved: Mapping[str, Any]) -> None:
        self._messages = messages
        self._conversation.start_over(saved)

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved state was; one of AutoGen's own contexts begins with nothing committed."""
        await super().load_state(state)
        self._conversation.start_over(state.get(STATE))


def _revived(
    cls: Any, config: Any, messages: list[LLMMessage], saved: Mapping[str, Any]
) -> LookaheadChatCompletionContext:
    """What was pickled."""
    made: LookaheadChatCompletionContext = cls._from_config(config)
    made._goes_on(messages, saved)  # pyright: ignore[reportPrivateUsage]
    return made
