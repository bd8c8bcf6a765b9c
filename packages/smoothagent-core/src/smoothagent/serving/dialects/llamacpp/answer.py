"""An answer as it grows over pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from smoothagent.serving import chat
from smoothagent.serving.dialects.base import whole

NOT_FOR_SUMMARIES = frozenset({"stop", "ignore_eos", "response_format", "json_schema", "grammar", "logit_bias"})
"""Fields of the agent's own answers that would spoil a summary."""
FOR_COMPLETION = chat.SAMPLING - NOT_FOR_SUMMARIES


class Answer:
    """What was decoded so far.

    Attributes:
        tokens: its token ids.
        text: its text.
        dirty: the ids are not those that were decoded; the text is to be tokenised anew.
        least: the fewest tokens a piece must decode to get on.
        computed: prompt tokens that had to be computed for it again.
        counts_on: a piece of it has ended well.
    """

    def __init__(self, max_tokens: int, fields: Mapping[str, Any]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.dirty = False
        self.least = 1
        self.computed = 0
        self.counts_on = False
        self._max_tokens = max_tokens
        self._sampling = {"temperature": 0, **{k: v for k, v in fields.items() if k in FOR_COMPLETION}}
        self._counted = 0

    @property
    def left(self) -> int:
        """Tokens it may still grow by."""
        return self._max_tokens - len(self.tokens)

    def request(self, tokens: int) -> dict[str, Any]:
        """Fields of the next piece."""
        self._counted = 0
        return {**self._sampling, "n_predict": tokens, "return_tokens": True}

    def take(self, event: Mapping[str, Any]) -> int:
        """Add one event's text and tokens; returns how many tokens were decoded for it."""
        tokens = cast("list[int]", event.get("tokens") or [])
        counted = whole(event.get("tokens_predicted")) or self._counted + len(tokens)
        new, self._counted = counted - self._counted, counted
        self.text += str(event.get("content") or "")
        self.tokens = [*self.tokens, *tokens]
        # A character of several tokens brings only its last one: the text is tokenised anew.
        self.dirty = self.dirty or new != len(tokens)
        return max(new, 0)
