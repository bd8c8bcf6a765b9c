"""The answer that the agent's model is writing, as far as a lookahead has heard of it."""

from __future__ import annotations

_STEP_CHARS = 64
"""Characters by which an answer grows between two looks at it."""


class Answer:
    """What has streamed so far, to a request that held all of the newest snapshot.

    Written by the thread that makes the request, taken on the lane.

    Attributes:
        followed: False once following it has failed; it is only ahead of what will be warmed anyway.
    """

    def __init__(self) -> None:
        self.followed = True
        self._heard: tuple[object, str] | None = None
        self._taken: tuple[object, str] | None = None

    def wants(self, snapshot: object, length: int) -> bool:
        """Whether ``length`` characters of an answer to ``snapshot`` are worth another look."""
        heard = self._heard
        return self.followed and (
            heard is None or heard[0] is not snapshot or abs(length - len(heard[1])) >= _STEP_CHARS
        )

    def hear(self, snapshot: object, text: str) -> None:
        """It is ``text`` by now."""
        self._heard = (snapshot, text)

    def take(self, snapshot: object) -> str | None:
        """What of an answer to ``snapshot`` has not been taken yet; None where there is nothing new."""
        heard = self._heard
        if not self.followed or heard is None or heard[0] is not snapshot or heard is self._taken:
            return None
        self._taken = heard
        return heard[1]
