"""What PyTorch's caching allocator counts beyond the bytes of a tensor."""

from fractions import Fraction

from aimgpu.sizing.model import Architecture
from aimgpu.units import MIB

_LARGE = 10 * MIB  # from here on a tensor gets a segment of its own
_SEGMENT = 2 * MIB  # segments are multiples of this
_LEAST_REST = 1 * MIB  # a smaller rest is not split off, and counts as allocated


def rounding_bytes(architecture: Architecture, bytes_per_weight: Fraction) -> int:
    """The rests of all weight matrices, if each was allocated alone: 43 MiB, say, counts as 44."""
    hidden = architecture.hidden_size
    heads, kv_heads = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    inner = architecture.expert_intermediate_size if architecture.experts else architecture.intermediate_size
    attention = 2 * _rest(round(hidden * heads * bytes_per_weight)) + 2 * _rest(round(hidden * kv_heads * bytes_per_weight))
    feed_forward = 3 * max(architecture.experts, 1) * _rest(round(hidden * inner * bytes_per_weight))
    tables = (1 if architecture.tied_embeddings else 2) * _rest(architecture.embedding_parameters * 2)
    return architecture.layers * (attention + feed_forward) + tables


def _rest(size: int) -> int:
    rest = -size % _SEGMENT
    return rest if size >= _LARGE and rest <= _LEAST_REST else 0
