"""A tokenizer for tests without a server: four characters a token, five around a message."""

from __future__ import annotations

from collections.abc import Sequence

from smoothagent_bench.tokens import ServerTokens, Wire


class FakeRenderer:
    """Counts how often it was asked, too."""

    def __init__(self) -> None:
        self.asked = 0

    def text(self, text: str) -> int:
        self.asked += 1
        return -(-len(text) // 4)

    def chat(self, messages: Sequence[Wire]) -> int:
        self.asked += 1
        return 3 + sum(5 + -(-len(str(m["content"])) // 4) for m in messages)


def fake_tokens() -> ServerTokens:
    return ServerTokens(FakeRenderer())
