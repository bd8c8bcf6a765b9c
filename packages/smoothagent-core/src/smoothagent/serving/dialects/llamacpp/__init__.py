"""llama.cpp's HTTP server: exact token ids, one slot a stream, KV copied between slots.

What was found on the server (build of 2026-10, xllamacpp):

- A request that is not streamed runs to its end though its client has gone; a streamed one stops when
  a write fails. So everything is streamed, with ``return_progress``, which writes after every batch
  of a prefill, too. Its first event tells what is cached before anything is computed.
- While a character is incomplete, its tokens are missing in the stream; ``tokens_predicted`` counts them.
- ``id_slot`` out of range is taken modulo the number of slots, without an error.
- A failed ``restore`` empties the slot.
"""

from smoothagent.serving.dialects.llamacpp.dialect import LlamaCpp

__all__ = ["LlamaCpp"]
