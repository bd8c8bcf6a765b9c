"""What can be wrong with what the scheduler is given.

::

    SmoothAgentError
    └── ConfigurationError
        └── ProfileError      a latency profile that cannot be true, or is another server's
"""

from __future__ import annotations

from smoothagent.errors import ConfigurationError


class ProfileError(ConfigurationError):
    """A latency profile cannot be used; the message names the entry and what to do."""
