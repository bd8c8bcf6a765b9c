"""A server that becomes known with the agent's first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smoothagent.errors import BackendError
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Backend, Caps, Generated, Stream, Usage, Wire


class LateBackend:
    """Passes everything on to the `Backend` that it is told of, for one conversation; until then nothing is done.

    For adapters whose framework tells the model only with the call: a runtime is made before that, and restored.

    Attributes:
        target: the server, once it is known.
        before: messages that stand before the conversation's in each request of the agent's.
    """

    def __init__(self, target: Backend | None = None) -> None:
        self.target = target
        self.before: tuple[Wire, ...] = ()

    def serve(self, conversation: str, target: Backend) -> bool:
        """The conversation's calls go to ``target`` from now on. Whether it is another one than before."""
        before, self.target = self.target, target
        if before is not None and before is not target:
            before.release(conversation)
        return before is not target

    @property
    def _known(self) -> Backend:
        if self.target is None:
            raise BackendError("the model's server is not known before the agent's first call")
        return self.target

    async def caps(self) -> Caps:
        """What the server can do. Raises BackendError before it is known, so that it is asked for again."""
        return await self._known.caps()

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """The server's extras."""
        return {} if self.target is None else self.target.route(conversation, stream)

    async def prefill(
        self, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, partial: bool = False
    ) -> Usage:
        """As the server. Raises BackendError."""
        return await self._known.prefill(conversation, [*self.before, *messages], prompt, partial=partial)

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
        """As the server. Raises BackendError."""
        return await self._known.generate(
            *(conversation, [*self.before, *messages], prompt),
            max_tokens=max_tokens,
            lookahead=lookahead,
            extends_main=extends_main,
        )

    async def promote(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            await self.target.promote(conversation)

    def settle(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            self.target.settle(conversation)

    async def cancel(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            await self.target.cancel(conversation)

    def committed(self, conversation: str) -> bool:
        """As the server."""
        return self.target is not None and self.target.committed(conversation)

    async def deliver(self, conversation: str) -> bool:
        """As the server."""
        return self.target is not None and await self.target.deliver(conversation)

    def undelivered(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            self.target.undelivered(conversation)

    def spent(self, conversation: str) -> Usage:
        """As the server."""
        return Usage() if self.target is None else self.target.spent(conversation)

    def release(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            self.target.release(conversation)

    def main_arrived(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            self.target.main_arrived(conversation)

    def main_first_token(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            self.target.main_first_token(conversation)

    def main_done(self, conversation: str) -> None:
        """As the server."""
        if self.target is not None:
            self.target.main_done(conversation)

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """As the server; None before it is known."""
        return None if self.target is None else await self.target.count([*self.before, *messages], prompt)

    async def aclose(self) -> None:
        """The server is shared with others."""
