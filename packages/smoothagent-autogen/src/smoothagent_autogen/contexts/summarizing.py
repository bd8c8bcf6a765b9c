"""A context that summarizes what is old, which AutoGen does not have."""

from __future__ import annotations

from typing import Self

from autogen_core import Component
from autogen_core.models import LLMMessage
from pydantic import BaseModel

from smoothagent import Backend, Summarize
from smoothagent.strategies.summarize import QUESTION
from smoothagent_autogen.contexts.lookahead import LookaheadChatCompletionContext


class SummarizingConfig(BaseModel):
    """The arguments of `SummarizingChatCompletionContext`."""

    token_limit: int
    keep: int | None = None
    soft: int | None = None
    max_summary_tokens: int | None = None
    question: str = QUESTION
    initial_messages: list[LLMMessage] | None = None
    warm: bool | None = None
    lookahead: bool = True
    ceiling: int | None = None


class SummarizingChatCompletionContext(LookaheadChatCompletionContext, Component[SummarizingConfig]):
    """Summarizes all but the newest messages once a prompt reaches ``token_limit``, ahead of time.

    The agent's own model writes the summary, asked with the agent's own prompt, so that only the question has to be
    prefilled; it is sent as a user's message whose source is ``summary``. All messages are kept in the context.

    Args:
        token_limit: tokens of the whole prompt at which the summary takes the old messages' place.
        keep: tokens that stay as they are, at least this and at most twice this; default a quarter of the limit.
        soft: tokens at which the summary is begun; default ``token_limit - keep``, earlier if growth demands it.
        max_summary_tokens: its length limit; default a quarter of the limit, at most 1024.
        question: what the model is asked.
        initial_messages: as AutoGen's contexts.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made. It is no part of the component's configuration.
        lookahead: False summarizes at the limit, on the critical path.
        ceiling: tokens that an uncommitted request may never reach while a summary is late.

    Raises:
        ConfigurationError: impossible limits.
    """

    component_config_schema = SummarizingConfig
    component_provider_override = "smoothagent_autogen.SummarizingChatCompletionContext"

    def __init__(
        self,
        token_limit: int,
        *,
        keep: int | None = None,
        soft: int | None = None,
        max_summary_tokens: int | None = None,
        question: str = QUESTION,
        initial_messages: list[LLMMessage] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        lookahead: bool = True,
        ceiling: int | None = None,
    ) -> None:
        def strategy() -> Summarize:
            return Summarize(token_limit, keep=keep, soft=soft, max_tokens=max_summary_tokens, question=question)

        super().__init__(
            strategy,
            initial_messages=initial_messages,
            warm=warm,
            backend=backend,
            lookahead=lookahead,
            ceiling=ceiling,
        )
        self._config = SummarizingConfig(
            token_limit=token_limit,
            keep=keep,
            soft=soft,
            max_summary_tokens=max_summary_tokens,
            question=question,
            initial_messages=initial_messages,
            warm=warm,
            lookahead=lookahead,
            ceiling=ceiling,
        )

    def _to_config(self) -> SummarizingConfig:
        return self._config

    @classmethod
    def _from_config(cls, config: SummarizingConfig) -> Self:
        given = {name: getattr(config, name) for name in SummarizingConfig.model_fields}
        return cls(**given)
