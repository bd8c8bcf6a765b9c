"""Where in a prompt a history stands, so that the next prompt's beginning is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.messages import BaseMessage

from smoothagent import Prompt
from smoothagent_langchain.codec import alike

History = str | list[BaseMessage]
"""What a memory gives to its chain: a text, or messages."""


@dataclass(frozen=True)
class Shape:
    """Where in a prompt the history stands.

    Attributes:
        before: messages before it.
        message: the one whose text holds it; None where it is messages of its own.
        text: what stands before it in that text.
        prompt: what else shapes the tokens.
    """

    before: tuple[BaseMessage, ...]
    message: BaseMessage | None
    text: str
    prompt: Prompt

    def opening(self, history: History) -> list[BaseMessage]:
        """What a prompt with this history begins with, whatever the user asks next."""
        if isinstance(history, str):
            if self.message is None:
                return list(self.before)
            return [*self.before, self.message.model_copy(update={"content": self.text + history})]
        return [*self.before, *(history if self.message is None else ())]


def shape_of(sent: Sequence[BaseMessage], history: History, prompt: Prompt) -> Shape | None:
    """Where ``history`` stands in what was sent; None where it does not, or in several places."""
    if not history:
        return None
    found: list[Shape] = []
    if isinstance(history, str):
        for i, message in enumerate(sent):
            if isinstance(message.content, str) and message.content.count(history):
                found += [Shape(tuple(sent[:i]), message, message.content.partition(history)[0], prompt)]
                found *= message.content.count(history)
    else:
        for i in range(len(sent) - len(history) + 1):
            if all(map(alike, sent[i : i + len(history)], history)):
                found.append(Shape(tuple(sent[:i]), None, "", prompt))
    return found[0] if len(found) == 1 else None
