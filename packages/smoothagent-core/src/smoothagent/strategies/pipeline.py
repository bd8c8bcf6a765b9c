"""Strategies one after the other: typically offload, then summarize."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from smoothagent.errors import ConfigurationError
from smoothagent.message import Message, leading_system
from smoothagent.prompt import Prompt
from smoothagent.state import LookaheadState
from smoothagent.strategy import Commit, CutStrategy, LookaheadStrategy, Model, Prediction


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

    def should_commit(self) -> bool:
        """Whether any stage's trigger is reached on what reaches it."""
        view, acted = self._through(self.main.messages)
        return acted > 0 or self._see(self.last, view).should_commit()

    def predict(self, history: Sequence[Message]) -> Prediction | None:
        """The last stage's prediction if it will act at the next commit, else that of the stages before."""
        view, front = self._ahead(history)
        last = self._see(self.last, view)
        prediction = last.predict(view)
        if prediction is not None and self._last_will_act(last):
            return prediction
        return front

    def should_lookahead(self) -> bool:
        """Something will be committed that is not prepared yet."""
        prediction = self.predict(self.main.messages)
        prepared = self.la.last_segment_end
        if prediction is None or (self.la.strategy_data.get("last") and not self.exact):
            return False
        return prediction.tail or prediction.cut > prepared

    def transform(self) -> Awaitable[None] | None:
        """Run the stages that the next commit will need."""
        view, front = self._ahead(self.main.messages)
        last = self._see(self.last, view)
        if front is not None and not self._last_will_act(last):
            self.la = LookaheadState(list(view[: front.cut]), front.cut, {"tail": front.tail})
            return None
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

    def commit(self, history: Sequence[Message]) -> Commit | None:
        """Earlier stages computed anew, the last one as prepared (or computed, if model-free)."""
        view, covered = self._through(history)
        last = self._see(self.last, view)
        if not last.should_commit():
            return Commit(covered, view[:covered]) if covered else None
        if not self.exact and not self.la.strategy_data.get("last"):
            return None
        last.la = self.la
        done = last.commit(view)
        if done is None or done.covered >= covered:
            return done
        return Commit(covered, [*done.head, *view[done.covered : covered]])

    def tail_fits(self, tail_tokens: int, view_tokens: int) -> str:
        """As the last stage says, if it takes part."""
        return self.last.tail_fits(tail_tokens, view_tokens) if self.la.strategy_data.get("last") else "ok"

    def check(self, prompt: Prompt) -> None:
        """Refuse what any stage refuses."""
        for stage in (*self.front, self.last):
            stage.check(prompt)

    def bind(self, model: Model | None) -> None:
        """Hand the model to all stages."""
        super().bind(model)
        for stage in (*self.front, self.last):
            stage.bind(model)

    def _see(self, stage: CutStrategy, view: Sequence[Message]) -> CutStrategy:
        """A copy of a stage that looks at ``view``, with this pipeline's counts."""
        twin = stage.snapshot(LookaheadState())
        twin.main = self.main_with(view)
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
        coming = max(first - self.tokens, self.growth.still_to_come(self.tokens))
        return last.tokens + coming >= last.hard
