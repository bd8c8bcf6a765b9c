"""What no measurement can be below: the roofline of a device for a model's shape."""

from __future__ import annotations

from typing import NamedTuple

from smoothagent_sglang.errors import ProfileError
from smoothagent_sglang.latency import BatchLatency

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


class Device(NamedTuple):
    """What a device can do at most, by its data sheet.

    Attributes:
        name: as the data sheet has it.
        flops: dense floating-point operations a second, in the model's data type.
        bytes: that its memory moves a second.
    """

    name: str
    flops: float
    bytes: float


class Shape(NamedTuple):
    """A dense transformer with grouped-query attention and a gated MLP.

    Attributes:
        name: the model's.
        layers: how many.
        hidden: size of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head: size of a head.
        mlp: intermediate size of the MLP.
        vocabulary: tokens.
        dtype: of weights and KV cache, as ``bfloat16``.
        tensor_parallel: ranks that share the work.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocabulary: int
    dtype: str = "bfloat16"
    tensor_parallel: int = 1

    @property
    def weights(self) -> float:
        """Parameters of the dense layers that every token passes, of one rank; without embeddings."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) / self.tensor_parallel

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return _BYTES[self.dtype]


QWEN3_8B = Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936)
QWEN3_32B = Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936)


def floor(device: Device, shape: Shape, tokens: int) -> float:
    """Seconds below which no batch of so many tokens can be: its operations, or the weights read once."""
    return max(2 * shape.weights * tokens / device.flops, shape.weights * shape.size / device.bytes)


def check(model: BatchLatency, device: Device, shape: Shape) -> None:
    """Refuse what is quicker than the device can be.

    Raises:
        ProfileError: naming the first entry, or the coefficient.
    """
    for tokens, seconds in model.table:
        least = floor(device, shape, tokens)
        if seconds < least:
            raise ProfileError(
                f"entry ({tokens} tokens, {seconds:.3g} s) of the latency table is below what {device.name} needs for "
                f"{shape.name} at the least, {least:.3g} s: it is another model's or device's, or was timed before the "
                "device had finished; profile again"
            )
    share = shape.layers / shape.tensor_parallel
    read = 2 * share * shape.kv_heads * shape.head * shape.size / device.bytes
    attended = 4 * share * shape.heads * shape.head / device.flops
    for name, value, least in (("decode", model.decode, read), ("prefill", model.prefill, attended)):
        if value < least:
            raise ProfileError(
                f"the coefficient {name!r} of the latency profile, {value:.3g} s, is below what {device.name} needs "
                f"for {shape.name} at the least, {least:.3g} s: profile again, with longer contexts"
            )
