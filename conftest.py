"""What every test of the workspace shares."""

from __future__ import annotations

from hypothesis import settings

# A deadline measures the machine, not the code: the cores here are shared. The same examples every time, so that
# a red run says something about the change; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("smoothagent", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
# For a second run of tests that have already been run in full, as `scripts/check_lowest.py` does.
settings.register_profile("few", deadline=None, max_examples=10, derandomize=True)
settings.load_profile("smoothagent")
