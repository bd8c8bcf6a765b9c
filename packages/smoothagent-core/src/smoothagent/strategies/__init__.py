"""The strategies: offload, keep-recent, sliding window, summarize, isolate, and pipelines of them."""

from smoothagent.strategies.isolate import Isolate
from smoothagent.strategies.offload import Offload
from smoothagent.strategies.pipeline import Pipeline
from smoothagent.strategies.summarize import Summarize
from smoothagent.strategies.window import KeepRecent, SlidingWindow

__all__ = ["Isolate", "KeepRecent", "Offload", "Pipeline", "SlidingWindow", "Summarize"]
