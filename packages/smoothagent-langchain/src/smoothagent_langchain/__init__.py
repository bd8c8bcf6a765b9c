"""SmoothAgent for LangChain: swap the class, lose the pause.

::

    from smoothagent_langchain import SummarizationMiddleware  # instead of langchain.agents.middleware
"""

from langchain.agents.middleware import ClearToolUsesEdit

from smoothagent_langchain.editing import ContextEditingMiddleware
from smoothagent_langchain.isolation import IsolationMiddleware
from smoothagent_langchain.summarization import SummarizationMiddleware
from smoothagent_langchain.views import (
    KeepRecentMiddleware,
    OffloadMiddleware,
    SlidingWindowMiddleware,
    ViewMiddleware,
)

__version__ = "0.1.0"

__all__ = [
    "ClearToolUsesEdit",
    "ContextEditingMiddleware",
    "IsolationMiddleware",
    "KeepRecentMiddleware",
    "OffloadMiddleware",
    "SlidingWindowMiddleware",
    "SummarizationMiddleware",
    "ViewMiddleware",
    "__version__",
]
