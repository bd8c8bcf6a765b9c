"""What can be wrong with what the scheduler is given.

A tree of its own, since this package stands beside SGLang, which pins an older openai client than SmoothAgent's core
takes: nothing of the core is imported here.

::

    ValueError
    └── SchedulerError
        ├── SettingError    a setting is unknown or impossible, or the server cannot do it
        └── ProfileError    a latency profile that cannot be true, or is another server's
"""

from __future__ import annotations


class SchedulerError(ValueError):
    """The scheduler cannot work so; the message says with which value, and what to do."""


class SettingError(SchedulerError):
    """A setting is unknown or impossible, or the server cannot do it."""


class ProfileError(SchedulerError):
    """A latency profile cannot be used; the message names the entry and what to do."""
