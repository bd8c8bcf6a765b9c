"""What a user's object holds that is no part of its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


class Unshared:
    """Work under way for one object: a copy or a pickle of that object begins with none, and equality leaves it out.

    Subclasses can be made without arguments.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another one, with nothing under way."""
        return type(self)()

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """Nothing of it is kept."""
        return type(self), ()

    def __eq__(self, other: object) -> bool:
        """Two objects are equal whatever is under way for them."""
        return type(other) is type(self)

    __hash__ = object.__hash__
