"""What every dialect offers, and what the backend gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from smoothagent.errors import BackendError, BackendRefusedError, ConfigurationError
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Caps, Generated, Stream, Usage, Wire
from smoothagent.serving.connection import MODEL_MISSING, Connection
from smoothagent.serving.others import Load
from smoothagent.serving.unpaced import Pacing


@dataclass(frozen=True, slots=True)
class Options:
    """What the user said.

    Attributes:
        model: the model to ask for where the prompt names none.
        warm: whether prefill-only requests are sent; None leaves it to the dialect.
        slots: llama.cpp slots that this process may use; None for all.
        lookahead: the server that lookahead work runs on, where that is not the agent's.
    """

    model: str | None = None
    warm: bool | None = None
    slots: Sequence[int] | None = None
    lookahead: Connection | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing the model is asked.

    Attributes:
        conversation: whose lookahead it is.
        messages: all messages as sent, the system text first.
        prompt: what else shapes the tokens.
        deadline: seconds from now until the result is predicted to be committed, or None.
    """

    conversation: str
    messages: Sequence[Wire]
    prompt: Prompt
    deadline: float | None = None


@dataclass(slots=True)
class ServingStats:
    """Counts over all conversations. ``lost``: warmed prefixes that the server no longer had."""

    prefills: int = 0
    answers: int = 0
    lost: int = 0


class Dialect(ABC):
    """One server's way of doing things.

    Args:
        link: the connection.
        options: what the user said.
        served: names of the models the server lists.
    """

    server: ClassVar[str] = "unknown"

    def __init__(self, link: Connection, options: Options, served: Sequence[str]) -> None:
        self.link = link
        self.options = options
        self.served = tuple(served)
        self.notes: dict[str, str] = {}
        self.stats = ServingStats()

    # -- what the server can do ------------------------------------------------------------

    @abstractmethod
    async def probe(self) -> None:
        """Find out what the server can do."""

    @abstractmethod
    def caps(self) -> Caps:
        """What is known now; later requests may teach more."""

    @property
    def paced(self) -> bool:
        """Whether this process must pace its lookahead work."""
        return True

    async def load(self, own: int) -> Load | None:
        """What other processes have on the server, beside ``own`` running requests; None where it cannot tell."""
        del own
        return None

    # -- requests --------------------------------------------------------------------------

    def extras(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """Keyword arguments for the agent's own ``create`` calls. Any thread, no I/O."""
        del conversation, stream
        return {}

    @abstractmethod
    async def prefill(self, ask: Ask, pacer: Pacing, *, partial: bool) -> Usage:
        """As `Backend.prefill`."""

    @abstractmethod
    async def generate(
        self, ask: Ask, pacer: Pacing, *, max_tokens: int, lookahead: bool, extends_main: bool
    ) -> Generated:
        """As `Backend.generate`."""

    async def count(self, ask: Ask) -> int | None:
        """As `Backend.count`."""
        del ask
        return None

    # -- a conversation's life -------------------------------------------------------------

    async def promote(self, conversation: str) -> None:
        """Raise the conversation's requests in place, where the server can."""
        del conversation

    async def cancel(self, conversation: str) -> None:
        """Tell the server to stop what a closed connection would not stop."""
        del conversation

    def committed(self, conversation: str) -> bool:
        """The lookahead stream has become the main stream. Whether `deliver` has something to bring."""
        del conversation
        return False

    async def deliver(self, conversation: str) -> bool:
        """As `Backend.deliver`."""
        del conversation
        return False

    def undelivered(self, conversation: str) -> None:
        """As `Backend.undelivered`."""
        del conversation

    def release(self, conversation: str) -> None:
        """Forget the conversation."""
        del conversation

    # -- for the dialects ------------------------------------------------------------------

    def model(self, prompt: Prompt) -> str:
        """The model to ask for.

        Raises:
            ConfigurationError: none was named and the server has several.
        """
        name = prompt.model or self.options.model
        if name is not None:
            return name
        if len(self.served) == 1:
            return self.served[0]
        raise ConfigurationError(f"{self.link.base_url} serves {self._listed()}: say which with model=…")

    def missing_model(self, error: BackendError, prompt: Prompt) -> BackendError | ConfigurationError:
        """``error``, or a clearer one where the server does not know the model."""
        if isinstance(error, BackendRefusedError) and MODEL_MISSING.search(error.words):
            return ConfigurationError(
                f"the server at {self.link.base_url} has no model {self.model(prompt)!r}; it serves {self._listed()}"
            )
        return error

    def _listed(self) -> str:
        return ", ".join(map(repr, self.served)) or "no model at all"


def whole(value: object) -> int | None:
    """``value`` if it is a whole number that counts something."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def rows(value: object) -> list[Mapping[str, Any]]:
    """The mappings in ``value`` if it is a list."""
    return [mapping(v) for v in cast("list[object]", value)] if isinstance(value, list) else []
