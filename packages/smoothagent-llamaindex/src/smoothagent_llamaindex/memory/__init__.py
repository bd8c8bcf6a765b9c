"""Drop-ins for LlamaIndex's memories, whose next prompts, and the summaries in them, are ready when they are due."""

from smoothagent_llamaindex.memory.block import SummaryMemoryBlock
from smoothagent_llamaindex.memory.buffer import ChatMemoryBuffer
from smoothagent_llamaindex.memory.memory import Memory
from smoothagent_llamaindex.memory.summary_buffer import ChatSummaryMemoryBuffer

__all__ = ["ChatMemoryBuffer", "ChatSummaryMemoryBuffer", "Memory", "SummaryMemoryBlock"]
