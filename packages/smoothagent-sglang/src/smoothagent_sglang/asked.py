"""What a request says of itself, in SGLang's ``custom_params``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

LOOKAHEAD = "lookahead"
"""1: best-effort; 0, or not there: latency-critical."""
NUMBER = "lookahead_id"
"""What a promotion names the request by."""
DEADLINE = "deadline"
"""Seconds from its arrival until its result is predicted to be committed."""
PROMOTE = "lookahead_promote"
"""Key of ``set_internal_state``: raises the request with this number."""


class Asked(NamedTuple):
    """A best-effort request's own words.

    Attributes:
        number: to promote it by; None where it gives none.
        deadline: seconds from its arrival; infinite where it gives none.
    """

    number: int | None
    deadline: float


def asked(params: object) -> Asked | str | None:
    """What ``custom_params`` ask for: None for an LC request; a sentence where it is impossible."""
    if not isinstance(params, dict):
        return None
    told = cast("Mapping[str, Any]", params)
    kind = told.get(LOOKAHEAD, 0)
    if isinstance(kind, bool) or kind not in (0, 1):
        return f"custom_params[{LOOKAHEAD!r}] is {kind!r}: 1 for a lookahead request, 0 or nothing for another"
    if not kind:
        return None
    number, deadline = told.get(NUMBER), told.get(DEADLINE, math.inf)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
        return f"custom_params[{NUMBER!r}] is {number!r}: it must be a whole number"
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline >= 0:
        return f"custom_params[{DEADLINE!r}] is {deadline!r}: it must be seconds from now, 0 or more"
    return Asked(number, float(deadline))
