"""SmoothAgent for Mini-Agent: ``attach(agent)``, and nothing else changes."""

from smoothagent_miniagent.attached import Attachment, attach
from smoothagent_miniagent.delegating import SubAgentTool
from smoothagent_miniagent.tools import ReadOffloadedTool

__version__ = "0.1.0"

__all__ = ["Attachment", "ReadOffloadedTool", "SubAgentTool", "__version__", "attach"]
