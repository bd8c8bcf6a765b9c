"""Drop-ins for the classic memories of ``langchain_classic``, whose summaries and prompts are ready when asked for.

::

    from smoothagent_langchain.classic import ConversationSummaryBufferMemory  # instead of langchain_classic.memory

A memory's boundary is `save_context`, its commit `load_memory_variables`; in between the user reads and writes.
The built-ins summarize in `save_context`, before the user gets the answer, and their async ways never prune or
summarize (`ConversationTokenBufferMemory`, `ConversationSummaryMemory`).
"""

from smoothagent_langchain.classic.summary import ConversationSummaryMemory
from smoothagent_langchain.classic.summary_buffer import ConversationSummaryBufferMemory
from smoothagent_langchain.classic.token_buffer import ConversationTokenBufferMemory
from smoothagent_langchain.classic.window import ConversationBufferWindowMemory

__all__ = [
    "ConversationBufferWindowMemory",
    "ConversationSummaryBufferMemory",
    "ConversationSummaryMemory",
    "ConversationTokenBufferMemory",
]
