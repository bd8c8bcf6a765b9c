"""A window of the newest messages, whose next prompt is warmed."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import ChatMemoryBuffer as BuiltIn
from llama_index.core.memory.types import DEFAULT_CHAT_STORE_KEY
from llama_index.core.storage.chat_store import SimpleChatStore
from pydantic import Field, PrivateAttr

from smoothagent import Backend
from smoothagent.harmless import harmless
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike
from smoothagent_llamaindex.memory.upcoming import Upcoming

_RECENT = 4
"""The user's newest messages tell how long the next one will be."""


class ChatMemoryBuffer(BuiltIn):
    """``ChatMemoryBuffer``: the same window, and what the next one will begin with is prefilled ahead.

    Once the window has begun to move, each new message of the user's moves it, so that the server would compute all of
    it anew. After each answer the next window is worked out for a user's message of the usual length, and prefilled
    while the user reads; a message that moves it further finds it cold.

    Attributes:
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the LLM that calls.
    """

    warm: bool | None = Field(default=None, exclude=True)
    backend: Any = Field(default=None, exclude=True)
    _upcoming: Upcoming = PrivateAttr(default_factory=Upcoming)
    _initial: int = PrivateAttr(default=0)

    @classmethod
    def from_defaults(
        cls, *args: Any, warm: bool | None = None, backend: Backend | None = None, **built_in: Any
    ) -> ChatMemoryBuffer:
        """As the built-in; ``warm`` as above."""
        made = super().from_defaults(*args, **built_in)
        assert isinstance(made, ChatMemoryBuffer)
        made.warm, made.backend = warm, backend
        return made

    def get(self, input: str | None = None, initial_token_count: int = 0, **kwargs: Any) -> list[ChatMessage]:  # noqa: A002
        """As the built-in."""
        window = super().get(input=input, initial_token_count=initial_token_count, **kwargs)
        self._initial = initial_token_count
        self._upcoming.watch(window, warm=self.warm, given=self.backend)
        return window

    def put(self, message: ChatMessage) -> None:
        """As the built-in."""
        super().put(message)
        if answers(message):
            self._expect(self.get_all())

    def put_messages(self, messages: list[ChatMessage]) -> None:
        """As the built-in."""
        for message in messages:
            super().put(message)
        if messages and answers(messages[-1]):
            self._expect(self.get_all())

    async def aput(self, message: ChatMessage) -> None:
        """As the built-in."""
        await super().aput(message)
        if answers(message):
            self._expect(await self.aget_all())

    def reset(self) -> None:
        """As the built-in."""
        super().reset()
        self._upcoming.forget()

    async def areset(self) -> None:
        """As the built-in."""
        await super().areset()
        self._upcoming.forget()

    def _expect(self, stored: Sequence[ChatMessage]) -> None:
        with harmless("a memory's next prompt"):
            window = self._next_window(stored)
            if window and not alike(window[0], stored[0]):
                self._upcoming.expect(window)  # it moves; one that does not is in the cache as it is

    def _next_window(self, stored: Sequence[ChatMessage]) -> list[ChatMessage]:
        """What `get` will give after a user's message of the usual length, without that message."""
        said = [m for m in stored if m.role == MessageRole.USER][-_RECENT:]
        if not said:
            return []
        usual = int(median(self._token_count_for_messages([m]) for m in said))
        asked = min(said, key=lambda m: abs(self._token_count_for_messages([m]) - usual))
        built_in = BuiltIn(
            token_limit=self.token_limit,
            tokenizer_fn=self.tokenizer_fn,
            chat_store=SimpleChatStore(store={DEFAULT_CHAT_STORE_KEY: [*stored, asked]}),
        )
        return built_in.get(initial_token_count=self._initial)[:-1]


def answers(message: ChatMessage) -> bool:
    """Whether a message ends a turn, so that the user is next."""
    return message.role == MessageRole.ASSISTANT and not LlamaIndexCodec().decode(message).tool_calls
