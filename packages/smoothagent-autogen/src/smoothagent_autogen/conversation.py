"""One conversation of a context's, and the calls of its agent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autogen_core.models import ChatCompletionClient, FunctionExecutionResultMessage, LLMMessage
from pydantic import TypeAdapter

from smoothagent import (
    Backend,
    ConfigurationError,
    Delegation,
    Ledger,
    LookaheadRuntime,
    LookaheadStrategy,
    MainRequest,
)
from smoothagent.harmless import harmless
from smoothagent.record import CommitRecord
from smoothagent.request import Aside
from smoothagent.serving.late import LateBackend
from smoothagent_autogen.aside import AsideBackend
from smoothagent_autogen.codec import AutoGenCodec, leading
from smoothagent_autogen.flat import Flattening
from smoothagent_autogen.models import backend_for, given_for, to_wire_of
from smoothagent_autogen.seen import SEEN, Asked
from smoothagent_autogen.shape import AfterResults, Shape, ends_with, shape_of
from smoothagent_autogen.upcoming import WATCHED

log = logging.getLogger("smoothagent")
_MESSAGE: TypeAdapter[LLMMessage] = TypeAdapter(LLMMessage)


class Conversation:
    """A runtime, and what is learnt of the agent's calls: their server, system text and tools.

    Args:
        strategy: makes its strategy.
        warm: as `backend_for`.
        backend: the user's.
        lookahead: as `LookaheadRuntime`.
        ceiling: as `LookaheadRuntime`.

    Attributes:
        runtime: the present one.
        ledger: counts what lookahead cost and saved.
    """

    def __init__(
        self,
        strategy: Callable[[], LookaheadStrategy],
        *,
        warm: bool | None,
        backend: Backend | None,
        lookahead: bool,
        ceiling: int | None,
    ) -> None:
        self._strategy, self._warm, self._given = strategy, warm, backend
        self._lookahead, self._ceiling = lookahead, ceiling
        self._shape: Shape | None = None
        self._client: ChatCompletionClient | None = None
        self._after = AfterResults()
        self._called = False
        self._unseen = 0
        self.ledger = Ledger()
        self.runtime = self._new()
        self._start_over()
        SEEN.get_ready()

    # ---- the context's -------------------------------------------------------------------------

    async def view(self, messages: Sequence[LLMMessage]) -> list[LLMMessage]:
        """What to send of a history."""
        lead = leading(messages)
        flat = self._flat.flat(messages[lead:])
        after_results = bool(messages) and isinstance(messages[-1], FunctionExecutionResultMessage)
        if isinstance(self._backend.target, AsideBackend):
            self._backend.target.loop = asyncio.get_running_loop()
        self._unseen += 1
        if self._shape is None and self._unseen > 2:
            self._say_once(
                "seen", "nothing is transformed: no call of a model client was seen that ends with what it gave"
            )
        if self._shape is None or (after_results and self._after.reflects):
            sent = self._uncommitted(flat)
        else:
            sent = await self._committed(flat, self._shape, messages[:lead])
        view = [*messages[:lead], *self._flat.joined(sent)]
        self._view, self._at, self._after_results = view, time.monotonic(), after_results
        with harmless("a context's view"):
            SEEN.watch(self)
        return view

    async def _committed(self, flat: list[LLMMessage], shape: Shape, lead: Sequence[LLMMessage]) -> list[LLMMessage]:
        try:
            return await self.runtime.aon_commit(flat, prompt=self._prompt(shape, lead))
        except ConfigurationError:
            raise
        except Exception as error:  # whatever it is, the agent goes on as without us
            self._say_once("view", f"calls go without lookahead: {error!r}")
            return flat

    def _uncommitted(self, flat: list[LLMMessage]) -> list[LLMMessage]:
        try:
            return self.runtime.view(flat)
        except Exception as error:
            self._say_once("view", f"calls go without lookahead: {error!r}")
            return flat

    def boundary(self, messages: Sequence[LLMMessage]) -> None:
        """An answer is in the history; its calls have no results yet."""
        shape, called = self._shape, self._called
        self._called = False
        # One that no call of the agent's was answered with is somebody else's, handed over.
        if shape is None or not called:
            return
        lead = leading(messages)
        try:
            flat = self._flat.flat(messages[lead:])
            self.runtime.on_segment_boundary(flat, prompt=self._prompt(shape, messages[:lead]))
        except ConfigurationError as error:
            # The next call is refused; this one has its answer.
            self._say_once("configuration", str(error))
        except Exception as error:
            self._say_once("boundary", f"nothing is prepared: {error!r}")

    def start_over(self, saved: Mapping[str, Any] | None = None) -> None:
        """Another history, and the last commit of it where it was saved."""
        SEEN.forget(self)
        self.runtime.close()
        self.runtime = self._new()
        self._start_over()
        if saved is not None:
            try:
                record = saved["record"]
                if record is None:
                    return
                self.runtime.restore(CommitRecord[LLMMessage].from_dict(dict(record), _MESSAGE.validate_python))
            except Exception as error:  # written by another version, or by hand
                self._say_once("record", f"the last commit of a saved state cannot be read and is forgotten: {error!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversation:
        """Another one, that begins where this is."""
        copied = Conversation(
            self._strategy,
            warm=self._warm,
            backend=self._given,
            lookahead=self._lookahead,
            ceiling=self._ceiling,
        )
        copied.start_over(self.save())
        return copied

    def save(self) -> dict[str, Any]:
        """JSON-ready data for `start_over`."""
        record = self.runtime.record
        return {"record": None if record is None else record.to_dict(lambda m: _MESSAGE.dump_python(m, mode="json"))}

    # ---- the agent's calls ---------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether the call with the view may still come."""
        return bool(self._view) and time.monotonic() <= self._at + WATCHED

    def is_in(self, asked: Asked) -> bool:
        """Whether a call ends with the view."""
        return ends_with(asked, self._view)

    def begins(self, asked: Asked, delegation: Delegation[LLMMessage] | None) -> MainRequest:
        """The agent calls its model."""
        shape, view = shape_of(asked, self._view), self._view
        if delegation is not None:
            self._go_on_from(delegation, asked.client)
        self._serve(asked.client)
        self._called = True
        if self._after_results:
            self._after.add(shape)
        if shape.plain and self._shape is not None:
            return MainRequest(Aside(self._backend, self.runtime.session), self.runtime)
        if isinstance(self._backend.target, AsideBackend):
            self._backend.target.call, self._backend.target.loop = shape.call, asyncio.get_running_loop()
        if self._shape is None or self._shape != shape:
            self._shape = shape
            lead = view[: leading(view)]
            between = Flattening().flat([*shape.before(lead), *(lead if shape.others else ())])
            self._backend.before = tuple(self._codec.wire(message) for message in between)
        return self.runtime.main_request(self._prompt(self._shape, view[: leading(view)]))

    # ---- inside --------------------------------------------------------------------------------

    def _prompt(self, shape: Shape, lead: Sequence[LLMMessage]) -> Any:
        prompt = shape.prompt(lead)
        # The same object as long as it is the same prompt: another one is counted and digested anew.
        return self.runtime.prompt if self.runtime.prompt == prompt else prompt

    def _serve(self, client: ChatCompletionClient) -> None:
        if client is self._client:
            return
        self._client = client
        self._codec.to_wire = to_wire_of(client)
        backend = given_for(self._given, client) or backend_for(client, warm=self._warm)
        known = self._backend.target is not None
        if self._backend.serve(self.runtime.session, backend) and known:
            self.runtime.rest()

    def _go_on_from(self, delegation: Delegation[LLMMessage], client: ChatCompletionClient) -> None:
        """It is a sub-agent's, which goes on in the stream that was warmed for its first call."""
        record = self.runtime.record
        self.runtime.close()
        self._client = client
        self.runtime = self._new(delegation.session)
        self.runtime.go_on_from(delegation)
        if record is not None:
            self.runtime.restore(record)

    def _new(self, session: str | None = None) -> LookaheadRuntime[LLMMessage]:
        self._codec, self._backend = AutoGenCodec(), LateBackend()
        client, self._client = self._client, None
        runtime = LookaheadRuntime(
            self._strategy,
            backend=self._backend,
            codec=self._codec,
            lookahead=self._lookahead,
            ceiling=self._ceiling,
            ledger=self.ledger,
            session=session,
        )
        self.runtime = runtime
        if client is not None:
            self._serve(client)
        return runtime

    def _start_over(self) -> None:
        self._flat = Flattening()
        self._view: list[LLMMessage] = []
        self._at, self._after_results = 0.0, False
        self._said: set[str] = set()

    def _say_once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("context %s: %s", self.runtime.session, text)
