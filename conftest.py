"""What every test of the workspace shares."""

from __future__ import annotations

from hypothesis import settings

# A deadline measures the machine, not the code: the cores here are shared.
settings.register_profile("smoothagent", deadline=None)
settings.load_profile("smoothagent")
