"""SmoothAgent for LlamaIndex: swap the class, lose the pause.

::

    from smoothagent_llamaindex import FunctionAgent  # instead of llama_index.core.agent.workflow
    from smoothagent_llamaindex import ChatSummaryMemoryBuffer  # instead of llama_index.core.memory
"""

from smoothagent_llamaindex.agents import CodeActAgent, FunctionAgent, ReActAgent
from smoothagent_llamaindex.isolation import Delegate
from smoothagent_llamaindex.llm import with_lookahead
from smoothagent_llamaindex.memory import ChatMemoryBuffer, ChatSummaryMemoryBuffer, Memory, SummaryMemoryBlock
from smoothagent_llamaindex.tools import read_offloaded

__version__ = "0.1.0"

__all__ = [
    "ChatMemoryBuffer",
    "ChatSummaryMemoryBuffer",
    "CodeActAgent",
    "Delegate",
    "FunctionAgent",
    "Memory",
    "ReActAgent",
    "SummaryMemoryBlock",
    "__version__",
    "read_offloaded",
    "with_lookahead",
]
