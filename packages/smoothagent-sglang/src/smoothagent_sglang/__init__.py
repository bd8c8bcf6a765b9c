"""SmoothAgent's scheduler for SGLang: lookahead requests are best-effort work."""

from smoothagent_sglang.errors import ProfileError
from smoothagent_sglang.latency import BatchLatency, Load, Residuals
from smoothagent_sglang.profiles import Profile, read_profile

__version__ = "0.1.0"

__all__ = ["BatchLatency", "Load", "Profile", "ProfileError", "Residuals", "read_profile"]
