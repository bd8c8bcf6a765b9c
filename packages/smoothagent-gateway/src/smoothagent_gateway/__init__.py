"""SmoothAgent's gateway: lookahead for any agent that speaks to an OpenAI-compatible server."""

from smoothagent_gateway.app import Gateway
from smoothagent_gateway.settings import Settings, read_settings

__version__ = "0.1.0"

__all__ = ["Gateway", "Settings", "read_settings"]
