"""Hosted endpoints and servers we do not know: chat completions and nothing else."""

from __future__ import annotations

from smoothagent.serving.backend import Caps
from smoothagent.serving.dialects.textual import Textual


class Hosted(Textual):
    """Dialect of OpenAI's API. Warming costs money there, so it is off unless the user says ``warm=True``."""

    server = "openai"

    async def probe(self) -> None:
        """Nothing is asked: every request may be billed."""
        if not self.options.warm:
            self.notes["warm"] = (
                f"{self.link.base_url} is a hosted or unknown server: prefixes are not warmed. Pass warm=True if "
                "that is worth its price."
            )

    def caps(self) -> Caps:
        """What is known now."""
        return Caps(
            server=self.server,
            prefill=bool(self.options.warm) and self.hits,
            cached_tokens=bool(self.reports_cached),
            notes=tuple(self.notes.values()),
        )

    @property
    def paced(self) -> bool:
        """A service for many clients is not held up by one of them."""
        return False
