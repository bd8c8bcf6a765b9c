"""What stands around a context's messages in the calls of its agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autogen_core.models import ChatCompletionClient, LLMMessage, SystemMessage

from smoothagent import Prompt
from smoothagent_autogen.aside import seen_by
from smoothagent_autogen.codec import leading, merged
from smoothagent_autogen.models import prompt_for
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
        call: keyword arguments of the client's ``create``.
    """

    client: ChatCompletionClient
    systems: tuple[LLMMessage, ...]
    others: tuple[LLMMessage, ...]
    bare: Prompt
    plain: bool
    call: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)

    @property
    def _several(self) -> bool:
        """Whether system messages are sent one by one; else they are merged into one, in front."""
        return bool(self.client.model_info.get("multiple_system_messages", False))

    def prompt(self, view: Sequence[LLMMessage]) -> Prompt:
        """What else shapes the tokens of a call with ``view``."""
        systems = self._systems(view)
        first = systems[0].content if systems and isinstance(systems[0], SystemMessage) else None
        return replace(self.bare, system=first if self._several else merged(systems))

    def before(self, view: Sequence[LLMMessage]) -> list[LLMMessage]:
        """The messages of a call with ``view`` between the system text and what follows the view's own."""
        return [*(self._systems(view)[1:] if self._several else ()), *self.others]

    def opening(self, view: Sequence[LLMMessage]) -> list[LLMMessage]:
        """The messages of a call with ``view``, after the system text."""
        return [*self.before(view), *view[0 if self.others else leading(view) :]]

    def _systems(self, view: Sequence[LLMMessage]) -> list[LLMMessage]:
        return [*self.systems, *(() if self.others else view[: leading(view)])]


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
    return Shape(asked.client, tuple(before[:systems]), tuple(before[systems:]), bare, plain, dict(asked.call))


def _same(a: LLMMessage, b: LLMMessage) -> bool:
    return a is b or (type(a) is type(b) and a == b)


class AfterResults:
    """The calls that follow tools' results: a reflection, or the next iteration of the agent's loop.

    Attributes:
        next: what the next one is expected to be like; None where none was seen.
    """

    def __init__(self) -> None:
        self.next: Shape | None = None
        self._last: Shape | None = None

    def add(self, shape: Shape) -> None:
        """One was made. Only two reflections in a row make another one likely: else a loop has ended with it."""
        again = self._last is None or self._last.plain == shape.plain
        if not shape.plain or again:
            self.next = shape
        self._last = shape

    @property
    def reflects(self) -> bool:
        """Whether the next one is expected to be a reflection."""
        return self.next is not None and self.next.plain
