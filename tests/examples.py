"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """``count`` examples with the profile that every run uses; other profiles scale it.

    A number given to Hypothesis itself would hold for all profiles, so that a search would search no further.
    """
    return settings(max_examples=max(1, count * settings().max_examples // 100))
