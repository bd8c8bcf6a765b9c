"""What becomes of a lookahead request that is held: promoted, aborted, offered, handed back.

SGLang itself is a stand-in here; `scripts/check_sglang.py` has the real one.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from smoothagent_sglang import plugin
from smoothagent_sglang.asked import Asked
from smoothagent_sglang.best_effort import BestEffort
from smoothagent_sglang.latency import BatchLatency
from smoothagent_sglang.learning import Learner
from smoothagent_sglang.settings import Settings

MODEL = BatchLatency(((1, 0.01), (256, 0.05)), 1e-7, 1e-9)


class Tree:
    """A cache that finds nothing, and counts its locks."""

    def __init__(self) -> None:
        self.locks = 0

    def inc_lock_ref(self, node: object) -> None:
        self.locks += 1

    def dec_lock_ref(self, node: object) -> None:
        self.locks -= 1


class Req:
    """A request whose first ``prefix_len`` tokens are cached."""

    def __init__(self, rid: str, tokens: int = 600, cached: int = 100) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, list(range(tokens)), list[int]()
        self.prefix_len, self.last_node = cached, 7
        self.sampling_params = SimpleNamespace(max_new_tokens=0, custom_params=None)
        self.already_computed = 0

    def init_next_round_input(self, tree: Tree) -> None:
        pass


def scheduler() -> Any:
    return SimpleNamespace(
        page_size=1,
        chunked_prefill_size=256,
        waiting_queue=[],
        tree_cache=Tree(),
        policy=SimpleNamespace(),
        is_mixed_chunk=False,
        max_total_num_tokens=10_000,
        running_batch=None,
        last_batch=None,
        chunked_req=None,
    )


def idle() -> Any:
    return SimpleNamespace(reqs=[], return_logprob=False)


def holding(count: int = 3) -> tuple[Any, BestEffort, list[Req]]:
    server = scheduler()
    work = BestEffort(server, Settings(), Learner(MODEL), lambda: 0.0)
    requests = [Req(f"r{i}x") for i in range(count)]
    for i, req in enumerate(requests):
        work.take(req, Asked(i, math.inf))
    return server, work, requests


def test_a_held_request_is_offered_and_its_prefix_kept() -> None:
    server, work, requests = holding()
    assert work.offer(idle()) == requests
    assert server.tree_cache.locks == 3
    server.waiting_queue.extend(requests)
    work.settle()
    assert server.waiting_queue == [], "what was not admitted is held again"
    assert len(work) == 3


def test_a_promoted_one_goes_first_and_keeps_its_prefix_until_it_runs() -> None:
    server, work, requests = holding()
    work.offer(idle())
    work.settle()
    live = Req("live")
    server.waiting_queue.append(live)
    assert work.promote(1)
    assert not work.promote(1)
    assert server.waiting_queue == [requests[1], live]
    assert len(work) == 2
    work.offer(idle())
    assert server.tree_cache.locks == 3
    server.waiting_queue.remove(requests[1])
    work.offer(idle())
    assert server.tree_cache.locks == 2


def test_an_aborted_one_is_sglangs_to_answer() -> None:
    server, work, requests = holding()
    work.offer(idle())
    work.settle()
    work.abort("r1x", everything=False)
    assert server.waiting_queue == [requests[1]]
    work.abort("", everything=True)
    assert len(server.waiting_queue) == 3
    assert server.tree_cache.locks == 0
    assert work.offer(idle()) == []


def test_no_piece_goes_beside_decodes_that_leave_no_room() -> None:
    server, work, _ = holding()
    busy = SimpleNamespace(reqs=[Req("live", tokens=200_000)] * 4, return_logprob=False)
    assert work.offer(busy) == []
    assert server.tree_cache.locks == 0


def test_two_of_one_rid_are_both_held_and_both_answered() -> None:
    """SGLang 0.5.9 lets a client name two requests alike."""
    server, work, _ = holding(0)
    twins = [Req("same"), Req("same")]
    for req in twins:
        work.take(req, Asked(None, math.inf))
    assert work.offer(idle()) == twins
    work.settle()
    work.abort("same", everything=False)
    assert server.waiting_queue == twins
    assert server.tree_cache.locks == 0


@pytest.mark.parametrize("number", ["x", 1.5, float("nan"), 10**30, None])
def test_what_is_no_number_promotes_nobody(number: object) -> None:
    server, work, _ = holding()
    assert not work.promote(number)
    assert len(work) == 3
    assert server.waiting_queue == []


class Pool:
    """No token is free."""

    def available_size(self) -> int:
        return 0


def test_of_those_that_hold_each_other_up_the_least_urgent_gives_way() -> None:
    """Live requests have filled the pool, and each of a few lookahead requests has some of what the others need."""
    server, work, requests = holding()
    server.token_to_kv_pool_allocator = Pool()
    assert work.offer(idle()) == requests
    server.waiting_queue.extend(requests)
    adder = SimpleNamespace(rem_chunk_tokens=256, can_run_list=[], new_chunked_req=None)
    results = SimpleNamespace(CONTINUE="continue", OTHER="other")
    assert work.admit(adder, lambda _: "never", requests[0], results) == "other", "nothing is free"
    assert work.counts["gave_way"] == 2
    assert server.tree_cache.locks == 1, "the others' prefixes are let go"
    assert work.admit(adder, lambda _: "never", requests[1], results) == "other"
    work.settle()
    assert len(work) == 3, "and they are held on"
    assert work.offer(idle()) == [requests[0]], "until one has ended, the others do not begin again"


def test_a_flush_that_may_come_takes_no_lock_along() -> None:
    server, work, requests = holding(1)
    work.offer(idle())
    work.settle()
    work.promote(0)
    server.waiting_queue.remove(requests[0])
    work.flushing()
    assert server.tree_cache.locks == 0


def test_a_fault_hands_all_of_it_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    server, work, requests = holding()
    for owner in (server, server.policy, server.tree_cache):
        owner._smoothagent_best_effort = work
    work.offer(idle())
    server.waiting_queue.append(requests[0])  # as in the middle of a step
    plugin._fail(work, ZeroDivisionError())  # pyright: ignore[reportPrivateUsage]
    work.settle()
    assert sorted(req.rid for req in server.waiting_queue) == ["r0x", "r1x", "r2x"]
    assert server.tree_cache.locks == 0
    assert server._smoothagent_best_effort is None
    assert "ZeroDivisionError" in caplog.text
