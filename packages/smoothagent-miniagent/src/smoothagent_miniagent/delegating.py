"""A tool that runs a sub-agent, whose prompt is warm before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from smoothagent import Backend, Delegation, Ledger, LookaheadStrategy
from smoothagent.lane import process_lane
from smoothagent_miniagent.aside import AsideBackend
from smoothagent_miniagent.attached import Attachment, attach, backend_for, default_strategy, message_of, own_llm
from smoothagent_miniagent.clients import request_of, to_wire_of
from smoothagent_miniagent.codec import MiniAgentCodec
from smoothagent_miniagent.hearing import FIELD, Delegates, Ready
from smoothagent_miniagent.tools import Result, Tool


class SubAgentTool(Tool, Delegates):
    """Hands a task to another Mini-Agent agent, whose prompt is warm when it starts.

    While the model of an attached agent that has the tool writes its answer, the sub-agent's system prompt and tools
    are prefilled, and the task as it is written, where the answer is streamed. Without that the tool works all the
    same, and its sub-agent begins cold.

    Args:
        make: makes the sub-agent: a fresh Mini-Agent ``Agent``.
        name: the tool's name.
        description: what it is for, for the model.
        strategy: a factory of the sub-agent's own; default as `attach`.
        warm: as `attach`.
        backend: the sub-agent's server, if you have one made.

    Attributes:
        ledger: counts what warming cost and saved.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        name: str = "delegate",
        description: str = "Hand a task to a sub-agent that works on it alone; returns its final answer.",
        strategy: Callable[[], LookaheadStrategy] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        task = {"type": "string", "description": "All that the sub-agent has to know, as it knows nothing else."}
        parameters = {"type": "object", "properties": {FIELD: task}, "required": [FIELD]}
        super().__init__(name, description, parameters)
        self._make, self._strategy, self._warm, self._backend = make, strategy, warm, backend
        self._ready: list[Ready] = []
        self._parent: Any = None
        self.ledger = Ledger()

    async def execute(self, task: str) -> Result:
        """Run a sub-agent; its last answer."""
        ready = next((one for one in self._ready if task.startswith(one.text)), None)
        if ready is None:
            agent, delegation = self._make(), None
        else:
            self._ready.remove(ready)
            agent, delegation = ready.agent, ready.delegation
        agent.add_user_message(task)
        if self._parent is not None:
            agent.cancel_event = self._parent.cancel_event
        with self._attached(agent, task, delegation):
            return Result(True, await agent.run())

    def _attached(self, agent: Any, task: str, delegation: Delegation[Any] | None) -> Attachment:
        if delegation is None:
            return attach(agent, self._strategy, warm=self._warm, backend=self._backend)
        delegation.on_commit(task)
        return Attachment(
            agent,
            self._strategy or default_strategy(agent),
            warm=self._warm,
            backend=self._backend,
            lookahead=True,
            ceiling=None,
            streamed=None,
            delegation=delegation,
        )

    # ---- ahead of time -------------------------------------------------------------------------

    def offered(self, parent: Any, *, streamed: bool) -> None:
        """A model is asked that may call it: what was opened in vain is given up, but for one where nothing streams."""
        self._parent = parent
        kept = [] if streamed else [one for one in self._ready if one.delegation.waits][:1]
        for one in self._ready:
            if one not in kept:
                one.delegation.cancel()
        self._ready = kept
        if not streamed and not kept:
            self.opened()

    def opened(self) -> Ready:
        """A sub-agent may be called for: its prompt is warmed."""
        agent = self._make()
        llm = own_llm(agent.llm)
        backend = self._backend or backend_for(llm, warm=self._warm)
        tools = list(agent.tools.values())
        if isinstance(backend, AsideBackend):
            backend.loop, backend.tools = asyncio.get_running_loop(), tools
        message = message_of(agent)
        delegation: Delegation[Any] = Delegation(
            backend=backend,
            codec=MiniAgentCodec(message, to_wire_of(llm)),
            lane=process_lane(),
            ledger=self.ledger,
            prompt=request_of(llm, tools).prompt,
            head=list(agent.messages),
            instruction=lambda text: message(role="user", content=text),
        )
        ready = Ready(agent, delegation)
        self._ready.append(ready)
        return ready

    def give_up(self) -> None:
        """Nobody will call it any more."""
        for one in self._ready:
            one.delegation.cancel()
        self._ready.clear()
