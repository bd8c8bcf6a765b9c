"""The strategies: offload, keep-recent, sliding window, summarize, and pipelines of them.

Isolation is not a strategy of a running conversation but a hand-over to a new one: see
`smoothagent.delegation`.
"""

from smoothagent.strategies.offload import Offload
from smoothagent.strategies.pipeline import Pipeline
from smoothagent.strategies.summarize import Summarize
from smoothagent.strategies.window import KeepRecent, SlidingWindow

__all__ = ["KeepRecent", "Offload", "Pipeline", "SlidingWindow", "Summarize"]
