"""Drop-in model contexts."""

from smoothagent_autogen.contexts.lookahead import LookaheadChatCompletionContext
from smoothagent_autogen.contexts.offloading import OffloadingChatCompletionContext
from smoothagent_autogen.contexts.summarizing import SummarizingChatCompletionContext
from smoothagent_autogen.contexts.windows import (
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
    TokenLimitedChatCompletionContext,
    UnboundedChatCompletionContext,
)

__all__ = [
    "BufferedChatCompletionContext",
    "HeadAndTailChatCompletionContext",
    "LookaheadChatCompletionContext",
    "OffloadingChatCompletionContext",
    "SummarizingChatCompletionContext",
    "TokenLimitedChatCompletionContext",
    "UnboundedChatCompletionContext",
]
