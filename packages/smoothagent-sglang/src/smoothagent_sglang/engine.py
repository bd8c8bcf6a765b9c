"""What differs between the SGLang versions that are supported, and what they cannot do."""

from __future__ import annotations

import importlib
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
    for cannot, why in (
        (req.return_logprob, "it wants log probabilities"),
        (req.multimodal_inputs is not None, "it has images or sound"),
        (req.input_embeds is not None, "it has input embeddings"),
        (req.session is not None, "it belongs to a session"),
        (req.grammar is not None or req.return_hidden_states, "it has a grammar, or wants hidden states"),
    ):
        if cannot:
            return why
    return None


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
