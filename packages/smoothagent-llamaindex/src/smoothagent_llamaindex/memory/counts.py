"""Token counts of texts, each counted once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from smoothagent.unshared import Unshared

_TEXTS = 8192


class Counts(Unshared):
    """Remembers how many tokens a text has."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._with: object = None

    def of(self, text: str, tokenize: Callable[[str], Sequence[Any]]) -> int:
        """Tokens of ``text``."""
        if tokenize is not self._with:
            self._known.clear()
            self._with = tokenize
        # The texts themselves are not kept.
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = len(tokenize(text))
            while len(self._known) > _TEXTS:
                self._known.popitem(last=False)
        return known
