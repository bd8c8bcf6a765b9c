"""Lookahead requests in SGLang's scheduler: held beside its queue, computed in pieces behind everything else.

SGLang finishes a chunked prefill before it begins another, so a lookahead request in its own queue would keep live
requests waiting. Here it is never in that queue: each step may carry a piece of it, as a request of its own (a child)
over the tokens up to the piece's end. The child's KV goes into the prefix cache, where the next piece finds it; the
last piece is the client's own request, which answers.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from smoothagent_sglang import engine, policy
from smoothagent_sglang.asked import Asked
from smoothagent_sglang.held import Held, is_child
from smoothagent_sglang.latency import Load, chunk
from smoothagent_sglang.learning import Learner
from smoothagent_sglang.owned import Node, Owned, begins_alike
from smoothagent_sglang.policy import Candidate, Sizes, Waiting
from smoothagent_sglang.settings import Settings

_NO_DEADLINE = 600.0
"""Seconds that a request without a deadline is taken to have."""
_FIRST = 64
"""Tokens of a piece while the server's times are not known."""
_AT_ONCE = 8
"""Lookahead requests that are computed by turns; more wait, so that some are ready early."""
_DELTA, _W = 4.0, 6.0
"""δ and w in decode steps, where they are not set."""


@dataclass(eq=False)
class Lease:
    """A prefix that is kept after its request has ended.

    Attributes:
        lock: the cache's.
        ids: the tokens of the prefix.
        nodes: of these, that lookahead work has made.
        until: when it ends, on the scheduler's clock.
    """

    lock: Any
    ids: Any
    nodes: list[Hashable]
    until: float


