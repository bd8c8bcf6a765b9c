"""One message for each result: AutoGen keeps those of parallel calls in one, and sends them as several."""

from __future__ import annotations

from collections.abc import Sequence

from autogen_core.models import FunctionExecutionResultMessage, LLMMessage


class Flattening:
    """Takes messages with several results apart, and puts untouched ones together again as the same objects."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[FunctionExecutionResultMessage, list[LLMMessage]]] = {}
        self._whole: dict[int, FunctionExecutionResultMessage] = {}
        self._by_call: dict[str, int] = {}
        self._single: set[int] = set()

    def flat(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        """The same history with one message for each result; what was taken apart before has the same parts."""
        before, self._parts = self._parts, {}
        self._single = set()
        out: list[LLMMessage] = []
        for message in messages:
            if not isinstance(message, FunctionExecutionResultMessage) or len(message.content) == 1:
                self._single.add(id(message))
                out.append(message)
                continue
            known = before.get(id(message))
            if known is None or [p.content[0] for p in _results(known[1])] != message.content:
                parts: list[LLMMessage] = [
                    FunctionExecutionResultMessage(content=[result]) for result in message.content
                ]
                known = (message, parts)
            self._parts[id(message)] = known
            out += known[1]
        self._whole = {id(part): whole for whole, parts in self._parts.values() for part in parts}
        owners: dict[str, list[int]] = {}
        for whole, parts in self._parts.values():
            for part in _results(parts):
                owners.setdefault(part.content[0].call_id, []).append(id(whole))
        # Some clients give all calls the same id.
        self._by_call = {call: found[0] for call, found in owners.items() if len(found) == 1}
        return out

    def joined(self, view: Sequence[LLMMessage]) -> list[LLMMessage]:
        """A view of what `flat` gave last, with the results of one message together again."""
        out: list[LLMMessage] = []
        group: list[FunctionExecutionResultMessage] = []
        of: int | None = None
        for message in view:
            belongs = self._belongs(message)
            if group and belongs != of:
                out.append(self._join(group))
                group = []
            if isinstance(message, FunctionExecutionResultMessage) and belongs is not None:
                group.append(message)
                of = belongs
            else:
                out.append(message)
        if group:
            out.append(self._join(group))
        return out

    def _belongs(self, message: LLMMessage) -> int | None:
        """Which message it is a part of, untouched or rewritten."""
        if not isinstance(message, FunctionExecutionResultMessage) or id(message) in self._single:
            return None
        whole = self._whole.get(id(message))
        return id(whole) if whole is not None else self._by_call.get(message.content[0].call_id)

    def _join(self, group: list[FunctionExecutionResultMessage]) -> LLMMessage:
        whole = self._whole.get(id(group[0]))
        if whole is not None:
            parts = self._parts[id(whole)][1]
            if len(parts) == len(group) and all(a is b for a, b in zip(parts, group, strict=True)):
                return whole
        return FunctionExecutionResultMessage(content=[result for part in group for result in part.content])


def _results(parts: Sequence[LLMMessage]) -> list[FunctionExecutionResultMessage]:
    return [part for part in parts if isinstance(part, FunctionExecutionResultMessage)]
