"""SmoothAgent: context transformations, and their KV cache, prepared ahead of time.

Two lines in an agent's loop::

    runtime = LookaheadRuntime(strategy, backend=OpenAIBackend(base_url, model))
    messages = runtime.on_commit(messages)  # before each model call
    runtime.on_segment_boundary(messages)  # when a segment is complete
"""

from smoothagent.codec import Codec, OpenAICodec
from smoothagent.delegation import Delegation
from smoothagent.errors import (
    BackendError,
    BackendProtocolError,
    BackendRefusedError,
    BackendUnreachableError,
    ClosedError,
    ConfigurationError,
    HistoryError,
    PromptTooLongError,
    RateLimitedError,
    SmoothAgentError,
    StoreError,
    StoreUnavailableError,
    SummaryRejectedError,
    UnknownReferenceError,
)
from smoothagent.ledger import Budget, Ledger, LedgerSnapshot, Money, PriceTable
from smoothagent.limits import Limits
from smoothagent.message import Message, ToolCall
from smoothagent.pool import RuntimePool
from smoothagent.prompt import Prompt
from smoothagent.read_tool import READ_OFFLOADED_TOOL, ReadOffloaded
from smoothagent.record import CommitRecord, CommitReport
from smoothagent.request import MainRequest
from smoothagent.runtime import LookaheadRuntime
from smoothagent.serving.backend import Backend, Caps, Generated, Stream, Usage
from smoothagent.serving.openai import OpenAIBackend
from smoothagent.state import LookaheadState, MainState
from smoothagent.store import OffloadStore, Reference
from smoothagent.strategies import Isolate, KeepRecent, Offload, Pipeline, SlidingWindow, Summarize
from smoothagent.strategy import Commit, CutStrategy, LookaheadStrategy, Prediction
from smoothagent.tokens import EstimateCounter, FunctionCounter, TokenCounter

__version__ = "0.1.0"

__all__ = [
    "READ_OFFLOADED_TOOL",
    "Backend",
    "BackendError",
    "BackendProtocolError",
    "BackendRefusedError",
    "BackendUnreachableError",
    "Budget",
    "Caps",
    "ClosedError",
    "Codec",
    "Commit",
    "CommitRecord",
    "CommitReport",
    "ConfigurationError",
    "CutStrategy",
    "Delegation",
    "EstimateCounter",
    "FunctionCounter",
    "Generated",
    "HistoryError",
    "Isolate",
    "KeepRecent",
    "Ledger",
    "LedgerSnapshot",
    "Limits",
    "LookaheadRuntime",
    "LookaheadState",
    "LookaheadStrategy",
    "MainRequest",
    "MainState",
    "Message",
    "Money",
    "Offload",
    "OffloadStore",
    "OpenAIBackend",
    "OpenAICodec",
    "Pipeline",
    "Prediction",
    "PriceTable",
    "Prompt",
    "PromptTooLongError",
    "RateLimitedError",
    "ReadOffloaded",
    "Reference",
    "RuntimePool",
    "SlidingWindow",
    "SmoothAgentError",
    "StoreError",
    "StoreUnavailableError",
    "Stream",
    "Summarize",
    "SummaryRejectedError",
    "TokenCounter",
    "ToolCall",
    "UnknownReferenceError",
    "Usage",
]
