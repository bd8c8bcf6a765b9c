"""Windows without results whose calls they leave out, and without calls whose results they do (the law, 4)."""

from __future__ import annotations

from collections.abc import Sequence

from autogen_core.models import AssistantMessage, FunctionExecutionResultMessage, LLMMessage


def paired(window: Sequence[LLMMessage], *, whole: Sequence[LLMMessage]) -> list[LLMMessage]:
    """``window`` without the halves of pairs that it has cut through; nothing else is left out.

    Args:
        window: messages of the history, the same objects; others (a placeholder) may stand between them.
        whole: the history. What has no other half there stays.
    """
    links = _links(whole)
    inside = {id(message) for message in window}
    halves = {half for call, results in links.items() if not inside.issuperset({call, *results}) for half in results}
    halves |= {call for call, results in links.items() if not inside.issuperset(results)}
    return [message for message in window if id(message) not in halves]


def _links(whole: Sequence[LLMMessage]) -> dict[int, set[int]]:
    """The messages with results that belong to each message with calls, by identity."""
    links: dict[int, set[int]] = {}
    open_calls: list[tuple[str, int]] = []
    for message in whole:
        if isinstance(message, AssistantMessage) and not isinstance(message.content, str):
            open_calls += [(call.id, id(message)) for call in message.content]
        elif isinstance(message, FunctionExecutionResultMessage):
            for result in message.content:
                # The nearest call that is still open: ids may be minted anew with every turn, or not at all.
                found = next((c for c in reversed(open_calls) if c[0] == result.call_id), None)
                if found is not None:
                    open_calls.remove(found)
                    links.setdefault(found[1], set()).add(id(message))
    return links
