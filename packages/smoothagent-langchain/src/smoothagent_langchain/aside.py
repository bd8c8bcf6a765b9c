"""Work ahead through the chat model object itself, for servers that only it can talk to."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]

from smoothagent import BackendError, BackendUnreachableError, Caps, Generated, Prompt, Stream, Usage
from smoothagent.serving.backend import Wire

T = TypeVar("T")

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
    """Whether a model that is called here is not to be taken for the agent's."""
    return _unseen.get()


_ASKED = 64
"""Conversations whose last request is remembered."""


class AsideBackend:
    """A `Backend` that knows nothing of its server but what the model object says.

    It prefills only if told to (by asking for one token), paces nothing and marks nothing.

    Args:
        model: the agent's model.
        warm: ask for one token of what the next request will be, so that a server with a prefix cache has it warm.

    Attributes:
        prefills: whether it does.
    """

    def __init__(self, model: BaseChatModel, *, warm: bool) -> None:
        self._model = quiet(model)
        self.prefills = warm
        self._asked: dict[str, list[BaseMessage]] = {}

    async def caps(self) -> Caps:
        """Whether it prefills."""
        return Caps(type(self._model).__name__, prefill=self.prefills, classes=True, cached_tokens=False)

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """Nothing is marked."""
        del conversation, stream
        return {}

    async def prefill(
        self, conversation: str, messages: Sequence[Wire], prompt: Prompt, *, partial: bool = False
    ) -> Usage:
        """Ask for one token after ``messages``. Raises BackendError."""
        if not self.prefills:
            return Usage()
        natives = [m for m in (getattr(w, "native", None) for w in messages) if isinstance(m, BaseMessage)]
        if partial:
            natives = natives[:-1]
        if not natives or self._asked.get(conversation) == natives:
            return Usage()  # what is still being written cannot be shown to it
        more: dict[str, Any] = {"tools": list(prompt.tools)} if prompt.tools else {}
        answer = await in_thread(lambda: self._model.invoke(natives, max_tokens=1, **more))
        if len(self._asked) >= _ASKED:
            self._asked.clear()
        self._asked[conversation] = natives
        return usage_of(answer) or Usage()

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
        """Not by this way: the adapters ask the model object themselves. Raises BackendError."""
        del conversation, messages, prompt, max_tokens, lookahead, extends_main
        raise BackendError(f"{type(self._model).__name__} is asked through its own object")

    async def promote(self, conversation: str) -> None:
        """There is nothing to raise."""

    async def cancel(self, conversation: str) -> None:
        """A call through the model object cannot be taken back; its answer is dropped."""

    def settle(self, conversation: str) -> None:
        """Nothing to settle."""

    def committed(self, conversation: str) -> bool:
        """No streams."""
        del conversation
        return False

    async def deliver(self, conversation: str) -> bool:
        """Nothing is warmed elsewhere."""
        del conversation
        return False

    def undelivered(self, conversation: str) -> None:
        """Nothing is warmed elsewhere."""

    def spent(self, conversation: str) -> Usage:
        """Nothing that could be seen of a request that was cut short."""
        del conversation
        return Usage()

    def release(self, conversation: str) -> None:
        """Nothing is held but what was asked last."""
        self._asked.pop(conversation, None)

    def main_arrived(self, conversation: str) -> None:
        """Nothing is paced."""

    def main_first_token(self, conversation: str) -> None:
        """Nothing is paced."""

    def main_done(self, conversation: str) -> None:
        """Nothing is paced."""

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """Not by the server."""
        del messages, prompt
        return None

    async def aclose(self) -> None:
        """The model is the user's."""


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


async def in_thread(work: Any) -> Any:
    """Call ``work`` in a daemon thread, untraced. Raises BackendUnreachableError from whatever it raises.

    A thread, because a model's async client belongs to the user's loop; a daemon, because it must not delay exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            failed = BackendUnreachableError(f"the model failed in the background: {error!r}")
            failed.__cause__ = error
            done.set_exception(error if isinstance(error, BackendError) else failed)

    def run() -> None:
        result, error = None, None
        try:
            with tracing_context(enabled=False), unseen():
                result = work()
        except BaseException as raised:  # handed on to the waiting coroutine, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="smoothagent-langchain", daemon=True).start()
    return await done
