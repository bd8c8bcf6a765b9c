"""What differs between the SGLang versions that are supported, and what they cannot do."""

from __future__ import annotations

import heapq
import importlib
from collections.abc import Callable, Hashable
from typing import Any

from smoothagent_sglang.latency import Load

OLDEST, NEWEST = (0, 5, 9), (0, 5, 23)
"""Versions that were tested; others between them are taken to be alike."""

_CACHES = ("RadixCache", "UnifiedRadixCache")


def module(name: str) -> Any:
    """A module of SGLang's server, which this package does not depend on."""
    return importlib.import_module(f"sglang.srt.{name}")


def version_of(text: str) -> tuple[int, ...]:
    """``0.5.10.post1`` as (0, 5, 10)."""
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def refused_version(text: str) -> str | None:
    """Why a version is not supported; None where it is."""
    if OLDEST <= version_of(text) <= NEWEST:
        return None
    low, high = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    return f"SGLang {text} is outside the versions {low} to {high} that this scheduler was tested with"


def refused_server(scheduler: Any) -> str | None:
    """Why lookahead work cannot be scheduled on this server; None where it can."""
    args = scheduler.server_args
    tree = scheduler.tree_cache
    cache = type(tree).__name__
    hybrid = any(getattr(tree, name, bool)() for name in ("supports_mamba", "supports_swa"))
    for refused, why in (
        (args.disable_radix_cache, "--disable-radix-cache is set, so that nothing can be warmed"),
        (cache not in _CACHES or hybrid, f"its prefix cache is a {cache}; tested: {', '.join(_CACHES)}, not hybrid"),
        (scheduler.disaggregation_mode.value != "null", "it prefills or decodes alone, which is not supported yet"),
        (args.tp_size > 1, "it has several tensor-parallel ranks, which is not supported yet"),
        (args.pp_size > 1, "it has several pipeline stages"),
        (args.dp_size > 1, "it has several data-parallel ranks"),
        (not scheduler.spec_algorithm.is_none(), "it decodes speculatively"),
        (args.chunked_prefill_size is None or args.chunked_prefill_size <= 0, "chunked prefill is off"),
        (not scheduler.is_generation, "it serves an embedding model"),
    ):
        if refused:
            return why
    return None


def ordinary(req: Any) -> str | None:
    """Why a request cannot be computed in pieces, so that it runs as any other; None where it can."""
    for name, why in _WHOLE:
        if getattr(req, name, None):
            return why
    return None


_WHOLE = (
    ("return_logprob", "it wants log probabilities"),
    ("multimodal_inputs", "it has images or sound"),
    ("input_embeds", "it has input embeddings"),
    ("positional_embed_overrides", "it has input embeddings"),
    ("session", "it belongs to a session"),
    ("session_id", "it belongs to a session"),
    ("grammar", "it has a grammar"),
    ("custom_logit_processor", "it has a logit processor"),
    ("return_hidden_states", "it wants hidden states"),
    ("beam_group", "it is a beam search"),
)
"""What a request has that cannot be had in pieces; not every version has each."""


# ---- requests ----------------------------------------------------------------------------------


def prefix_len(req: Any) -> int:
    """Tokens that were found in the cache; as of ``init_next_round_input``."""
    return int(req.prefix_len) if hasattr(req, "prefix_len") else len(req.prefix_indices)


def extend_len(req: Any) -> int:
    """Tokens of an admitted request that the next batch computes."""
    return int(req.extend_len) if hasattr(req, "extend_end") else int(req.extend_input_len)


def lock(tree: Any, node: Any) -> Any:
    """Keep a prefix from eviction; returns what `unlock` takes."""
    if hasattr(tree, "lock"):
        return tree.lock(node)
    tree.inc_lock_ref(node)
    return node


def unlock(tree: Any, held: Any) -> None:
    """Let a prefix go."""
    if held is None:
        return
    if hasattr(tree, "unlock"):
        tree.unlock(held)
    else:
        tree.dec_lock_ref(held)


