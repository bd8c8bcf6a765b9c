"""One turn as a framework's harness has seen it from outside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from smoothagent.errors import ConfigurationError
from smoothagent_bench.job import Job
from smoothagent_bench.record import Row


@dataclass(frozen=True, slots=True)
class Measured:
    """Times and sizes of one turn. Times in seconds of one clock.

    Attributes:
        started: when the run began.
        ready: when what the turn answers was there: the tool's output, or the user's message.
        began: when the model was called.
        arrivals: when each token of the answer came.
        prompt_tokens: of the request.
        cached_tokens: of them found in the KV cache; None where the server does not say.
        completion_tokens: of the answer.
    """

    started: float
    ready: float
    began: float
    arrivals: Sequence[float]
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int

    def row(self, job: Job, turn: int, *, commit: bool, lookahead: str, known: int | None, reached: bool) -> Row:
        """The turn's row.

        Args:
            job: whose turn.
            turn: its number.
            commit: the request was the first with a transformed context.
            lookahead: how that was made.
            known: tokens of the new view that were known before.
            reached: the trigger was reached when the turn began.

        Raises:
            ConfigurationError: the server streamed no tokens, or told no usage.
        """
        if not self.arrivals or not self.prompt_tokens:
            raise ConfigurationError(
                f"the server streamed {len(self.arrivals)} tokens and {'' if self.prompt_tokens else 'no '}usage: it "
                "must honour stream_options.include_usage"
            )
        gaps = sorted(b - a for a, b in itertools.pairwise(self.arrivals)) or [0.0]
        return Row(
            strategy=job.variant.label,
            mode=job.mode,
            run=job.run,
            agent=job.agent,
            turn=turn,
            commit=commit,
            commit_s=self.began - self.ready,
            ttft_s=self.arrivals[0] - self.began,
            turn_s=self.arrivals[0] - self.ready,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            # Servers may send several tokens in one piece.
            tbt_mean_s=sum(gaps) / max(1, self.completion_tokens - 1),
            tbt_p99_s=gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))],
            lookahead=lookahead,
            reached_hard=reached,
            known_tokens=known,
            elapsed_s=self.arrivals[-1] - self.started,
        )
