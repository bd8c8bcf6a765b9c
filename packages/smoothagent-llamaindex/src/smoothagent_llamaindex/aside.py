"""Work ahead through the LLM object itself, for servers that only it can talk to."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index_instrumentation.dispatcher import instrument_tags

from smoothagent import BackendError, Generated, Prompt, Usage
from smoothagent.blocking import in_daemon_thread
from smoothagent.request import read_usage
from smoothagent.serving.backend import Wire
from smoothagent.serving.through_object import ObjectBackend
from smoothagent.unseen import unseen
from smoothagent_llamaindex.codec import LlamaIndexCodec

T = TypeVar("T")
log = logging.getLogger("smoothagent")

TAGS = {"smoothagent": "background"}
"""Instrumentation tags of what is called in the background; LlamaIndex has no way to leave it out."""

IN_PROCESS = frozenset({"LlamaCPP_llm", "HuggingFace_LLM"})
"""LLMs whose model is an object of this process: what a thread asks of it runs into the agent's own call."""


class AsideBackend(ObjectBackend[ChatMessage]):
    """A `Backend` that knows nothing of its server but what the LLM object says. One for each conversation.

    Args:
        llm: the agent's.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.
            Where the LLM takes no length limit that is known here, nothing is asked for.

    Attributes:
        params: keyword arguments of the agent's last call: its tools, in the LLM's own form.
    """

    def __init__(self, llm: LLM, *, warm: bool) -> None:
        one = None if is_in_process(llm) else limited(llm, 1)
        if warm and one is None:
            log.warning("%s: nothing is warmed, since no way is known to ask it for one token", type(llm).__name__)
        super().__init__(type(llm).__name__, warm=warm and one is not None)
        self._llm = quiet(llm)
        self.params: Mapping[str, Any] = {}

    async def ask(self, natives: Sequence[ChatMessage], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""
        del prompt
        response = await self._answer(natives, 1, self.params)
        return usage_of(response)

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
        """What the LLM object answers, with the agent's tools. Raises BackendError."""
        del conversation, prompt, extends_main
        if lookahead and is_in_process(self._llm):
            raise BackendError(f"{self._name} runs in this process, one call at a time: it is asked when it has to be")
        natives = [native for wire in messages if isinstance(native := getattr(wire, "native", None), ChatMessage)]
        if len(natives) < len(messages):
            raise BackendError(f"{len(messages) - len(natives)} of {len(messages)} messages are none of LlamaIndex's")
        # Without them some servers refuse a history with calls; none of them has to be called.
        more = {k: v for k, v in self.params.items() if k not in ("tool_choice", "tool_required")}
        response = await self._answer(natives, max_tokens, more)
        calls = LlamaIndexCodec().decode(response.message).tool_calls
        usage = usage_of(response) or Usage()
        reason = finish_reason(response) or ("length" if 0 < max_tokens <= usage.completion_tokens else "stop")
        return Generated(response.message.content or "", reason, bool(calls), usage)

    async def _answer(self, natives: Sequence[ChatMessage], max_tokens: int, params: Mapping[str, Any]) -> ChatResponse:
        # What the call says is overridden by the object's own fields, so that a copy is asked that says it.
        asked, one = list(natives), self._llm.model_copy(update=limited(self._llm, max_tokens) or {})
        return await in_thread(lambda: one.chat(asked, **params))


def is_in_process(llm: LLM | None) -> bool:
    """Whether a model is an object of this process, which answers one call at a time: it is asked when it has to be."""
    return llm is not None and llm.class_name() in IN_PROCESS


def quiet(llm: LLM) -> LLM:
    """The same LLM for background work: the user's callbacks and rate limiter are none of its."""
    fields: dict[str, Any] = {"callback_manager": CallbackManager([]), "rate_limiter": None, "max_retries": 0}
    return llm.model_copy(update={k: v for k, v in fields.items() if k in type(llm).model_fields})


def limited(llm: LLM, tokens: int) -> dict[str, Any] | None:
    """The fields of a copy of ``llm`` that answers with at most so many tokens; None where no limit is known."""
    fields = type(llm).model_fields
    if llm.class_name() == "LlamaCPP_llm":
        given: dict[str, Any] = dict(getattr(llm, "generate_kwargs", None) or {})
        return {"generate_kwargs": {**given, "max_tokens": tokens}}
    update: dict[str, Any] = {k: tokens for k in ("max_tokens", "max_new_tokens") if k in fields}
    more = dict(getattr(llm, "additional_kwargs", None) or {})
    own = {k: tokens for k in ("max_tokens", "max_completion_tokens", "num_predict") if k in more}
    if llm.class_name() == "Ollama_llm":
        own["num_predict"] = tokens
    # One limit only: some models refuse the other.
    return {"additional_kwargs": {**more, **own}} if own else update or None


def finish_reason(response: ChatResponse) -> str | None:
    """Why an answer ended, as OpenAI says it; None where its LLM does not tell."""
    raw: Any = response.raw

    def field(source: Any, name: str) -> Any:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

    choices = field(raw, "choices")
    told = field(choices[0], "finish_reason") if choices else field(raw, "stop_reason") or field(raw, "done_reason")
    return {"max_tokens": "length", "end_turn": "stop"}.get(told, told) if isinstance(told, str) else None


def usage_of(response: ChatResponse) -> Usage | None:
    """Token counts of an answer, where its LLM tells them."""
    raw: Any = response.raw
    told = raw.get("usage") if isinstance(raw, dict) else getattr(raw, "usage", None)
    return read_usage(told) or read_usage(response.additional_kwargs)


async def in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a daemon thread, marked as none of the user's. Raises BackendError from whatever it raises."""

    def marked() -> T:
        with instrument_tags(TAGS), unseen():
            return work()

    # A thread begins with an empty context: no run, callback or workflow of the user's is found there.
    context = contextvars.Context()
    return await in_daemon_thread(lambda: context.run(marked), "the LLM failed in the background")
