"""Strategies one after the other: typically offload, then summarize."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, leading_system
from smoothagent.prompt import Prompt
from smoothagent.state import LookaheadState
from smoothagent.strategy import Commit, CutStrategy, LookaheadStrategy, Prediction


class Pipeline(LookaheadStrategy):
    """Compose strategies, each over its own cut: every stage works on the view the one before leaves.

    A stage acts when its own trigger is reached on what reaches it, so a summary is written only
    where offloading alone does not bring the context under the summary's trigger.

    Args:
        stages: any number of `Offload`, then one strategy of any kind.

    Raises:
        ConfigurationError: no stages, or one before the last that moves messages.
    """

    extend_inline = False

    def __init__(self, *stages: CutStrategy) -> None:
        super().__init__()
        if not stages:
            raise ConfigurationError("Pipeline() has no stages: pass e.g. Offload(...), Summarize(...)")
        for stage in stages[:-1]:
            if not stage.positional:
                raise ConfigurationError(f"Pipeline: {type(stage).__name__} moves messages and must be the last stage")
        self.front, self.last = stages[:-1], stages[-1]
        self.exact = self.last.exact
        self.needs_model = self.last.needs_model
        self.minimum_saving = self.last.minimum_saving
        self.defer = self.last.defer
        self.hard = min((s.hard for s in stages if s.hard is not None), default=None)
        self._acting: CutStrategy | None = None

    def should_commit(self) -> bool:
        """Whether any stage's trigger is reached on what reaches it."""
        triggers = [s.hard for s in (*self.front, self.last)]
        # Earlier stages only shrink what later ones see, so below all triggers there is nothing to work out.
        if all(t is not None and self.tokens < t for t in triggers):
            return False
        view, acted = self._through(self.main.messages)
        return acted > 0 or self._see(self.last, view).should_commit()

    def should_lookahead(self) -> bool:
        """Any stage has something to prepare in the history as it is; ``transform`` looks closer."""
        if self.la.strategy_data.get("last") and not self.exact:
            return False
        return any(self._raw(stage).should_lookahead() for stage in (*self.front, self.last))

    def transform(self) -> Awaitable[None] | None:
        """Run the stages that the next commit will need, if any; on the critical path those that are due."""
        if self.on_critical_path:
            last = self._see(self.last, self._through(self.main.messages)[0])
            return self._run(last) if last.should_commit() else None
        view, front = self._ahead(self.main.messages)
        last = self._see(self.last, view)
        if self._last_will_act(last) and (last.should_commit() or last.predict(view) is not None):
            return self._run(last)
        if front is not None:
            self.la = LookaheadState(list(view[: front.cut]), front.cut, {"tail": front.tail})
        return None

    def _run(self, last: CutStrategy) -> Awaitable[None] | None:
        work = last.transform()
        if work is not None:
            return self._finish(last, work)
        self._publish(last)
        return None

    async def _finish(self, last: CutStrategy, work: Awaitable[None]) -> None:
        await work
        self._publish(last)

    def _publish(self, last: CutStrategy) -> None:
        self.la = last.la
        self.la.strategy_data["last"] = True

    @property
    def waits_for(self) -> int | None:
        """The last stage's trigger, where that is the only one whose work may be late."""
        return self.hard if self.exact else self.last.hard

    def should_promote(self) -> bool:
        """A stage's trigger is reached in the history as it is; nothing is rewritten to find out."""
        return any(self._raw(stage).should_commit() for stage in (*self.front, self.last))

    def computed_anew(self) -> bool:
        """Whether what is due now takes no more than the earlier stages, which prepare warmth only."""
        return self.exact or not self._see(self.last, self._through(self.main.messages)[0]).should_commit()

    def refuse(self, before: int, after: int) -> str | None:
        """As the base class says, by what the stages that act ask for."""
        stages = (self.last,) if self._acting is not None else self.front
        refusals = [stage.refuse(before, after) for stage in stages]
        return next((r for r in refusals if r is not None), None)

    def commit(self, history: Sequence[Message]) -> Commit | None:
        """Earlier stages computed anew, the last one as prepared (or computed, if model-free)."""
        view, covered = self._through(history)
        last = self._see(self.last, view)
        self._acting = last if last.should_commit() else None
        if self._acting is None:
            return Commit(covered, view[:covered]) if covered else None
        if not self.exact and not self.la.strategy_data.get("last"):
            return None
        last.la = self.la
        done = last.commit(view)
        if done is None or done.covered >= covered:
            return done
        return Commit(covered, [*done.head, *view[done.covered : covered]])

    def warmable(self, history: Sequence[Message]) -> list[Message]:
        """As the base class says; where the last stage takes part, its tail passes the earlier stages too."""
        if not self.la.strategy_data.get("last"):
            return super().warmable(history)
        view, _ = self._ahead(history)
        return [*self.la.transformed, *view[self.la.last_segment_end :]]

    def tail_fits(self, tail_tokens: int, view_tokens: int, boundary: int) -> str:
        """As the last stage says, if it takes part in what `commit` was last asked for."""
        if self._acting is None or not self.la.strategy_data.get("last"):
            return "ok"
        return self._acting.tail_fits(tail_tokens, view_tokens, boundary)

    def check(self, prompt: Prompt) -> None:
        """Refuse what any stage refuses."""
        for stage in (*self.front, self.last):
            stage.check(prompt)

    def _raw(self, stage: CutStrategy) -> CutStrategy:
        """A copy of a stage that looks at the history as it is."""
        twin = stage.snapshot(LookaheadState(last_segment_end=self.la.last_segment_end))
        twin.main = self.main
        return twin

    def _see(self, stage: CutStrategy, view: Sequence[Message]) -> CutStrategy:
        """A copy of a stage that looks at ``view``, with this pipeline's counts."""
        twin = stage.snapshot(LookaheadState())
        twin.main = self.main_with(view)
        twin.model = self.model
        return twin

    def _through(self, history: Sequence[Message]) -> tuple[list[Message], int]:
        """The view that the due earlier stages leave, and how far they reach (0: none acted)."""
        view, covered = list(history), 0
        for stage in self.front:
            seen = self._see(stage, view)
            if seen.should_commit():
                done = seen.commit(view)
                assert done is not None
                view, covered = [*done.head, *view[done.covered :]], max(covered, done.covered)
        return view, covered

    def _ahead(self, history: Sequence[Message]) -> tuple[list[Message], Prediction | None]:
        """The same for the next commit, as predicted."""
        view, found = list(history), None
        for stage in self.front:
            seen = self._see(stage, view)
            prediction = seen.predict(view)
            if prediction is None:
                continue
            lead = leading_system(view)
            rewritten = seen.rewrite(view[lead : prediction.cut])
            assert isinstance(rewritten, list)
            view = [*view[:lead], *rewritten, *view[prediction.cut :]]
            if found is None or prediction.cut > found.cut:
                found = prediction
        return view, found

    def _last_will_act(self, last: CutStrategy) -> bool:
        """Whether the last stage's trigger will be reached on what the earlier ones will leave by then."""
        if last.hard is None or not self.front:
            return True
        first = min((s.hard for s in self.front if s.hard is not None), default=0)
        if self.tokens >= first:
            return True  # what the earlier stages have left grows on from here
        return last.tokens + max(first - self.tokens, self.growth.still_to_come(self.tokens)) >= last.hard
