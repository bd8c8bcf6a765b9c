"""Work ahead through a framework's own model object, for servers that only it can talk to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from smoothagent.errors import BackendError
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Caps, Generated, Stream, Usage, Wire

M = TypeVar("M")

_ASKED = 64
"""Conversations whose last request is remembered."""


class ObjectBackend(ABC, Generic[M]):
    """A `Backend` that knows nothing of its server but what the model object says.

    It prefills only if told to (by asking for one token), paces nothing and marks nothing. The wires that it is given
    know the framework's messages that they were made of, as ``native``.

    Args:
        name: the model object's class.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.

    Attributes:
        prefills: whether it does.
    """

    def __init__(self, name: str, *, warm: bool) -> None:
        self._name = name
        self.prefills = warm
        self._asked: dict[str, list[M]] = {}

    @abstractmethod
    async def ask(self, natives: Sequence[M], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""

    async def caps(self) -> Caps:
        """Whether it prefills."""
        return Caps(self._name, prefill=self.prefills, classes=True, cached_tokens=False)

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """Nothing is marked."""
        del conversation, stream
        return {}

    async def prefill(
        self, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, partial: bool = False
    ) -> Usage:
        """Ask for one token after ``messages``. Raises BackendError."""
        if not self.prefills:
            return Usage()
        natives: list[M] = [m for m in (getattr(w, "native", None) for w in messages) if m is not None]
        if partial:
            natives = natives[:-1]
        if not natives or self._asked.get(conversation) == natives:
            return Usage()  # what is still being written cannot be shown to it
        usage = await self.ask(natives, prompt)
        if len(self._asked) >= _ASKED:
            self._asked.clear()
        self._asked[conversation] = natives
        return usage or Usage()

    async def generate(
        self,
        conversation: str,
        messages: Sequence[Wire],
        prompt: Prompt,
        *,
        max_tokens: int,
        lookahead: bool,
        extends_main: bool = True,
    ) -> Generated:
        """Not by this way: the adapters ask the model object themselves. Raises BackendError."""
        del conversation, messages, prompt, max_tokens, lookahead, extends_main
        raise BackendError(f"{self._name} is asked through its own object")

    async def promote(self, conversation: str) -> None:
        """There is nothing to raise."""

    async def cancel(self, conversation: str) -> None:
        """A call through the model object cannot be taken back; its answer is dropped."""

    def settle(self, conversation: str) -> None:
        """Nothing to settle."""

    def committed(self, conversation: str) -> bool:
        """No streams."""
        del conversation
        return False

    async def deliver(self, conversation: str) -> bool:
        """Nothing is warmed elsewhere."""
        del conversation
        return False

    def undelivered(self, conversation: str) -> None:
        """Nothing is warmed elsewhere."""

    def spent(self, conversation: str) -> Usage:
        """Nothing that could be seen of a request that was cut short."""
        del conversation
        return Usage()

    def release(self, conversation: str) -> None:
        """Nothing is held but what was asked last."""
        self._asked.pop(conversation, None)

    def main_arrived(self, conversation: str) -> None:
        """Nothing is paced."""

    def main_first_token(self, conversation: str) -> None:
        """Nothing is paced."""

    def main_done(self, conversation: str) -> None:
        """Nothing is paced."""

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """Not by the server."""
        del messages, prompt
        return None

    async def aclose(self) -> None:
        """The model is the user's."""
