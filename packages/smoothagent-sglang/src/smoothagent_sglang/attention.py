"""A quicker extend step for SGLang's ``torch_native`` attention, which servers without a GPU use.

Upstream pads the new queries by the cached prefix's length and computes attention for all of them, so that a cached
prefix saves next to nothing. Here the new queries alone attend to all keys, with a causal mask that begins at the
prefix's end: the same numbers, up to the rounding of the kernels.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from smoothagent_sglang import engine


def apply() -> None:
    """Replace the step where it is plain causal attention; any other goes to upstream's."""
    torch: Any = importlib.import_module("torch")
    owner = engine.module("layers.attention.torch_native_backend").TorchNativeAttnBackend
    original: Any = owner._run_sdpa_forward_extend
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_prefix_lens: Any,
        extend_seq_lens: Any,
        *more: Any,
        scaling: Any = None,
        enable_gqa: bool = False,
        causal: bool = False,
        **named: Any,
    ) -> Any:
        window = named.get("sliding_window_size")
        if (
            not causal
            or any(x is not None for x in more)
            or named.get("encoder_lens") is not None
            or (window or -1) > -1
        ):
            return original(
                self,
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                *(extend_prefix_lens, extend_seq_lens, *more),
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                **named,
            )
        begin = 0
        for i in range(seq_lens.shape[0]):
            new, prefix, total = int(extend_seq_lens[i]), int(extend_prefix_lens[i]), int(seq_lens[i])
            slots = req_to_token[req_pool_indices[i], :total]
            queries = query[begin : begin + new].movedim(0, 1).unsqueeze(0)
            keys = k_cache[slots].movedim(0, 1).unsqueeze(0).to(queries.dtype)
            values = v_cache[slots].movedim(0, 1).unsqueeze(0).to(queries.dtype)
            mask = None
            if prefix and new > 1:
                mask = torch.ones(new, total, dtype=torch.bool).tril(prefix)
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=not prefix and new > 1,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[begin : begin + new] = attended[0].movedim(1, 0)
            begin += new
        return output

    owner._run_sdpa_forward_extend = forward
