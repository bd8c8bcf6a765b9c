"""A summary that a memory has written in the background."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM

from smoothagent import Backend, BackendError, Generated, Usage, running
from smoothagent.model import checked
from smoothagent.serving.through_object import ObjectBackend
from smoothagent_llamaindex.aside import finish_reason, in_thread, is_in_process, limited, quiet
from smoothagent_llamaindex.codec import LlamaIndexCodec, alike
from smoothagent_llamaindex.memory.upcoming import Upcoming
from smoothagent_llamaindex.models import backend_for, given_for, prompt_for, to_wire_of

_TURNS = 2
"""Turns that a summary, and the prefill of what it leaves, have at least."""
SOFT = 0.75
"""Where one is begun at the latest, as a fraction of the limit: on a slow server it takes many turns."""
_MOST = 1024
"""Tokens of a summary where the LLM sets no limit."""


class RunningSummary(running.RunningSummary[ChatMessage]):
    """One of LlamaIndex messages."""

    def snapshot(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Messages as they are now."""
        return [message.model_copy(deep=True) for message in messages]

    def alike(self, a: ChatMessage, b: ChatMessage) -> bool:
        """Whether two messages are the same to a model."""
        return alike(a, b)


def is_near(size: float, growth: float, limit: float, soft: float | None, at: float = SOFT) -> bool:
    """Whether a summary should be begun, since writing one, and warming what it leaves, takes more than a pause.

    Args:
        size: tokens that there are.
        growth: tokens that a turn adds.
        limit: tokens at which it is due.
        soft: where it is begun, as a fraction of the limit, where the user says so.
        at: where it is by default, or two turns before the limit, if that is earlier.
    """
    return size >= soft * limit if soft is not None else size >= at * limit or size + _TURNS * growth > limit


def growth_of(size: int, before: int | None, sizes: Sequence[int], messages: Sequence[ChatMessage]) -> int:
    """Tokens that a turn adds.

    Args:
        size: tokens that there are.
        before: those that there were a turn ago; None where that is not known.
        sizes: tokens of each message.
        messages: the messages.
    """
    if before is not None:
        return max(0, size - before)
    asked = max((i for i, m in enumerate(messages) if m.role == MessageRole.USER), default=0)
    return sum(sizes[asked:])


def asked_last(messages: Sequence[ChatMessage]) -> int:
    """Where the newest question stands, if nothing comes after it; else how many messages there are."""
    last = len(messages) - 1
    return last if messages and messages[last].role == MessageRole.USER else len(messages)


def asking(
    llm: LLM,
    upcoming: Upcoming,
    request: Sequence[ChatMessage],
    *,
    accept_cut_off: bool,
    warm: bool | None = None,
    given: Backend | None = None,
) -> Coroutine[Any, Any, str]:
    """What an LLM answers to a request for a summary, asked on the lane.

    Where its server can be reached it is paced, gives way to the agent's calls, and can be cancelled; else the LLM
    object is asked in a thread.

    Args:
        llm: whom to ask.
        upcoming: the memory's next prompt, which the summary is for: its key at the backend, and its ledger.
        request: the messages.
        accept_cut_off: take an answer that ran into the length limit.
        warm: as the memory's, since that says which backend the agent's calls are told to.
        given: the server, where the user has made a backend of it.

    Raises:
        SummaryRejectedError: the answer is empty, cut off, or calls tools.
        BackendError: the server fails.
    """
    return _ask(llm, upcoming, list(request), accept_cut_off, given_for(given, llm) or backend_for(llm, warm=warm))


async def _ask(llm: LLM, upcoming: Upcoming, request: list[ChatMessage], accept_cut_off: bool, backend: Backend) -> str:
    limit = llm.metadata.num_output
    most = limit if limit > 0 else _MOST
    if not isinstance(backend, ObjectBackend):
        codec = LlamaIndexCodec(to_wire_of(llm))
        try:
            answer = await backend.generate(
                *(upcoming.session, [codec.wire(m) for m in request], prompt_for(llm, {})),
                max_tokens=most,
                lookahead=True,
                extends_main=False,
            )
        finally:
            if backend is not upcoming.backend:
                backend.release(upcoming.session)  # the agent's calls go elsewhere: nobody else would
        reused = max(0, answer.usage.cached_tokens or 0)
        upcoming.ledger.add(
            prefilled_tokens=max(0, answer.usage.prompt_tokens - reused),
            reused_tokens=reused,
            generated_tokens=max(0, answer.usage.completion_tokens),
        )
        return checked(answer, most, accept_cut_off=accept_cut_off)
    if is_in_process(llm):
        name = type(llm).__name__
        raise BackendError(f"{name} runs in this process, one call at a time: it is asked when it has to be")
    one = quiet(llm)
    if limit <= 0:
        one = one.model_copy(update=limited(one, most) or {})
    response = await in_thread(lambda: one.chat(request))
    text, reason = response.message.content or "", finish_reason(response)
    answer = Generated(text, reason or "stop", tool_calls=False, usage=Usage())
    return checked(answer, most, accept_cut_off=accept_cut_off)
