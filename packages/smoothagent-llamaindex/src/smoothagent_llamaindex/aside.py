"""Work ahead through the LLM object itself, for servers that only it can talk to."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index_instrumentation.dispatcher import instrument_tags

from smoothagent import Prompt, Usage
from smoothagent.blocking import in_daemon_thread
from smoothagent.request import read_usage
from smoothagent.serving.through_object import ObjectBackend

T = TypeVar("T")

TAGS = {"smoothagent": "background"}
"""Instrumentation tags of what is called in the background; LlamaIndex has no way to leave it out."""

_unseen: ContextVar[bool] = ContextVar("smoothagent_unseen", default=False)


@contextlib.contextmanager
def unseen() -> Generator[None]:
    """What is called inside is no call of the agent's: a summary, in the background or not."""
    token = _unseen.set(True)
    try:
        yield
    finally:
        _unseen.reset(token)


def is_unseen() -> bool:
    """Whether an LLM that is called here is not to be taken for the agent's."""
    return _unseen.get()


class AsideBackend(ObjectBackend[ChatMessage]):
    """A `Backend` that knows nothing of its server but what the LLM object says.

    Args:
        llm: the agent's.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.
    """

    def __init__(self, llm: LLM, *, warm: bool) -> None:
        super().__init__(type(llm).__name__, warm=warm)
        self._llm = quiet(llm)

    async def ask(self, natives: Sequence[ChatMessage], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""
        # What the call says is overridden by the object's own fields, so that a copy is asked that says it.
        one = self._llm.model_copy(update=limited(self._llm, 1))
        more: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
        asked = list(natives)
        return usage_of(await in_thread(lambda: one.chat(asked, **more)))


def quiet(llm: LLM) -> LLM:
    """The same LLM for background work: the user's callbacks and rate limiter are none of its."""
    fields: dict[str, Any] = {"callback_manager": CallbackManager([]), "rate_limiter": None, "max_retries": 0}
    return llm.model_copy(update={k: v for k, v in fields.items() if k in type(llm).model_fields})


def limited(llm: LLM, tokens: int) -> dict[str, Any]:
    """The fields of a copy of ``llm`` that answers with at most so many tokens."""
    fields = type(llm).model_fields
    update: dict[str, Any] = {k: tokens for k in ("max_tokens", "num_predict", "max_new_tokens") if k in fields}
    more = dict(getattr(llm, "additional_kwargs", None) or {})
    own = {k: tokens for k in ("max_tokens", "max_completion_tokens") if k in more}
    return {**update, "additional_kwargs": {**more, **own}} if own else update


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
