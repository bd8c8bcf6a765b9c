"""Summarization: a span of history becomes one message written by the model (paper section 3.4)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from smoothagent.errors import ConfigurationError, SummaryRejectedError
from smoothagent.limits import Limits
from smoothagent.message import Message, canonical, leading_system
from smoothagent.prompt import Prompt
from smoothagent.strategies.window import latest_user
from smoothagent.strategy import CutStrategy, Prediction
from smoothagent.turns import last_safe_cut, safe_cuts

QUESTION = (
    "Summarize the conversation so far for your own later use: the task, decisions, findings, names and numbers "
    "you will need, and what is left to do. Answer with the summary only; do not call tools."
)
PREFIX = "Summary of the earlier conversation:\n"

_REMEMBERED = 8
"""Summaries that are remembered: what they cover, and that they are summaries."""


class Summarize(CutStrategy):
    """Summarize all but the newest ``keep`` tokens once the context reaches ``hard`` tokens.

    The request is the main stream's own prompt up to the cut plus one question, so a server with a
    prefix cache prefills the question only. Preparation begins at ``soft``.

    Args:
        hard: trigger in tokens of the next prompt.
        keep: tokens that stay verbatim, at least this and at most twice this; default hard // 4.
        soft: where preparation begins; default hard - keep, earlier if growth demands it.
        max_tokens: length limit of the summary; default a quarter of hard, at most 1024.
        question: the request to the model.
        prefix: what stands before the summary in its message.
        accept_cut_off: take a summary that ran into ``max_tokens``; otherwise it is rejected.
        keep_latest_user: keep the latest user message of what is summarized, after the summary.

    Raises:
        ConfigurationError: impossible limits.
    """

    exact = False
    extend_inline = False
    needs_model = True
    minimum_saving = 0.02

    def __init__(
        self,
        hard: int,
        *,
        keep: int | None = None,
        soft: int | None = None,
        max_tokens: int | None = None,
        question: str = QUESTION,
        prefix: str = PREFIX,
        accept_cut_off: bool = False,
        keep_latest_user: bool = True,
    ) -> None:
        super().__init__()
        self.limits = Limits(hard, hard // 4 if keep is None else keep, soft)
        if max_tokens is None:
            max_tokens = max(1, min(1024, hard // 4))
        if max_tokens < 1 or max_tokens >= hard:
            raise ConfigurationError(f"Summarize(hard={hard}, max_tokens={max_tokens}): need 1 <= max_tokens < hard")
        self.hard = hard
        self.max_tokens, self.question, self.prefix = max_tokens, question, prefix
        self.accept_cut_off, self.keep_latest_user = accept_cut_off, keep_latest_user
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._written: OrderedDict[str, None] = OrderedDict()
        self._prompt = ""

    def check(self, prompt: Prompt) -> None:
        """Refuses nothing; notes for which prompt answers are memoised, since another model's is another."""
        self._prompt = prompt.digest()

    def should_commit(self) -> bool:
        """Whether the trigger is reached and there is something to summarize."""
        return self.tokens >= self.limits.hard and self.cut(self.main.messages) > leading_system(self.main.messages)

    def cut(self, history: Sequence[Message]) -> int:
        """The last safe cut whose view has at most hard - keep tokens; one that leaves ``keep`` if that is too little.

        It is too little where more than twice ``keep`` would stay, or where the new view would not be below
        hard and the next turn would have to summarize again.
        """
        limits = self.limits
        cut = self._within(history, limits.hard - limits.keep)
        if self.tokens > limits.hard + limits.keep or self._left(history, cut) >= limits.hard:
            return self._within(history, self.tokens - limits.keep)
        return cut

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """From the soft limit on: the last safe cut below it. The tail follows verbatim.

        Where too much would stay verbatim by the time of the commit, a later cut that leaves ``keep`` then.
        """
        limits = self.limits
        start = limits.start(self.growth)
        if self.tokens < start:
            return None
        cut = self.cut(history) if self.tokens >= limits.hard else self._within(history, start)
        # However little comes, ``keep`` must be there by the ceiling.
        expected = min(self._expected(), limits.default_ceiling())
        if limits.keep and expected - self.tokens + sum(self.sizes[cut:]) > 2 * limits.keep:
            cut = max(cut, self._within(history, expected - limits.keep))
        return Prediction(cut, tail=True) if cut > leading_system(history) else None

    def _expected(self) -> int:
        """Tokens of the prompt at the commit: at the next turn, or at the first that reaches the trigger."""
        growth, hard = self.growth, self.limits.hard
        if self.tokens >= hard or growth.per_turn <= 0:
            return self.tokens + growth.still_to_come(self.tokens)
        return max(self.tokens, int(growth.tokens + growth.per_turn * growth.turns_until(hard)))

    def should_lookahead(self) -> bool:
        """The soft limit is reached and nothing is prepared for this view yet."""
        return self.la.last_segment_end == 0 and self.predict(self.main.messages) is not None

    async def rewrite(self, covered: Sequence[Message]) -> list[Message]:
        """The summary, then the latest user message of what it covers.

        Raises SummaryRejectedError or BackendError; the history is kept then.
        """
        kept = latest_user([m for m in covered if not self.is_summary(m)]) if self.keep_latest_user else []
        if len(covered) <= len(kept):
            return list(covered)
        text = self.prefix + await self._answer(covered)
        self._written[text] = None
        if len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)
        return [Message("user", text), *kept]

    def is_summary(self, message: Message) -> bool:
        """Whether a message is a summary that this strategy wrote.

        Not by its prefix: a user may write that too, and a user's latest message must not be lost. A summary from
        before a restart counts as the user's, which at worst keeps it for longer.
        """
        return message.role == "user" and message.text in self._written

    def tail_fits(self, tail_tokens: int, view_tokens: int, boundary: int) -> str:
        """``short``, ``ok`` or ``long``: whether a prepared result may be committed (the law, 1)."""
        keep = self.limits.keep
        if tail_tokens < keep:
            return "short"
        if view_tokens >= self.limits.hard:
            return "long"
        # Where a single turn is longer than that, no other cut would leave less.
        if keep and tail_tokens > 2 * keep and self._within(self.main.messages, self.tokens - keep) > boundary:
            return "long"
        return "ok"

    def _within(self, history: Sequence[Message], limit: int) -> int:
        lead = leading_system(history)
        sizes = self.sizes
        fixed = self.tokens - sum(sizes)
        ends = [fixed, *accumulate(sizes, initial=fixed)][1:]
        fitting = [c for c in safe_cuts(history) if ends[c] <= limit]
        return last_safe_cut(fitting, len(history)) or lead

    def _left(self, history: Sequence[Message], cut: int) -> int:
        """Tokens of the view that a cut would leave, with a summary of full length."""
        lead, sizes = leading_system(history), self.sizes
        user = next((sizes[i] for i in reversed(range(lead, cut)) if history[i].role == "user"), 0)
        return self.tokens - sum(sizes[lead:cut]) + self.max_tokens + user

    async def ask(self, covered: Sequence[Message]) -> str:
        """The model's summary of what is covered. Raises as `Model.generate` does.

        One question after the main stream's own prompt; an adapter may ask otherwise.
        """
        if self.model is None:
            raise ConfigurationError("Summarize needs a model: pass backend= to LookaheadRuntime")
        system = self.main.messages[: leading_system(self.main.messages)]
        request = [*system, *covered, Message("user", self.question)]
        return await self.model.generate(request, max_tokens=self.max_tokens, accept_cut_off=self.accept_cut_off)

    async def _answer(self, covered: Sequence[Message]) -> str:
        key = self._key(covered)
        if key not in self._answers:
            text = (await self.ask(covered)).strip()
            if not text:
                raise SummaryRejectedError("the model's summary is empty; the history is kept")
            self._answers[key] = text
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        return self._answers[key]

    def _key(self, covered: Sequence[Message]) -> str:
        digest = hashlib.sha256(f"{self._prompt}\0{self.question}\0{self.max_tokens}\0".encode())
        for message in covered:
            digest.update(canonical(message, None))
        return digest.hexdigest()
