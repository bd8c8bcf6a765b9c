"""SmoothAgent for AutoGen: swap the class, lose the pause.

::

    from smoothagent_autogen import BufferedChatCompletionContext  # instead of autogen_core.model_context
"""

from smoothagent_autogen.contexts import (
    BufferedChatCompletionContext,
    HeadAndTailChatCompletionContext,
    LookaheadChatCompletionContext,
    OffloadingChatCompletionContext,
    SummarizingChatCompletionContext,
    TokenLimitedChatCompletionContext,
    UnboundedChatCompletionContext,
)
from smoothagent_autogen.delegating import AgentTool, TeamTool
from smoothagent_autogen.tools import read_offloaded

__version__ = "0.1.0"

__all__ = [
    "AgentTool",
    "BufferedChatCompletionContext",
    "HeadAndTailChatCompletionContext",
    "LookaheadChatCompletionContext",
    "OffloadingChatCompletionContext",
    "SummarizingChatCompletionContext",
    "TeamTool",
    "TokenLimitedChatCompletionContext",
    "UnboundedChatCompletionContext",
    "__version__",
    "read_offloaded",
]
