"""`OpenAIBackend`: the `Backend` protocol over any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from openai import AsyncOpenAI

from smoothagent.errors import BackendError, ConfigurationError
from smoothagent.forks import after_fork
from smoothagent.prompt import Prompt
from smoothagent.serving import chat
from smoothagent.serving.backend import Caps, Generated, Stream, Usage, Wire
from smoothagent.serving.connection import Connection
from smoothagent.serving.dialects.base import Ask, Dialect, Options, ServingStats
from smoothagent.serving.dialects.detect import DIALECTS, detect
from smoothagent.serving.home import Home
from smoothagent.serving.pacer import Pacer, PacerStats
from smoothagent.serving.unpaced import Pacing, Unpaced

T = TypeVar("T")


class OpenAIBackend:
    """One model server behind the official openai client.

    Make one per server and process and share it: it leases the server's slots and paces all lookahead
    work of the process. ``caps`` finds out what the server is; until it has succeeded, `route` returns
    nothing, so await it before the first main request.

    The ``main_*`` hooks, `route`, `committed` and `release` do no I/O and may be called from any thread.
    Everything else runs on one loop: the one that awaits it, or, with ``client``, the client's own.

    Args:
        base_url: the API's URL, for instance ``http://127.0.0.1:8080/v1``.
        model: the model to ask for where a prompt names none; not needed where the server has one model.
        client: the agent's own ``AsyncOpenAI``, to use instead of another one. Its connections belong to the loop
            that the backend is made on or first used from, so all its calls are made there, while that loop lives;
            when it is closed the lookahead work on it ends. The client stays open.
        api_key: for the own client.
        warm: send prefill-only requests. None: yes, except to hosted endpoints, where they cost money.
        dialect: ``auto`` asks the server; else ``llama.cpp``, ``sglang``, ``vllm`` or ``openai``.
        pacer: ``auto`` paces where the server has no best-effort class; a `Pacer` paces always, None never.
        slots: llama.cpp slots that this process may use, three a conversation; None for all.
        lookahead_url: a second llama.cpp server with the same model and settings, for the lookahead work: on cores or
            a device that the first leaves idle while it decodes. At a commit the KV goes through the folder that both
            name as ``--slot-save-path``. It is asked with the same key, and must serve no other agent's server.
        timeout: seconds a request may take, or a stream may be silent.
        headers: sent with every request made here (not with the agent's own), for instance to mark it as the
            agent's work and not the user's, where a service bills by that. GitHub Copilot's mark is sent unasked.

    Raises:
        ConfigurationError: neither ``base_url`` nor ``client``, or an unknown dialect.
    """

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        client: AsyncOpenAI | None = None,
        api_key: str = "x",
        warm: bool | None = None,
        dialect: str = "auto",
        pacer: Pacer | Literal["auto"] | None = "auto",
        slots: Sequence[int] | None = None,
        lookahead_url: str | None = None,
        timeout: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if dialect != "auto" and dialect not in DIALECTS:
            raise ConfigurationError(f"unknown dialect {dialect!r}: use 'auto' or one of {', '.join(sorted(DIALECTS))}")
        self._link = Connection(base_url, client, api_key, timeout, headers)
        side_key = api_key if client is None else client.api_key
        self._side = None if lookahead_url is None else Connection(lookahead_url, None, side_key, timeout, headers)
        self._options = Options(model, warm, slots, self._side)
        self._dialect_name = dialect
        self._dialect: Dialect | None = None
        self._probing: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._auto_pacer = pacer == "auto"
        self._pacer: Pacing = Unpaced() if pacer is None else Pacer() if pacer == "auto" else pacer
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}
        self._home = Home() if client is not None else None
        self.note_loop()
        after_fork(self._start_afresh)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same: whatever it is part of is copied, and the server is one."""
        return self

    @property
    def base_url(self) -> str:
        """The API's URL."""
        return self._link.base_url

    @property
    def server(self) -> str | None:
        """The server's kind, as `Caps.server` says it; None until ``caps`` has succeeded."""
        return None if self._dialect is None else self._dialect.server

    async def caps(self) -> Caps:
        """What the server can do. Asks it until that succeeds once; later requests may add notes.

        Raises:
            BackendError: nothing answers there, or not in the OpenAI API.
            ConfigurationError: the model or the slots named do not exist.
        """
        return await self._at_home(self._caps())

    def route(self, conversation: str, stream: Stream) -> dict[str, Any]:
        """Keyword arguments to merge into the agent's own ``create`` call; empty until ``caps`` has succeeded."""
        return {} if self._dialect is None else self._dialect.extras(conversation, stream)

    async def prefill(
        self,
        conversation: str,
        messages: Sequence[Wire],
        prompt: Prompt,
        *,
        partial: bool = False,
        deadline: float | None = None,
    ) -> Usage:
        """Bring ``messages`` into the lookahead stream's KV cache. See `Backend.prefill`.

        Returns:
            ``prompt_tokens`` of the prefix, of which ``cached_tokens`` needed no work; all zero where
            nothing was sent (no warming here, or the conversation has no slots).
        """
        ask = Ask(conversation, chat.conversation(messages, prompt), prompt, deadline)
        return await self._at_home(self._prefill(ask, partial)) if messages else Usage()

    async def generate(
        self,
        conversation: str,
        messages: Sequence[Wire],
        prompt: Prompt,
        *,
        max_tokens: int,
        lookahead: bool,
        extends_main: bool = True,
        deadline: float | None = None,
    ) -> Generated:
        """Let the model answer. See `Backend.generate`."""
        ask = Ask(conversation, chat.conversation(messages, prompt), prompt, deadline)
        return await self._at_home(self._generate(ask, max_tokens, lookahead, extends_main))

    def note_loop(self) -> None:
        """The agent runs here: its own client lives on this loop, unless there is another that runs."""
        if self._home is not None:
            self._home.note()

    def needs_this_loop(self) -> bool:
        """Whether its requests are made on the loop that is running here, so that blocking it would stop them."""
        return self._home is not None and self._home.is_here()

    async def promote(self, conversation: str) -> None:
        """Raise the conversation's lookahead work, in place where the server can, else with a larger share."""
        self._pacer.promote(conversation)
        if self._dialect is not None:
            await self._at_home(self._dialect.promote(conversation))

    async def cancel(self, conversation: str) -> None:
        """Cancel the conversation's `prefill` and lookahead `generate` calls, which stops them on the server."""
        self._pacer.settle(conversation)
        await self._at_home(self._cancel(conversation))

    def settle(self, conversation: str) -> None:
        """The conversation's lookahead work is in a hurry no more."""
        self._pacer.settle(conversation)

    def committed(self, conversation: str) -> bool:
        """Main and lookahead slot swap, from the next `route` on: call it before that. See `Backend.committed`."""
        self._pacer.settle(conversation)
        return self._dialect is not None and self._dialect.committed(conversation)

    async def deliver(self, conversation: str) -> bool:
        """Bring what was warmed on the lookahead server to the agent's. See `Backend.deliver`."""
        return self._dialect is not None and await self._at_home(self._dialect.deliver(conversation))

    def undelivered(self, conversation: str) -> None:
        """The last `committed` is taken back. See `Backend.undelivered`."""
        if self._dialect is not None:
            self._dialect.undelivered(conversation)

    def release(self, conversation: str) -> None:
        """Free what the conversation holds."""
        self._pacer.forget(conversation)
        if self._dialect is not None:
            self._dialect.release(conversation)

    def main_arrived(self, conversation: str) -> None:
        """A main request is about to be sent."""
        self.note_loop()
        self._pacer.main_arrived(conversation)

    def main_first_token(self, conversation: str) -> None:
        """It has answered its first token."""
        self._pacer.main_first_token(conversation)

    def main_done(self, conversation: str) -> None:
        """It has ended, well or not."""
        self._pacer.main_done(conversation)

    async def count(self, messages: Sequence[Wire], prompt: Prompt) -> int | None:
        """Tokens of a request with these messages by the server's tokenizer, or None."""
        return await self._at_home(self._count(Ask("", chat.conversation(messages, prompt), prompt)))

    def spent(self, conversation: str) -> Usage:
        """What its lookahead requests have computed and generated so far. See `Backend.spent`."""
        return self._pacer.spent.of(conversation)

    @property
    def stats(self) -> tuple[ServingStats, PacerStats]:
        """What was done so far: by the dialect, and by the pacer."""
        return (ServingStats() if self._dialect is None else self._dialect.stats), self._pacer.stats

    async def aclose(self) -> None:
        """Close the own clients; one that was given stays open."""
        await self._link.aclose()
        if self._side is not None:
            await self._side.aclose()

    # -- at home ---------------------------------------------------------------------------

    def _start_afresh(self) -> None:
        self._probing.clear()
        self._tasks.clear()
        self._link.forget()
        if self._side is not None:
            self._side.forget()
        if isinstance(self._pacer, Pacer):
            self._pacer.reset()
        if self._home is not None:
            self._home.forget()

    def _at_home(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return work if self._home is None else self._home.run(work)

    async def _caps(self) -> Caps:
        return (await self._ready()).caps()

    async def _prefill(self, ask: Ask, partial: bool) -> Usage:
        dialect = await self._ready()
        if not dialect.caps().prefill:
            return Usage()
        async with self._tracked(ask.conversation, dialect, ask.prompt):
            return await dialect.prefill(ask, self._pacer, partial=partial)

    async def _generate(self, ask: Ask, max_tokens: int, lookahead: bool, extends_main: bool) -> Generated:
        dialect = await self._ready()
        async with self._tracked(ask.conversation if lookahead else None, dialect, ask.prompt):
            return await dialect.generate(
                ask, self._pacer, max_tokens=max_tokens, lookahead=lookahead, extends_main=extends_main
            )

    async def _cancel(self, conversation: str) -> None:
        for task in tuple(self._tasks.get(conversation, ())):
            if task is not asyncio.current_task():
                task.cancel()
        if self._dialect is not None:
            await self._dialect.cancel(conversation)

    async def _count(self, ask: Ask) -> int | None:
        return await (await self._ready()).count(ask)

    async def _ready(self) -> Dialect:
        if self._dialect is not None:
            return self._dialect
        # Each loop asks once; two that ask at the same time learn the same.
        async with self._probing.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._dialect is None:
                dialect = await detect(self._link, self._options, self._dialect_name)
                self._probing.clear()
                if self._auto_pacer and not dialect.paced:
                    self._pacer = Unpaced()
                if self._pacer.watch is None:
                    self._pacer.watch = dialect.load
                self._pacer.begin()
                self._dialect = dialect
        return self._dialect

    @contextlib.asynccontextmanager
    async def _tracked(self, conversation: str | None, dialect: Dialect, prompt: Prompt) -> AsyncGenerator[None]:
        """Let `cancel` find the task, and say a missing model clearly."""
        task = asyncio.current_task()
        tasks = self._tasks.setdefault(conversation, set()) if conversation is not None else set[Any]()
        nested = task in tasks
        if task is not None:
            tasks.add(task)
        try:
            yield
        except BackendError as error:
            clearer = dialect.missing_model(error, prompt)
            if clearer is error:
                raise
            raise clearer from error
        finally:
            if not nested:
                tasks.discard(task)
            if conversation is not None and not self._tasks.get(conversation):
                self._tasks.pop(conversation, None)
