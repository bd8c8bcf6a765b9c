"""A context that moves bulky results of tools to a store, which AutoGen does not have."""

from __future__ import annotations

from typing import Self

from autogen_core import Component
from autogen_core.models import LLMMessage
from autogen_core.tools import FunctionTool
from pydantic import BaseModel

from smoothagent import Backend, Offload, OffloadStore
from smoothagent_autogen.contexts.lookahead import LookaheadChatCompletionContext
from smoothagent_autogen.tools import read_offloaded


class OffloadingConfig(BaseModel):
    """The arguments of `OffloadingChatCompletionContext`; the store is told by its location."""

    token_limit: int
    keep: int = 3
    store: str | None = None
    min_chars: int = 200
    allow_unreadable: bool = False
    initial_messages: list[LLMMessage] | None = None
    warm: bool | None = None
    lookahead: bool = True
    ceiling: int | None = None


class OffloadingChatCompletionContext(LookaheadChatCompletionContext, Component[OffloadingConfig]):
    """Replaces bulky results of tools by references once a prompt reaches ``token_limit``, ahead of time.

    The agent reads them back with `read_tool`, which it must have. All messages are kept in the context, too.

    Args:
        token_limit: tokens of the whole prompt at which results are replaced.
        keep: the newest so many results stay as they are.
        store: where they go, or its location; default `OffloadStore` in the user's data folder.
        min_chars: results shorter than this stay, since a reference would not be shorter.
        allow_unreadable: do not ask that the agent has `read_tool`.
        initial_messages: as AutoGen's contexts.
        warm: prefill ahead; default yes, except at hosted endpoints.
        backend: the model's server, if you have one made. It is no part of the component's configuration.
        lookahead: False transforms at the limit, on the critical path.
        ceiling: tokens that an uncommitted request may never reach while a lookahead is late.

    Attributes:
        store: where results go.

    Raises:
        ConfigurationError: impossible limits.
    """

    component_config_schema = OffloadingConfig
    component_provider_override = "smoothagent_autogen.OffloadingChatCompletionContext"

    def __init__(
        self,
        token_limit: int,
        *,
        keep: int = 3,
        store: OffloadStore | str | None = None,
        min_chars: int = 200,
        allow_unreadable: bool = False,
        initial_messages: list[LLMMessage] | None = None,
        warm: bool | None = None,
        backend: Backend | None = None,
        lookahead: bool = True,
        ceiling: int | None = None,
    ) -> None:
        self.store = store if isinstance(store, OffloadStore) else OffloadStore(store)

        def strategy() -> Offload:
            return Offload(
                token_limit, keep=keep, store=self.store, min_chars=min_chars, allow_unreadable=allow_unreadable
            )

        super().__init__(
            strategy,
            initial_messages=initial_messages,
            warm=warm,
            backend=backend,
            lookahead=lookahead,
            ceiling=ceiling,
        )
        self._config = OffloadingConfig(
            token_limit=token_limit,
            keep=keep,
            store=self.store.location,
            min_chars=min_chars,
            allow_unreadable=allow_unreadable,
            initial_messages=initial_messages,
            warm=warm,
            lookahead=lookahead,
            ceiling=ceiling,
        )

    def read_tool(self) -> FunctionTool:
        """The tool that the agent reads results back with."""
        return read_offloaded(self.store)

    def _to_config(self) -> OffloadingConfig:
        return self._config

    @classmethod
    def _from_config(cls, config: OffloadingConfig) -> Self:
        given = {name: getattr(config, name) for name in OffloadingConfig.model_fields}
        return cls(**given)
