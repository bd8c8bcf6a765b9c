"""A summary of what has left a `Memory`'s queue, as one of its blocks: LlamaIndex has none."""

# LlamaIndex's own annotations are partial.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.settings import Settings
from pydantic import Field

from smoothagent import SummaryRejectedError
from smoothagent.unseen import unseen
from smoothagent_llamaindex.codec import LlamaIndexCodec

log = logging.getLogger("smoothagent")
_CODEC = LlamaIndexCodec()

PROMPT = (
    "Write a concise summary of a conversation between a user and an assistant: the task, decisions, findings, names "
    "and numbers that will be needed, and what is left to do. Where there is a summary so far, the new one replaces "
    "it: keep of it what still matters. Answer with the summary only."
)


def _default_llm() -> LLM:
    return Settings.llm


class SummaryMemoryBlock(BaseMemoryBlock[str]):
    """A running summary of the messages that a memory's queue has no room for.

    In LlamaIndex's own ``Memory`` it is written when they leave the queue, and awaited; in ours ahead of time, and kept
    in the memory's store.

    Attributes:
        llm: writes it; default LlamaIndex's ``Settings.llm``.
        summarize_prompt: what it is told.
        summary: the summary so far; in our `Memory` the store has it, and this is where a session begins.
        accept_cut_off: take a summary that ran into the LLM's length limit; only ours can tell.
        pending: messages that have left the queue and are in no summary, since one failed.
    """

    name: str = Field(default="summary", description="The name of the memory block.")
    llm: LLM = Field(default_factory=_default_llm, exclude=True, description="The LLM that summarizes.")
    summarize_prompt: str = Field(default=PROMPT, description="The system prompt of a request for a summary.")
    summary: str = Field(default="", description="The summary so far.")
    accept_cut_off: bool = Field(default=False, description="Take a summary that was cut off.")
    pending: list[ChatMessage] = Field(
        default_factory=list[ChatMessage], description="Messages that have left the queue and are not in the summary."
    )

    def request(self, messages: Sequence[ChatMessage], existing: str) -> list[ChatMessage]:
        """What the LLM is asked, to add ``messages`` to the ``existing`` summary."""
        lines = [f"{m.role.value}: {said}" for m in messages if (said := _said(m))]
        so_far = f"Summary so far:\n{existing}\n\n" if existing else ""
        transcript = "\n\n".join(lines)
        return [
            ChatMessage(role=MessageRole.SYSTEM, content=self.summarize_prompt),
            ChatMessage(role=MessageRole.USER, content=f"{so_far}Transcript so far:\n{transcript}"),
        ]

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        del messages, block_kwargs
        return self.summary

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Add messages. Those of a summary that fails are summarized with the next ones: they have left the queue."""
        self.pending = [*self.pending, *messages]
        while self.pending:
            batch, existing = list(self.pending), self.summary
            try:
                text = await self.written(batch, existing)
            except Exception as error:
                log.warning("memory block %r: %d messages are summarized later: %r", self.name, len(batch), error)
                return
            # Another may have been written meanwhile, which is without these.
            if self.summary == existing and self.pending[: len(batch)] == batch:
                self.summary, self.pending = text, self.pending[len(batch) :]
                return

    async def written(self, messages: Sequence[ChatMessage], existing: str) -> str:
        """A summary, here and now. Raises SummaryRejectedError where it is empty, and whatever the LLM raises."""
        with unseen():
            response = await self.llm.achat(self.request(messages, existing))
        text = response.message.content or ""
        if not text.strip():
            raise SummaryRejectedError(f"the LLM's summary of {len(messages)} messages is empty; they are kept")
        return text


def _said(message: ChatMessage) -> str:
    parts = [message.content or ""]
    parts += [f"calls {c.name}({c.arguments})" for c in _CODEC.decode(message).tool_calls]
    return "\n".join(part for part in parts if part)
