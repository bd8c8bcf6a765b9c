"""The SmoothAgent demo and benchmark: the paper's workload on a real engine, with reports and plots."""

from smoothagent_bench.commands import bench, demo
from smoothagent_bench.engine import EmbeddedEngine, EngineInfo
from smoothagent_bench.figures import summarize
from smoothagent_bench.job import Assignment, Harness, Job
from smoothagent_bench.model_file import find_model
from smoothagent_bench.record import ResultsFile, Row
from smoothagent_bench.strategies import Variant
from smoothagent_bench.workload import Profile, Script, demo_profile, paper_profile

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "EmbeddedEngine",
    "EngineInfo",
    "Harness",
    "Job",
    "Profile",
    "ResultsFile",
    "Row",
    "Script",
    "Variant",
    "bench",
    "demo",
    "demo_profile",
    "find_model",
    "paper_profile",
    "summarize",
]
