"""Other tools' formulas, for the same points. Each returns the bytes that the tool would say, summed over GPUs."""

from collections.abc import Callable

from aimgpu.sizing.model import Architecture
from aimgpu.sizing.weights import weight_bytes
from benchmarks.sizing.points import GIB, Point

_ACCELERATE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "awq": 4, "nf4": 4}


def weights_only(point: Point) -> float:
    return weight_bytes(point.model, point.quant)


def weights_and_a_fifth(point: Point) -> float:
    return 1.2 * weight_bytes(point.model, point.quant)


def gpustack(point: Point) -> float:
    """GPUStack v2: 1.2 x weights + 2 GiB; context and batch do not enter."""
    return 1.2 * weight_bytes(point.model, point.quant) + 2 * GIB


def ollama(point: Point) -> float:
    """Ollama's predictor: file size and an fp16 cache with hidden size / heads for the head size."""
    shape = _shape(point)
    cache = 2 * shape.layers * shape.kv_heads * (shape.hidden_size // shape.heads) * point.request.context * 2
    return weight_bytes(point.model, point.quant) + cache


def hf_mem(point: Point) -> float:
    """hf-mem --experimental: safetensors bytes and the KV cache."""
    shape = _shape(point)
    return (
        weight_bytes(point.model, point.quant) + 2 * shape.layers * shape.kv_heads * shape.head_dim * point.request.context * 2
    )


def accelerate(point: Point) -> float:
    """`accelerate estimate-memory`: every parameter at the wanted bits."""
    return point.model.parameters * _ACCELERATE_BITS.get(point.quant, 16) / 8


def _shape(point: Point) -> Architecture:
    if point.model.architecture is None:
        raise ValueError(point.model.name)
    return point.model.architecture


PEERS: dict[str, Callable[[Point], float]] = {
    "weights only": weights_only,
    "weights x 1.2": weights_and_a_fifth,
    "GPUStack": gpustack,
    "Ollama": ollama,
    "hf-mem": hf_mem,
    "accelerate": accelerate,
}
