"""What an agent's own calls tell of its prompt: the tools and system text that the hooks were not told of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from smoothagent.prompt import Prompt


class LearntPrompt:
    """Completes prompts by what the calls send, as all of it has to be warmed.

    Args:
        say_once: told, under a name, what does not fit together.
    """

    def __init__(self, say_once: Callable[[str, str], None]) -> None:
        self._say_once = say_once
        self._learnt: dict[str, Any] = {}

    def from_call(self, call: Mapping[str, Any], system: str | None, prompt: Prompt) -> Prompt:
        """``prompt`` with the call's tools, and the ``system`` text it put before the conversation."""
        tools = call.get("tools")
        if isinstance(tools, (list, tuple)):
            prompt = self._take_over(prompt, "tools", list(cast("Sequence[Mapping[str, Any]]", tools)))
        return prompt if system is None else self._take_over(prompt, "system", system)

    def complete(self, prompt: Prompt | None, present: Prompt) -> Prompt | None:
        """A prompt that a hook names, with what was learnt where it says nothing."""
        if prompt is None or not self._learnt:
            return prompt
        missing = {k: v for k, v in self._learnt.items() if not getattr(prompt, k)}
        completed = replace(prompt, **missing) if missing else prompt
        # The same object as long as it is the same prompt: another one is counted and digested anew.
        return present if completed == present else completed

    def _take_over(self, prompt: Prompt, name: str, sent: list[Mapping[str, Any]] | str) -> Prompt:
        told = getattr(prompt, name)
        if (list(told) if name == "tools" else told) == sent:
            return prompt
        if told and name not in self._learnt:
            self._say_once(
                name,
                f"the {name} that the calls send are not those that the runtime was told of, or in another order or "
                f"form: what is warmed will not be found. Pass Prompt({name}=…) as sent, or leave it out",
            )
            return prompt
        self._learnt[name] = sent
        return replace(prompt, **{name: sent})
