"""Work ahead through the chat model object itself, for servers that only it can talk to."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]

from smoothagent import Prompt, Usage
from smoothagent.blocking import in_daemon_thread
from smoothagent.serving.through_object import ObjectBackend
from smoothagent.unseen import unseen

T = TypeVar("T")


class AsideBackend(ObjectBackend[BaseMessage]):
    """A `Backend` that knows nothing of its server but what the chat model object says.

    Args:
        model: the agent's model.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.
    """

    def __init__(self, model: BaseChatModel, *, warm: bool) -> None:
        super().__init__(type(model).__name__, warm=warm)
        self._model = quiet(model)

    async def ask(self, natives: Sequence[BaseMessage], prompt: Prompt) -> Usage | None:
        """Ask for one token after these messages. Raises BackendError."""
        more: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
        asked = list(natives)
        return usage_of(await in_thread(lambda: self._model.invoke(asked, max_tokens=1, **more)))


def quiet(model: BaseChatModel) -> BaseChatModel:
    """The same model for background work: the user's LLM cache, rate limiter, callbacks and stream are none of its."""
    fields = {"cache": False, "callbacks": None, "rate_limiter": None, "disable_streaming": True, "streaming": False}
    return model.model_copy(update={k: v for k, v in fields.items() if k in type(model).model_fields})


def usage_of(message: object) -> Usage | None:
    """Token counts of a model's answer, where it tells them."""
    counts = message.usage_metadata if isinstance(message, AIMessage) else None
    if not counts:
        return None
    details = counts.get("input_token_details") or {}
    return Usage(counts["input_tokens"], counts["output_tokens"], details.get("cache_read"))


def hidden(work: Callable[[], T]) -> T:
    """What ``work`` returns; it is called in an empty context, so that no run of the user's sees it."""

    def untraced() -> T:
        with tracing_context(enabled=False), unseen():
            return work()

    return contextvars.Context().run(untraced)


async def in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a daemon thread, untraced. Raises BackendUnreachableError from whatever it raises."""

    def untraced() -> T:
        with tracing_context(enabled=False), unseen():
            return work()

    return await in_daemon_thread(untraced, "the model failed in the background")
