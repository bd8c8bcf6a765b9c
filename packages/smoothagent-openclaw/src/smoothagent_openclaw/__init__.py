"""SmoothAgent for OpenClaw: ``smoothagent openclaw configure``, ``run``, ``doctor``, ``unconfigure``."""

__version__ = "0.1.0"

__all__ = ["__version__"]
