"""What a chat model is really sent, seen from inside the agent's own call.

Inner middleware may still change messages, system text and tools after ours has passed the request on; a callback
handler that is inherited by everything inside sees the end of that. It is set for one call, in the caller's context,
and shows in nobody's traces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tracers.context import register_configure_hook

from smoothagent import Prompt
from smoothagent.prompt import name_in, prompt_of

_watching: ContextVar[Watch | None] = ContextVar("smoothagent_watch", default=None)
register_configure_hook(_watching, inheritable=True)


class Watch(BaseCallbackHandler):
    """Notes the call that answers the agent's request, and when it begins to answer.

    Inside it may be others: a tool selector's, a guard's, a fallback model's. They are of another model, or do not
    ask for what the agent asks.

    Args:
        asked: the messages of the agent's request.
        model: the name of its model; None where it has none.
        first_token: called at each token; the first one counts.
        text: called with each piece of the answer's text, where it streams.

    Attributes:
        messages: as sent, system messages included; None while nothing was.
        params: the call's other fields, as the model names them.
    """

    run_inline = True

    def __init__(
        self,
        asked: Sequence[BaseMessage],
        model: str | None,
        first_token: Callable[[], None],
        text: Callable[[str], None],
    ) -> None:
        self._asked, self._model, self._first_token, self._text = asked, model, first_token, text
        self._run: UUID | None = None
        self._outer: Watch | None = None
        self.messages: list[BaseMessage] | None = None
        self.params: dict[str, Any] = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch what is called inside; a watch that is set already (another middleware's) is told, too."""
        self._outer = _watching.get()
        token = _watching.set(self)
        try:
            yield
        finally:
            _watching.reset(token)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """A model is called."""
        if self._outer is not None:
            self._outer.on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)
        sent = messages[0] if messages else []
        params = dict(kwargs.get("invocation_params") or {})
        if self._is_the_agents(sent, params):
            self._run, self.messages, self.params = run_id, list(sent), params

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It has begun to answer."""
        if self._outer is not None:
            self._outer.on_llm_new_token(token, run_id=run_id, **kwargs)
        if run_id == self._run:
            self._first_token()
            if isinstance(token, str):
                self._text(token)

    def on_stream_event(self, event: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The same, in newer streams; the message's own start says nothing yet."""
        if self._outer is not None:
            self._outer.on_stream_event(event, run_id=run_id, **kwargs)
        starts = isinstance(event, Mapping) and cast("Mapping[str, Any]", event).get("event") == "message-start"
        if run_id == self._run and not starts:
            self._first_token()

    def prompt(self, added: Mapping[str, Any]) -> Prompt:
        """What shaped the tokens besides the messages.

        Args:
            added: what was added to ``extra_body`` to route the call; no part of the prompt.
        """
        return prompt_of(self.params, added)

    def _is_the_agents(self, sent: Sequence[BaseMessage], params: Mapping[str, Any]) -> bool:
        name = name_in(params)
        if self._model is not None and name is not None and name != self._model:
            return False
        if not self._asked:
            return True
        # The end may be rewritten, and something put after it; what comes before is the agent's history.
        return len(sent) >= len(self._asked) and (len(self._asked) == 1 or any(_same(m, self._asked[0]) for m in sent))


def is_of(model: BaseChatModel, serialized: Mapping[str, Any] | None, params: Mapping[str, Any]) -> bool:
    """Whether a call is of ``model``: the same name and the same server, as far as both tell.

    Args:
        model: the model object.
        serialized: what the called model says of itself.
        params: the call's parameters.
    """
    name, called = getattr(model, "model_name", None) or getattr(model, "model", None), name_in(params)
    if isinstance(name, str) and called is not None and name != called:
        return False
    told = cast("Mapping[str, Any]", (serialized or {}).get("kwargs") or {})
    own = getattr(model, "openai_api_base", None)
    if told or not own:
        return (told.get("openai_api_base") or "") == (own or "")
    return str(own) in str(serialized)  # of a class that LangChain cannot serialize there is its repr


def _same(a: BaseMessage, b: BaseMessage) -> bool:
    return a is b or (a.type == b.type and a.content == b.content)
