"""A lookahead request outside SGLang's queue, and the requests that its pieces are."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from smoothagent_sglang import engine

_SEPARATOR = "\x1fpiece"


@dataclass(eq=False)
class Held:
    """A lookahead request that is not in SGLang's queue.

    Attributes:
        req: the client's own request.
        number: to promote it by.
        deadline: when it is to be ready, on the scheduler's clock.
        arrival: when it came.
        start: tokens that were in the cache when it came; -1 before it was looked up.
        prefix: tokens that are in the cache now.
        lease: keeps them there.
        piece: the newest one, until what it has left in the cache is looked up.
        pieces: how many it has had.
        urgency: its place among others.
        begun: there is room set aside for all of it.
        nodes: of the cache, that its pieces have made and that are kept for it.
    """

    req: Any
    number: int | None
    deadline: float
    arrival: float
    start: int = -1
    prefix: int = 0
    lease: Any = None
    piece: Any = None
    pieces: int = 0
    urgency: float = -math.inf
    begun: bool = False
    nodes: list[Hashable] = field(default_factory=list[Hashable])

    @property
    def tokens(self) -> int:
        """Of its prompt."""
        return len(self.req.origin_input_ids)

    @property
    def needs(self) -> int:
        """Tokens that it adds to the cache."""
        return self.tokens - max(self.start, 0)

    @property
    def under_way(self) -> bool:
        """Its newest piece has not ended."""
        return self.piece is not None and not self.piece.finished()

    @property
    def decodes(self) -> bool:
        """It generates more than the token that its prefill gives."""
        return int(self.req.sampling_params.max_new_tokens or 0) > 1

    @property
    def was_aborted(self) -> bool:
        """It has ended so."""
        reason = self.req.finished_reason
        return reason is not None and reason.to_json().get("type") == "abort"

    def without_own_hits(self) -> None:
        """Keep its ``cached_tokens`` to what was cached before its own pieces (``ScheduleBatch`` adds the rest)."""
        self.req.already_computed = max(0, self.prefix - max(self.start, 0))

    def child(self, scheduler: Any, end: int) -> Any:
        """A request over the first ``end`` tokens, which generates nothing and answers nobody."""
        parent = self.req
        params = copy.copy(parent.sampling_params)
        params.max_new_tokens = params.min_new_tokens = 0
        params.frequency_penalty = params.presence_penalty = 0.0
        params.repetition_penalty = 1.0
        params.stop_strs, params.custom_params = [], None
        more = {name: getattr(parent, name) for name in ("cache_salt",) if hasattr(parent, name)}
        made: Any = engine.module("managers.schedule_batch").Req(
            f"{parent.rid}{_SEPARATOR}{self.pieces + 1}",
            "",
            parent.origin_input_ids[:end],
            params,
            stream=False,
            lora_id=parent.lora_id,
            extra_key=parent.extra_key,
            eos_token_ids=parent.eos_token_ids,
            vocab_size=scheduler.model_config.vocab_size,
            priority=parent.priority,
            disagg_mode=scheduler.disaggregation_mode,
            **more,
        )
        made.tokenizer = parent.tokenizer
        made.logprob_start_len = end  # beside a request with log probabilities it would compute its own
        made.finished_output = True  # what has been put out already is not put out again
        return made


def is_child(req: Any) -> bool:
    """Whether a request is a piece of one."""
    return _SEPARATOR in req.rid
