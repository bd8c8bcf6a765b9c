"""Every error SmoothAgent raises on purpose, as one tree.

::

    SmoothAgentError
    ├── ConfigurationError (also ValueError)   a value the user gave cannot work
    ├── HistoryError (also ValueError)         a history that no request could carry
    ├── StoreError
    │   ├── StoreUnavailableError (also OSError)    the folder or URL cannot be written or read
    │   └── UnknownReferenceError (also LookupError) no such offloaded output
    ├── BackendError
    │   ├── BackendUnreachableError            nothing answers at the base URL
    │   ├── BackendRefusedError                the server answered with an error status
    │   │   ├── RateLimitedError               429; carries ``retry_after`` (seconds or None)
    │   │   └── PromptTooLongError             the prompt exceeds the server's window
    │   └── BackendProtocolError               the answer is not what the API promises
    ├── SummaryRejectedError                   empty, cut-off or tool-calling model answer
    └── ClosedError (also RuntimeError)        used after ``close``

A message says what was wrong, with which value, and what to do about it.
Cancellation (``asyncio.CancelledError``) is not an error and never becomes one.
"""

from smoothagent.quoting import may_quote


class SmoothAgentError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigurationError(SmoothAgentError, ValueError):
    """A value the user gave cannot work: unknown name, impossible limit, missing model."""


class HistoryError(SmoothAgentError, ValueError):
    """A history that no request could carry, such as a tool result without its call."""


class StoreError(SmoothAgentError):
    """The offload store could not do what was asked."""


class StoreUnavailableError(StoreError, OSError):
    """The store's folder or URL cannot be written or read."""


class UnknownReferenceError(StoreError, LookupError):
    """No offloaded output is stored under the given reference."""


class BackendError(SmoothAgentError):
    """The model server could not do what was asked."""


class BackendUnreachableError(BackendError):
    """Nothing answers at the base URL, or the connection broke."""


class BackendRefusedError(BackendError):
    """The server answered with an error status.

    Attributes:
        status: HTTP status code.
        said: the server's own words, which may quote what it was sent.
    """

    def __init__(self, message: str, *, status: int, said: str = "") -> None:
        super().__init__(message)
        self.status, self.said = status, said

    def __str__(self) -> str:
        """What happened, and what the server said where that may be quoted (`smoothagent.quoting`)."""
        told = super().__str__()
        return f"{told}: {self.said}" if self.said and may_quote() else told

    @property
    def words(self) -> str:
        """All of it, to be looked through and not to be shown."""
        return f"{super().__str__()} {self.said}"


class RateLimitedError(BackendRefusedError):
    """The server answered 429.

    Attributes:
        retry_after: seconds the server asked to wait, or None.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message, status=429)
        self.retry_after = retry_after


class PromptTooLongError(BackendRefusedError):
    """The prompt exceeds the server's context window."""


class BackendProtocolError(BackendError):
    """The server's answer is not what its API promises (garbage, missing fields)."""


class SummaryRejectedError(SmoothAgentError):
    """The model's summary cannot stand for the history; the history is kept."""


class ClosedError(SmoothAgentError, RuntimeError):
    """The runtime, delegation or pool was used after it was closed."""
