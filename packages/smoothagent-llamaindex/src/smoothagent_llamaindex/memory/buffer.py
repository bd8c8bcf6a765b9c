"""A window of the newest messages, whose next prompt is warmed."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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

_RECENT = 5
"""The user's newest messages tell how long the next one will be."""


class ChatMemoryBuffer(BuiltIn):
    """``ChatMemoryBuffer``: the same window, and what the next one will begin with is prefilled ahead.

    Once the window has begun to move, each new message of the user's moves it, so that the server would compute all of
    it anew. After each answer the next window is worked out for messages as long as the user's newest ones, and the
    likeliest is prefilled while the user reads (the two likeliest, where the server keeps more than one prefix); a
    message that moves it elsewhere finds it cold.

    Attributes:
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the agent's server, if you have one made; default one that is made from the LLM that calls.
    """

    warm: bool | None = None
    backend: Any = Field(default=None, exclude=True)
    _upcoming: Upcoming = PrivateAttr(default_factory=Upcoming)
    _initial: int = PrivateAttr(default=0)
    _given: list[ChatMessage] = PrivateAttr(default_factory=list[ChatMessage])

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
        self._initial, self._given = initial_token_count, window
        self._upcoming.watch(window, warm=self.warm, given=self.backend)
        return window

    def put(self, message: ChatMessage) -> None:
        """As the built-in."""
        super().put(message)
        self._was_put(message)

    async def aput(self, message: ChatMessage) -> None:
        """As the built-in."""
        await super().aput(message)
        self._was_put(message)

    def reset(self) -> None:
        """As the built-in."""
        super().reset()
        self._upcoming.forget()

    async def areset(self) -> None:
        """As the built-in."""
        await super().areset()
        self._upcoming.forget()

    def _was_put(self, message: ChatMessage) -> None:
        if answers(message) and not self._upcoming.idle:
            # Beside the answer, since tokens are counted, and a database may be asked.
            # What was given to the call that has been answered: an agent may ask once more at the end of its run.
            given, initial = self._given, self._initial
            self._upcoming.find_out(lambda: self._expect(given, initial))

    def _expect(self, given: list[ChatMessage], initial: int) -> None:
        with harmless("a memory's next prompt"):
            stored = self.get_all()
            if given:
                # A window only moves on: what was before the last one is not counted again.
                starts = (i for i in reversed(range(len(stored))) if alike(stored[i], given[0]))
                stored = next((stored[i:] for i in starts if all(map(alike, given, stored[i:]))), stored)
            moved = [w for w in self._next_windows(stored, initial) if w and not (given and alike(w[0], given[0]))]
            if moved:  # one that does not move is in the cache as it is
                self._upcoming.expect(*moved)

    def _next_windows(self, stored: Sequence[ChatMessage], initial: int) -> list[list[ChatMessage]]:
        """What `get` may give after the user's next message, without that: the likeliest first.

        What it would have given had the user said one of the newest messages again, by how many of them say the same.
        """
        said = [m for m in stored if m.role == MessageRole.USER][-_RECENT:]
        windows = [self._window(stored, m, initial) for m in reversed(said)]
        by_start = Counter(len(w) for w in windows)
        return [next(w for w in windows if len(w) == length) for length, _ in by_start.most_common()]

    def _window(self, stored: Sequence[ChatMessage], asked: ChatMessage, initial: int) -> list[ChatMessage]:
        built_in = BuiltIn(
            token_limit=self.token_limit,
            tokenizer_fn=self.tokenizer_fn,
            chat_store=SimpleChatStore(store={DEFAULT_CHAT_STORE_KEY: [*stored, asked]}),
        )
        return built_in.get(initial_token_count=initial)[:-1]


def answers(message: ChatMessage) -> bool:
    """Whether a message ends a turn, so that the user is next."""
    return message.role == MessageRole.ASSISTANT and not LlamaIndexCodec().decode(message).tool_calls
