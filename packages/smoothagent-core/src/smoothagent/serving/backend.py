"""The seam between the runtime and a model server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from smoothagent.prompt import Prompt

Wire = Mapping[str, Any]
"""One message as an OpenAI chat-completions mapping."""


class Stream(StrEnum):
    """The three token streams of a conversation (docs/serving.md, "Pacing"), and what is none of them.

    ``ASIDE`` is a call of the agent's with a prompt of its own (a title): it must not land on what the others hold.
    """

    MAIN = "main"
    SUMMARY = "summary"
    LOOKAHEAD = "lookahead"
    ASIDE = "aside"


@dataclass(frozen=True, slots=True)
class Caps:
    """What a server can do for lookahead.

    Attributes:
        server: ``llama.cpp``, ``sglang``, ``vllm``, ``openai`` or ``unknown``.
        prefill: prefill-only requests may be sent (False for hosted endpoints unless asked for).
        classes: the server has a best-effort class, so nothing needs pacing.
        promote: a running best-effort request can be raised in place.
        tokenize: the server tells token ids.
        cached_tokens: the server reports cached prompt tokens in usage.
        follows_answers: an answer may be prefilled as it streams: at no cost to the agent's decoding, nor in money.
        window: context window in tokens, or None where unknown.
        notes: sentences for the user: what is missing and which flag brings it.
    """

    server: str = "unknown"
    prefill: bool = False
    classes: bool = False
    promote: bool = False
    tokenize: bool = False
    cached_tokens: bool = False
    follows_answers: bool = False
    window: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. ``cached_tokens`` is None where the server does not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer of the model.

    Attributes:
        text: the answer's text, "" if it had none.
        finish_reason: ``stop``, ``length``, ``tool_calls`` …
        tool_calls: whether the answer calls tools.
        usage: tokens of the request; for an answer made in pieces, of all of them together
            (``prompt_tokens`` counts what was really computed again).
    """

    text: str
    finish_reason: str | None
    tool_calls: bool
    usage: Usage


@runtime_checkable
class LoopBound(Protocol):
    """A backend whose requests may be made on a loop of the agent's."""

    def note_loop(self) -> None:
        """The agent runs on the loop that is running here. Called by the hooks, never on the lane."""
        ...

    def needs_this_loop(self) -> bool:
        """Whether that loop is the one running here."""
        ...


class Backend(Protocol):
    """One model server, shared by many conversations. All coroutines run on the lane's loop.

    ``conversation`` is an opaque key of one agent's stream. The other methods do no I/O and may be
    called from any thread. Cancelling a coroutine stops the request on the server. Failures raise
    `smoothagent.errors.BackendError` subclasses.
    """

    async def caps(self) -> Caps:
        """Find out once what the server can do; cached after the first success."""
        ...

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """Extra keyword arguments for an openai ``create`` call of this stream (``extra_body`` …). No I/O."""
        ...

    async def prefill(
        self, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, partial: bool = False
    ) -> Usage:
        """Bring ``messages`` into the lookahead stream's KV cache; nothing is generated for the user.

        ``messages`` is a prefix of a later request. With ``partial`` the last message's text is
        still growing: the last token is held back. Returns what was computed.
        """
        ...

    async def generate(
        self,
        conversation: str,
        messages: Sequence[Wire],
        prompt: Prompt,
        *,
        max_tokens: int,
        lookahead: bool,
        extends_main: bool = True,
    ) -> Generated:
        """Let the model answer. ``lookahead`` marks it best-effort (paced); else it is the caller's own wait.

        ``extends_main`` says that ``messages`` begin with the main stream's prompt, so its KV is of use.
        """
        ...

    async def promote(self, conversation: str) -> None:
        """Raise the conversation's lookahead work to latency-critical, in place where the server can."""
        ...

    def settle(self, conversation: str) -> None:
        """Its work is in a hurry no more: committed, or given up."""
        ...

    async def cancel(self, conversation: str) -> None:
        """Stop the conversation's lookahead requests on the server."""
        ...

    def committed(self, conversation: str) -> bool:
        """The lookahead stream has become the main stream (slots swap, leases end).

        Returns whether its KV still has to be brought to where main requests go: then `deliver` is called, and the
        next main request waits for it, shortly.
        """
        ...

    async def deliver(self, conversation: str) -> bool:
        """Bring a stream that was warmed elsewhere to where main requests go. Whether it is there now."""
        ...

    def undelivered(self, conversation: str) -> None:
        """It did not come, or not in time: main requests go where they went before the commit."""
        ...

    def spent(self, conversation: str) -> Usage:
        """Tokens computed (``prompt_tokens``) and generated by its lookahead requests so far, cut short or not."""
        ...

    def release(self, conversation: str) -> None:
        """The conversation is over: free its slots and leases."""
        ...

    def main_arrived(self, conversation: str) -> None:
        """A main request is about to be sent: lookahead work of this process gives way."""
        ...

    def main_first_token(self, conversation: str) -> None:
        """The main request has answered its first token; small pieces may run again."""
        ...

    def main_done(self, conversation: str) -> None:
        """The main request has ended; tool time begins."""
        ...

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """Tokens of a request with these messages by the server's own tokenizer; None where it has none."""
        ...

    async def aclose(self) -> None:
        """Close own clients; a client the user passed stays open."""
        ...
