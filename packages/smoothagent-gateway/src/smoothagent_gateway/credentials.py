"""One backend for the server, and each client's own key on what is asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoothagent import Backend, Caps, Generated, Prompt, Stream, Usage
from smoothagent.serving.backend import Wire
from smoothagent.serving.connection import sent_with

NAMES = (b"authorization", b"api-key", b"x-api-key")
"""Request headers that say who a client is; in lower case."""


def credentials_in(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """What a client authorizes itself with."""
    return {_SENT[k]: v.decode("latin-1") for k, v in headers if k in NAMES}


_SENT = {b"authorization": "Authorization", b"api-key": "api-key", b"x-api-key": "x-api-key"}


class AsClient:
    """The server as one client of the gateway's is let in there: it leases slots and is paced with all the others.

    Args:
        backend: the server's, shared.
        credentials: headers of what is asked for this client.

    Attributes:
        target: the server's.
    """

    def __init__(self, backend: Backend, credentials: Mapping[str, str]) -> None:
        self.target, self._credentials = backend, credentials

    async def caps(self) -> Caps:
        """As the server's."""
        with sent_with(self._credentials):
            return await self.target.caps()

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """As the server's."""
        return self.target.route(conversation, stream)

    async def prefill(
        self, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, partial: bool = False
    ) -> Usage:
        """As the server's."""
        with sent_with(self._credentials):
            return await self.target.prefill(conversation, messages, prompt, partial=partial)

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
        """As the server's."""
        with sent_with(self._credentials):
            return await self.target.generate(
                *(conversation, messages, prompt),
                max_tokens=max_tokens,
                lookahead=lookahead,
                extends_main=extends_main,
            )

    async def promote(self, conversation: str) -> None:
        """As the server's."""
        with sent_with(self._credentials):
            await self.target.promote(conversation)

    async def cancel(self, conversation: str) -> None:
        """As the server's."""
        with sent_with(self._credentials):
            await self.target.cancel(conversation)

    def settle(self, conversation: str) -> None:
        """As the server's."""
        self.target.settle(conversation)

    def committed(self, conversation: str) -> bool:
        """As the server's."""
        return self.target.committed(conversation)

    async def deliver(self, conversation: str) -> bool:
        """As the server's."""
        with sent_with(self._credentials):
            return await self.target.deliver(conversation)

    def undelivered(self, conversation: str) -> None:
        """As the server's."""
        with sent_with(self._credentials):
            self.target.undelivered(conversation)

    def spent(self, conversation: str) -> Usage:
        """As the server's."""
        return self.target.spent(conversation)

    def release(self, conversation: str) -> None:
        """As the server's."""
        with sent_with(self._credentials):
            self.target.release(conversation)

    def main_arrived(self, conversation: str) -> None:
        """As the server's."""
        self.target.main_arrived(conversation)

    def main_first_token(self, conversation: str) -> None:
        """As the server's."""
        self.target.main_first_token(conversation)

    def main_done(self, conversation: str) -> None:
        """As the server's."""
        with sent_with(self._credentials):
            self.target.main_done(conversation)

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """As the server's."""
        with sent_with(self._credentials):
            return await self.target.count(messages, prompt)

    async def aclose(self) -> None:
        """The server is shared with others."""
