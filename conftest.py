"""What every test of the workspace shares."""

from __future__ import annotations

from hypothesis import settings

# A deadline measures the machine, not the code: the cores here are shared.
settings.register_profile("smoothagent", deadline=None)
# For a second run of tests that have already been run in full, as `scripts/check_lowest.py` does.
settings.register_profile("few", deadline=None, max_examples=10)
settings.load_profile("smoothagent")
