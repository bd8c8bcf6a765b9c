"""What stands around a context's messages in the calls of its agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autogen_core.models import ChatCompletionClient, LLMMessage

from smoothagent import Prompt
from smoothagent_autogen.codec import leading, merged
from smoothagent_autogen.models import prompt_for, seen_by
from smoothagent_autogen.seen import Asked


@dataclass(frozen=True)
class Shape:
    """The frame of a call.

    Attributes:
        client: whose call.
        systems: the system messages before everything.
        others: messages between those and the context's.
        bare: what else shapes the tokens, without system text.
        plain: the call may use no tools, as an agent's reflection on what they gave.
    """

    client: ChatCompletionClient
    systems: tuple[LLMMessage, ...]
    others: tuple[LLMMessage, ...]
    bare: Prompt
    plain: bool

    def prompt(self, view: Sequence[LLMMessage]) -> Prompt:
        """What else shapes the tokens of a call with ``view``. Raises HistoryError where it cannot be told."""
        of_view = () if self.others else view[: leading(view)]
        systems: list[LLMMessage] = [*self.systems, *of_view]
        several = bool(self.client.model_info.get("multiple_system_messages", False))
        return replace(self.bare, system=merged(systems, several=several))

    def opening(self, view: Sequence[LLMMessage]) -> list[LLMMessage]:
        """The messages of a call with ``view``, after the system text."""
        return [*self.others, *view[0 if self.others else leading(view) :]]


def ends_with(asked: Asked, view: Sequence[LLMMessage]) -> bool:
    """Whether a call's last messages are ``view``, as AutoGen's agents send it."""
    before = len(asked.messages) - len(view)
    if not view or before < 0 or not _same(asked.messages[-1], seen_by(asked.client, view[-1:])[0]):
        return False
    return all(map(_same, asked.messages[before:], seen_by(asked.client, view)))


def shape_of(asked: Asked, view: Sequence[LLMMessage]) -> Shape:
    """What stands around ``view`` in a call that ends with it."""
    before = list(asked.messages[: len(asked.messages) - len(view)])
    systems = leading(before)
    plain = asked.call.get("tool_choice") == "none" and not asked.call.get("tools")
    bare = prompt_for(asked.client, asked.call)
    return Shape(asked.client, tuple(before[:systems]), tuple(before[systems:]), bare, plain)


def _same(a: LLMMessage, b: LLMMessage) -> bool:
    return a is b or (type(a) is type(b) and a == b)