class BestEffort:
    """The lookahead requests of one scheduler.

    Args:
        scheduler: SGLang's.
        settings: the operator's.
        learner: knows how long batches take.
        clock: seconds; for tests.

    Attributes:
        counts: what was done, by name.
    """

    def __init__(
        self, scheduler: Any, settings: Settings, learner: Learner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler, self._settings, self._learner, self._clock = scheduler, settings, learner, clock
        page = int(scheduler.page_size)
        size = int(scheduler.chunked_prefill_size)
        self._sizes = Sizes(size, min(settings.piece or size, size), max(16, page), page)
        # Lists, since SGLang lets two requests have one rid.
        self._held: list[Held] = []
        self._leaving: list[Held] = []
        self._answering: list[Held] = []
        self._leases: list[Lease] = []
        self._owned = Owned()
        self._at_once = _AT_ONCE
        self._offered: dict[int, Held] = {}
        self._running = Load()
        self._mixed = False
        self._beside = Load()
        self._decode_is_due = False
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    # ---- coming and going ----------------------------------------------------------------------

    def take(self, req: Any, asked: Asked) -> None:
        """Hold a request."""
        now = self._clock()
        deadline = now + (asked.deadline if asked.deadline < math.inf else _NO_DEADLINE)
        self._held.append(Held(req, asked.number, deadline, now))
        self.counts["requests"] += 1

    def promote(self, number: object) -> bool:
        """Make a lookahead request a live one, where it stands; False where there is none of that number."""
        found = [h for h in self._held if h.number == number]
        for held in found:
            self._held.remove(held)
            # It has waited longer than all that came after it. What it has is kept until it runs.
            self._scheduler.waiting_queue.insert(0, held.req)
            self._leaving.append(held)
            held.without_own_hits()
            self.counts["promoted"] += 1
        return bool(found)

    def abort(self, rid: str, *, everything: bool) -> None:
        """Hand what is to be aborted to SGLang's queue, which answers the client."""
        for held in list(self._held):
            if everything or held.req.rid.startswith(rid):
                self._held.remove(held)
                self._note_last(held)
                self._give_up(held)
                self._scheduler.waiting_queue.append(held.req)
                self.counts["aborted"] += 1

    def surrender(self) -> Any:
        """Hand everything to SGLang, as if there had never been a class; returns the scheduler."""
        queue = self._scheduler.waiting_queue
        for held in self._held:
            if not any(req is held.req for req in queue):
                queue.append(held.req)
        every = [*self._held, *self._leaving, *self._answering]
        self._held, self._leaving, self._answering, self._offered = [], [], [], {}
        for held in every:
            engine.unlock(self._scheduler.tree_cache, held.lease)
        for lease in self._leases:
            engine.unlock(self._scheduler.tree_cache, lease.lock)
        self._leases = []
        return self._scheduler

    # ---- a step --------------------------------------------------------------------------------

    def offer(self, running: Any) -> list[Any]:
        """The requests that could have a piece in the step that is being formed; they go last in SGLang's queue."""
        self._offered = {}
        self.let_go()
        if not self._held:
            return []
        self._running = engine.running_load(running)
        self._mixed = bool(self._scheduler.is_mixed_chunk) and not running.return_logprob
        self._beside = Load()
        if self._running.tokens and not self._mixed and self._decode_is_due:
            return []  # one piece between two decode steps
        if not self._may_run():
            return []
        for held in sorted(self._held, key=lambda h: h.urgency):
            if held.under_way:
                continue  # under overlap its KV is not in the cache yet
            if not self._begin(held):
                continue
            held.piece = None
            self._look_up(held)
            self._offered[id(held.req)] = held
            if len(self._offered) == policy.HEADS:
                break
        return [held.req for held in self._offered.values()]

    def is_offered(self, req: Any) -> bool:
        """Whether a request in SGLang's queue is one of these."""
        return id(req) in self._offered

    def admit(self, adder: Any, add: Callable[[Any], Any], req: Any, results: Any) -> Any:
        """SGLang has come to an offered request: let it have a piece, if one fits.

        Args:
            adder: SGLang's ``PrefillAdder``, with what it has admitted before.
            add: its own ``add_one_req``.
            req: the request.
            results: ``AddReqResult``.
        """
        held = self._offered[id(req)]
        # One before it in this step may have needed its room.
        tokens = self._fitting(adder, held) if held.begun else 0
        if not tokens:
            return results.OTHER
        last = held.prefix + tokens == held.tokens
        if last and not self._may_answer(held):
            tokens = self._whole_pages(held, tokens - 1)
            last = False
            if not tokens:
                return results.OTHER
        chosen = req if last else held.child(self._scheduler, held.prefix + tokens)
        chosen.init_next_round_input(self._scheduler.tree_cache)
        outcome = add(chosen)
        if not any(r is chosen for r in adder.can_run_list):
            self.counts["refused"] += 1
            return results.OTHER
        assert adder.new_chunked_req is not chosen, "a piece must never be SGLang's chunked request"
        self._began(held, chosen, tokens)
        # NO_TOKEN would close the batch for live requests, too.
        return outcome if outcome == results.CONTINUE else results.OTHER

    def settle(self) -> None:
        """The step is formed: what was not admitted as a whole is held again."""
        queue = self._scheduler.waiting_queue
        if any(id(req) in self._offered for req in queue):
            self._scheduler.waiting_queue = [req for req in queue if id(req) not in self._offered]
        self._offered = {}

    def ran(self, batch: Any, load: Load, seconds: float) -> None:
        """A batch took so long."""
        extend = batch.forward_mode.is_extend()
        if not extend or getattr(batch, "decoding_reqs", None):
            self._decode_is_due = False
        self._learner.observe(load, seconds)

    def _begin(self, held: Held) -> bool:
        """Whether a request has its turn: those that have begun must all find room, or none would ever end."""
        if not held.begun:
            begun = [h for h in self._held if h.begun]
            room = self._cap - sum(h.needs for h in begun)
            held.begun = not begun or (len(begun) < self._at_once and held.needs <= room)
        return held.begun

    def _make_way(self, held: Held) -> bool:
        """Have the least urgent of those that have begun give up what it has; False where there is no other."""
        # Not one that has a piece in this step, or under way: what comes of it is not known yet.
        others = [h for h in self._held if h.begun and h is not held and not h.under_way]
        if not others:
            return False
        last = max(others, key=lambda h: h.urgency)
        self._note_last(last)
        self._give_up(last)
        last.begun, last.prefix, last.start, last.urgency = False, 0, -1, -math.inf
        # Live requests have filled the pool: fewer at once, until one has ended.
        self._at_once = max(1, sum(h.begun for h in self._held))
        self.counts["gave_way"] += 1
        return True

    # ---- inside a step -------------------------------------------------------------------------

    def _may_run(self) -> bool:
        """Whether there could be room at all, before the cache is searched."""
        model = self._learner.latency
        if model is None:
            return not self._running.tokens and not self._scheduler.waiting_queue
        base, limit = self._bound(Load(), ())
        return model.estimate(base) < limit

    def _bound(self, chunks: Load, waiting: tuple[Waiting, ...]) -> tuple[Load, float]:
        model, settings = self._learner.latency, self._settings
        assert model is not None
        step = model.gemm(1)
        spare = math.inf
        if waiting or chunks.tokens:
            spare = -1.0 if settings.ttft is None else policy.slack(model, waiting, self._clock(), self._sizes)
        return policy.bound(
            model,
            self._running,
            chunks,
            spare,
            tbt=settings.tbt or _DELTA * step,
            be_step=settings.be_step or _W * step,
            mixed=self._mixed,
        )

    def _fitting(self, adder: Any, held: Held) -> int:
        """Tokens of the piece that this request may have in this step."""
        room = self._sizes.chunk if adder.rem_chunk_tokens is None else int(adder.rem_chunk_tokens)
        room = self._room(held, min(room, held.tokens - held.prefix + self._sizes.page))
        if room <= 0:
            return 0
        live = [r for r in adder.can_run_list if not self._is_ours(r)]
        rest = held.tokens - held.prefix
        candidate = Candidate(held.urgency, rest, held.prefix)
        model = self._learner.latency
        if model is None:
            tokens = min(rest, _FIRST, room) if not live else 0
            return tokens if tokens == rest else self._whole_pages(held, tokens)
        chunks = Load()
        for r in live:
            chunks = chunks.plus(chunk(engine.extend_len(r), engine.prefix_len(r)))
        base, limit = self._bound(chunks, self._waiting(live))
        return policy.fitting(model, base.plus(self._beside), candidate, limit, self._sizes, room)

    def _waiting(self, live: list[Any]) -> tuple[Waiting, ...]:
        """Live requests whose first token is due: those in this step, and those that still wait."""
        ttft = self._settings.ttft
        if ttft is None:
            return ()
        queue = [r for r in self._scheduler.waiting_queue if id(r) not in self._offered and r not in live]
        return tuple(
            Waiting(
                _arrival(r, self._clock()) + ttft, len(r.origin_input_ids) - engine.prefix_len(r), engine.prefix_len(r)
            )
            for r in [*live, *queue]
        )

    def _whole_pages(self, held: Held, tokens: int) -> int:
        page = self._sizes.page
        return max(0, (held.prefix + tokens) // page * page - held.prefix)

    def _is_ours(self, req: Any) -> bool:
        return id(req) in self._offered or is_child(req)

    @property
    def _cap(self) -> int:
        return int(self._settings.share * self._scheduler.max_total_num_tokens)

    def _room(self, held: Held, wanted: int) -> int:
        """Tokens that a piece may add to the cache, whole pages: of what is free, and of what is our own and unneeded.

        What others have cached is never evicted for a piece. The oldest leases end where ours is too much.
        """
        # One that needs more than that alone may have it, of what is free.
        cap = max(self._cap, held.needs + self._sizes.page)
        allocator, page = self._scheduler.token_to_kv_pool_allocator, self._sizes.page
        # A page for each decode that goes on beside it, and those that the piece itself may begin.
        reserve = page * (self._running.tokens + 2)
        while True:
            free = min(cap - self._owned.tokens, int(allocator.available_size()) - reserve)
            if free >= wanted:
                break
            if self._owned.free(wanted - free, functools.partial(engine.evict, self._scheduler.tree_cache)):
                self.counts["evictions"] += 1
            elif self._leases:
                self._end_lease(self._leases[0], "crowded_out")
            elif free >= min(wanted, self._sizes.least) or not self._make_way(held):
                break
        return max(0, min(free, wanted)) // page * page

    def _may_answer(self, held: Held) -> bool:
        """Whether one more may decode beside the live requests."""
        if not held.decodes:
            return True
        if sum(h.decodes for h in self._answering) >= self._settings.be_decodes:
            return False
        model = self._learner.latency
        if model is None:
            return False
        with_it = self._running.plus(Load(1, held.tokens, 0))
        return model.estimate(with_it) <= (self._settings.tbt or _DELTA * model.gemm(1))

    def _look_up(self, held: Held) -> None:
        """Find how much of it is in the cache, and keep that there."""
        tree = self._scheduler.tree_cache
        held.req.init_next_round_input(tree)
        before, known, held.prefix = held.lease, held.prefix, engine.prefix_len(held.req)
        held.lease = engine.lock(tree, held.req.last_node) if held.prefix else None
        engine.unlock(tree, before)  # after the new one, so that it is never without
        if held.start < 0:
            held.start = held.prefix
            self._owned.used(held.req.origin_input_ids, held.prefix, live=False)
        elif held.prefix > known:
            self._note(held, held.req.last_node, known, held.prefix)
        model = self._learner.latency
        if model is not None:
            rest = Candidate(0.0, held.tokens - held.prefix, held.prefix)
            held.urgency = policy.urgency(model, rest, held.deadline, held.arrival, self._sizes, self._settings.aging)

    def _began(self, held: Held, chosen: Any, tokens: int) -> None:
        self._beside = self._beside.plus(chunk(tokens, held.prefix))
        self._decode_is_due = True
        self.counts["pieces"] += 1
        self.counts["tokens"] += tokens
        if chosen is held.req:
            self._held.remove(held)
            self._answering.append(held)
            self._at_once = min(_AT_ONCE, self._at_once + 1)
            held.without_own_hits()
        else:
            held.piece = chosen
            held.pieces += 1

    def _note(self, held: Held, node: Any, begin: int, end: int) -> None:
        """A piece of its own is in the cache: from ``begin`` on, since what was there before is another's."""
        ids = held.req.origin_input_ids
        if any(begins_alike(r.origin_input_ids, ids, begin + 1) for r in self._live()):
            self._owned.drop_all(held.nodes)
            return  # a live request computes the same, and will go on from it
        key = engine.node_key(node)
        parent = held.nodes[-1] if held.nodes else None
        self._owned.add(key, Node(node, parent, ids, begin, end))
        if key in self._owned:
            self._owned.keep([key])
            held.nodes.append(key)

    def _live(self) -> list[Any]:
        """Live requests that wait or run."""
        scheduler = self._scheduler
        batches = [b.reqs for b in (scheduler.running_batch, scheduler.last_batch) if b is not None]
        chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
        every = [*scheduler.waiting_queue, *(r for reqs in batches for r in reqs), *chunked]
        answering = {id(h.req) for h in self._answering}
        return [r for r in every if not self._is_ours(r) and id(r) not in answering]

    def _note_last(self, held: Held) -> None:
        """Before it goes: its last piece may not have been looked up yet, or not have ended."""
        if held.piece is None:
            return
        if not held.under_way:
            self._look_up(held)
        else:
            self._owned.drop_all(held.nodes)  # what comes behind them will not be known
        held.piece = None

    def _give_up(self, held: Held) -> None:
        """Nothing is kept for it any more."""
        engine.unlock(self._scheduler.tree_cache, held.lease)
        self._owned.let_go(held.nodes)
        held.lease, held.nodes = None, []

    # ---- leases --------------------------------------------------------------------------------

    def committed(self, req: Any) -> None:
        """A live request runs: where it goes on from a warmed prefix, that is now its own."""
        cached, ids = engine.prefix_len(req), req.origin_input_ids
        for lease in list(self._leases):
            if len(lease.ids) <= cached and begins_alike(ids, lease.ids, len(lease.ids)):
                self._end_lease(lease, "committed")
        self._owned.used(ids, cached, live=True)

    def let_go(self) -> None:
        """End what is over: promoted requests that run, answers that are whole, leases."""
        queue = self._scheduler.waiting_queue
        for held in list(self._leaving):
            if not any(r is held.req for r in queue):
                self._give_up(held)
                self._leaving.remove(held)
        for held in list(self._answering):
            if held.req.finished():
                self._answering.remove(held)
                self._lease(held)
        now = self._clock()
        for lease in list(self._leases):
            if lease.until <= now:
                self._end_lease(lease, "expired")

    def _lease(self, held: Held) -> None:
        tree, seconds = self._scheduler.tree_cache, self._settings.lease
        if held.decodes or held.was_aborted:
            self._owned.drop_all(held.nodes)  # an answer stands behind them
        elif seconds > 0:
            whole = held.child(self._scheduler, held.tokens)
            # One more, since of a prompt all but its last token is looked for.
            whole.origin_input_ids = whole.origin_input_ids + whole.origin_input_ids[:1]
            whole.init_next_round_input(tree)
            tokens = engine.prefix_len(whole)
            if tokens:
                if tokens > held.prefix:
                    self._note(held, whole.last_node, held.prefix, tokens)
                self._owned.keep(held.nodes)
                lock, ids = engine.lock(tree, whole.last_node), whole.origin_input_ids[:tokens]
                self._leases.append(Lease(lock, ids, list(held.nodes), self._clock() + seconds))
        self._give_up(held)

    def _end_lease(self, lease: Lease, why: str) -> None:
        self._leases.remove(lease)
        engine.unlock(self._scheduler.tree_cache, lease.lock)
        self._owned.let_go(lease.nodes)
        self.counts[f"leases_{why}"] += 1

    def flushing(self) -> None:
        """The cache may be about to be flushed, after which none of its locks may be given back."""
        self.let_go()
        for lease in list(self._leases):
            self._end_lease(lease, "flushed")

    def flushed(self) -> None:
        """It was."""
        self._owned = Owned()

    def state(self) -> dict[str, Any]:
        """What the server tells of it."""
        model = self._learner.latency
        return {
            **self.counts,
            "held": len(self._held),
            "answering": len(self._answering),
            "leases": len(self._leases),
            "own_tokens": self._owned.tokens,
            "decode_step_seconds": None if model is None else model.gemm(1),
            "batches": self._learner.batches,
            **engine.pool(self._scheduler),
        }


def _arrival(req: Any, now: float) -> float:
    """When a live request came, on the scheduler's clock."""
    seen = getattr(req, "_smoothagent_arrival", None)
    return float(seen) if seen is not None else now