def pool(scheduler: Any) -> dict[str, int]:
    """Where the tokens of the KV pool are."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return {
        "pool_tokens": int(scheduler.max_total_num_tokens),
        "free_tokens": int(allocator.available_size()),
        "evictable_tokens": int(tree.evictable_size()),
        "protected_tokens": int(tree.protected_size()),
    }


def node_key(node: Any) -> Hashable:
    """What tells a node of the cache apart: newer caches have numbers for nodes, older ones objects."""
    return node if isinstance(node, int) else id(node)


def evict(tree: Any, tokens: int, may_go: Callable[[Hashable], bool]) -> list[Hashable]:
    """Evict leaves of the cache that may go, the least recently used first, until as many tokens are free.

    As ``RadixCache.evict`` and ``UnifiedRadixCache._evict_components`` do it, passing over all others.

    Args:
        tree: SGLang's prefix cache.
        tokens: how many.
        may_go: asked with `node_key` of nodes that are leaves and not locked.

    Returns:
        The keys of what was evicted; fewer tokens than asked for where no more may go.
    """
    return _evict_unified(tree, tokens, may_go) if hasattr(tree, "tree_core") else _evict_radix(tree, tokens, may_go)


def _evict_radix(tree: Any, tokens: int, may_go: Callable[[Hashable], bool]) -> list[Hashable]:
    gone, freed, allocator = list[Hashable](), 0, tree.token_to_kv_pool_allocator
    leaves = [(node.last_access_time, id(node), node) for node in tree.evictable_leaves if may_go(id(node))]
    heapq.heapify(leaves)
    while leaves and freed < tokens:
        node = heapq.heappop(leaves)[2]
        if hasattr(allocator, "free_segment"):
            allocator.free_segment(node.value, start_pos=0)
        else:
            allocator.free(node.value)
        freed += len(node.value)
        tree._delete_leaf(node)
        record = tree.kv_events.record_remove if hasattr(tree, "kv_events") else tree._record_remove_event
        record(node)
        gone.append(id(node))
        parent = node.parent
        if not parent.children and not parent.lock_ref and may_go(id(parent)):
            heapq.heappush(leaves, (parent.last_access_time, id(parent), parent))
    return gone


def _evict_unified(tree: Any, tokens: int, may_go: Callable[[Hashable], bool]) -> list[Hashable]:
    gone, before, seen = list[Hashable](), int(tree.evictable_size()), set[int]()
    kind, tracker = tree.tree_components[0], dict.fromkeys(tree.tree_components, 0)
    tree.tree_core.evict_device_start(kind, before)
    try:
        while before - int(tree.evictable_size()) < tokens:
            node, progress = tree._evict_device_next_node(kind, tracker)
            if node is None:
                if not progress:
                    break
            elif node in seen:
                break  # it goes no further while this one stays
            elif may_go(node):
                tree._evict_device_leaf(node, tracker)
                gone.append(node)
            else:
                seen.add(node)
    finally:
        tree.tree_core.evict_device_end(kind)
    return gone


# ---- batches -----------------------------------------------------------------------------------


def batch_load(batch: Any) -> Load:
    """What a batch's time depends on; to be read before it runs."""
    if not batch.forward_mode.is_extend():
        lengths = batch.seq_lens_cpu
        context = int(lengths.sum()) if lengths is not None else sum(r.seqlen for r in batch.reqs)
        return Load(batch.batch_size(), context, 0)
    prefixes, extends = list(batch.prefix_lens), list(batch.extend_lens)
    decodes = len(batch.decoding_reqs or ())
    chunks = len(prefixes) - decodes
    pairs = sum(q * p + q * (q + 1) // 2 for p, q in zip(prefixes[:chunks], extends[:chunks], strict=True))
    return Load(sum(extends), sum(prefixes[chunks:]) + decodes, pairs)


def running_load(running: Any) -> Load:
    """The decode step of the running batch."""
    reqs = running.reqs
    return Load(len(reqs), sum(len(r.origin_input_ids) + len(r.output_ids) for r in reqs), 0)


def updated(answer: type[Any]) -> Any:
    """``SetInternalStateReqOutput`` of either version."""
    try:
        return answer(updated=True, server_args={})
    except TypeError:
        return answer(updated=True)
