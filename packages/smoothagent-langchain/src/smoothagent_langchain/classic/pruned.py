"""A memory whose oldest messages go where there are too many."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage
from pydantic import PrivateAttr

from smoothagent_langchain.classic.warmed import WarmedMemory


class PrunedMemory(WarmedMemory):
    """The oldest messages go where there are too many.

    Those of a history that keeps its messages elsewhere (a file, a database) are passed over and stay there: the
    built-ins pop them off a copy, and so drop nothing.
    """

    llm: BaseLanguageModel  # pyright: ignore[reportMissingTypeArgument]  pydantic needs the bare class
    max_token_limit: int = 2000
    _passed: list[bytes] = PrivateAttr(default_factory=list[bytes])
    _passed_of: object = PrivateAttr(default=None)
    """The history whose first messages are passed over, each by its digest."""

    def _forget(self) -> None:
        super()._forget()
        self._passed = []

    def _present(self, messages: list[BaseMessage]) -> list[BaseMessage]:
        """What has not been pruned."""
        passed = self._passed
        same = self._passed_of is self.chat_memory and len(messages) >= len(passed)
        if passed and not (same and passed == [*map(_mark, messages[: len(passed)])]):
            passed = self._passed = []  # another conversation, or one that was edited
        return messages[len(passed) :] if passed else messages

    def _drop(self, messages: list[BaseMessage], count: int) -> None:
        """Prune the first ``count`` of ``messages``, which are the history's own or what is left of them."""
        chat = self.chat_memory
        own: object = vars(chat).get("messages")  # not by asking: where it is a property, that reads a database
        if isinstance(own, list):
            del own[:count]  # as the built-ins pop from it
        else:
            self._passed = [*self._passed, *map(_mark, messages[:count])]
            self._passed_of = chat

    def _surplus(self, messages: Sequence[BaseMessage], limit: float) -> int:
        """How many of the oldest messages are too many for ``limit`` tokens, counted as the built-in does."""
        count = 0
        while count < len(messages) and self._tokens(messages[count:]) > limit:
            count += 1
        return count

    def _tokens(self, messages: Sequence[BaseMessage]) -> int:
        return int(cast("Any", self).llm.get_num_tokens_from_messages(list(messages)))


def _mark(message: BaseMessage) -> bytes:
    return hashlib.blake2b(
        repr((message.type, message.content)).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
