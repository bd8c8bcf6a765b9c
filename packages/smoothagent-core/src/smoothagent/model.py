"""The model as strategies see it: one method, through the backend, accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from smoothagent.errors import SummaryRejectedError
from smoothagent.ledger import Ledger
from smoothagent.message import Message
from smoothagent.prompt import Prompt
from smoothagent.serving.backend import Backend, Generated

BROKEN_OFF = frozenset({None, "abort", "cancelled", "content_filter", "error"})
"""Why an answer ended before the model had ended it."""


class ModelHost(Protocol):
    """Where a `LaneModel` finds what it needs."""

    @property
    def backend(self) -> Backend | None:
        """The model server."""
        ...

    @property
    def prompt(self) -> Prompt:
        """The main stream's prompt."""
        ...

    @property
    def session(self) -> str:
        """The conversation's key at the backend."""
        ...

    @property
    def ledger(self) -> Ledger:
        """Where background tokens are booked."""
        ...


class Wires(Protocol):
    """Messages exactly as the main stream sends them."""

    def wire(self, message: Message) -> dict[str, Any]:
        """One message's wire mapping."""
        ...


class LaneModel:
    """Generates as lookahead work, or, with ``lookahead=False``, on the critical path.

    Attributes:
        prefilled: prompt tokens that lookahead generation had to compute so far.
        reused: prompt tokens that it found in the cache.
        generated: tokens that it generated.
    """

    def __init__(self, host: ModelHost, wires: Wires, *, lookahead: bool = True) -> None:
        self._host = host
        self._wires = wires
        self._lookahead = lookahead
        self.prefilled = self.reused = self.generated = 0

    async def generate(self, messages: Sequence[Message], *, max_tokens: int, accept_cut_off: bool = False) -> str:
        """The text of the model's answer.

        Raises SummaryRejectedError for an answer that is empty, cut off, or calls tools, BackendError
        where the server fails.
        """
        host = self._host
        assert host.backend is not None
        answer = await host.backend.generate(
            host.session,
            [self._wires.wire(m) for m in messages],
            host.prompt,
            max_tokens=max_tokens,
            lookahead=self._lookahead,
        )
        if self._lookahead:
            usage = answer.usage
            reused = max(0, usage.cached_tokens or 0)
            prefilled = max(0, usage.prompt_tokens - reused)
            generated = max(0, usage.completion_tokens)
            self.prefilled += prefilled
            self.reused += reused
            self.generated += generated
            host.ledger.add(prefilled_tokens=prefilled, reused_tokens=reused, generated_tokens=generated)
        return checked(answer, max_tokens, accept_cut_off=accept_cut_off)


def checked(answer: Generated, max_tokens: int, *, accept_cut_off: bool) -> str:
    """The text of an answer to a request for a summary.

    Raises SummaryRejectedError for one that is empty, cut off, broken off, or calls tools.
    """
    if answer.tool_calls:
        # With text beside it, too: an agent that goes on working has not summarized.
        raise SummaryRejectedError("the model answered the request for a summary with a tool call; the history is kept")
    if not answer.text.strip():
        raise SummaryRejectedError(
            f"the model's summary is empty (finish reason {answer.finish_reason}); the history is kept"
        )
    if answer.finish_reason in BROKEN_OFF:
        raise SummaryRejectedError(
            f"the model's summary was broken off (finish reason {answer.finish_reason}); the history is kept"
        )
    if answer.finish_reason == "length" and not accept_cut_off:
        raise SummaryRejectedError(
            f"the model's summary was cut off at max_tokens={max_tokens}; the history is kept: "
            "raise max_tokens, or pass accept_cut_off=True"
        )
    return answer.text
