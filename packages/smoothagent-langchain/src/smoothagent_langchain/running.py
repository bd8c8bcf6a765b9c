"""A summary that is being written in the background, of LangChain messages."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence

from langchain_core.messages import BaseMessage

from smoothagent import running
from smoothagent.lane import Lane
from smoothagent_langchain.aside import in_thread
from smoothagent_langchain.codec import alike


class RunningSummary(running.RunningSummary[BaseMessage]):
    """One of LangChain messages."""

    def write(
        self, lane: Lane, write: Callable[[], str], covered: Sequence[BaseMessage], existing: str
    ) -> concurrent.futures.Future[str]:
        """Begin one of ``covered``, added to the ``existing`` summary; in a thread, since models block."""
        return self.start(lane, in_thread(write), covered, existing)

    def snapshot(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """Messages as they are now."""
        return snapshot(messages)

    def alike(self, a: BaseMessage, b: BaseMessage) -> bool:
        """Whether two messages are the same to a model."""
        return alike(a, b)


def snapshot(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Messages as they are now."""
    return [message.model_copy(deep=True) for message in messages]
