"""The scheduler's buffer of llama.cpp: the widest moment of the graph for one micro-batch.

From llama.cpp's source, by build:

- 9410 (#23764) keeps the mask of flash attention in 16 bits.
- 9460 (#23861) lets llama-server reserve logits for one token per slot.
- 9489 (#23907) keeps a 16-bit copy of a quantised layer's keys and values beside the result of flash attention on CUDA and HIP.

The number of tensors of the layer's width beside the feed-forward part is from logs: two to four on a GPU, five on the CPU.
"""

from dataclasses import dataclass
from fractions import Fraction

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.kv import bytes_per_token_and_layer
from aimgpu.sizing.model import Architecture, ModelKind
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.shape import is_gated
from aimgpu.sizing.version import llamacpp_build

HALF_MASK_BUILD = 9410
FEW_OUTPUTS_BUILD = 9460
HALF_COPY_BUILD = 9489
_F32 = 4
_HALF = 2
_MLA_PERCENT = 262  # queries before and after they are widened, and the result, by what the CPU prints for 32 to 128 heads
_GATED_ATTENTION = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen3_next"})  # their queries come with a gate as wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one micro-batch looks at."""

    tokens: int
    slot_cells: int  # of the cache of one sequence
    window_cells: int  # of the same in a layer with a window; 0: there is none
    cells: int  # of all sequences


def compute_term(request: SizingRequest, architecture: Architecture, batch: Batch) -> Term:
    """The compute buffer, by the graph that llama.cpp reserves."""
    graph = _Graph(request, architecture, batch)
    moments = {"logits": graph.logits, "attention": graph.attention, "feed_forward": graph.feed_forward}
    return Term(
        name="activations",
        memory_bytes=max(moments.values()),
        exactness=Exactness.ESTIMATED,
        formula="widest of logits, attention with its mask, feed-forward with the mask; of one micro-batch in fp32",
        inputs={"ubatch": batch.tokens, "outputs": graph.outputs, "build": llamacpp_build(request.engine_version) or "unknown"}
        | {f"{name}_bytes": size for name, size in moments.items()},
    )


class _Graph:
    """Bytes of the moments of one graph. Sizes of tensors as llama.cpp's allocator lays them out."""

    def __init__(self, request: SizingRequest, architecture: Architecture, batch: Batch) -> None:
        self._request, self._shape, self._cells = request, architecture, batch.cells
        self._tokens = tokens = batch.tokens
        self._build = llamacpp_build(request.engine_version)
        self._flash = request.flash_attention is not False
        self._encodes = architecture.kind is ModelKind.ENCODER
        self._seen = tokens * (tokens if self._encodes else batch.slot_cells)  # an encoder attends within its micro-batch
        self._mask = self._seen + tokens * batch.window_cells
        self._hidden = tokens * architecture.hidden_size * _F32
        self._queries = tokens * _query_elements(architecture) * _F32
        recent = self._build >= FEW_OUTPUTS_BUILD
        self.outputs = min(request.concurrency, tokens) if recent else tokens

    @property
    def logits(self) -> int:
        return 0 if self._encodes else self.outputs * self._shape.vocab_size * _F32 + self._hidden

    @property
    def attention(self) -> int:
        if not self._flash:
            return (self._seen * self._shape.heads + self._mask) * _F32 + self._queries
        cast = 0 if self._build >= HALF_MASK_BUILD else _F32  # the mask was made in fp32 and cast
        return self._mask * (cast + _HALF) + self._queries + self._copy

    @property
    def feed_forward(self) -> int:
        """Gate, up and their product, four tensors as wide as a layer, and the experts' results if no freed hole takes them."""
        shape = self._shape
        routed = shape.experts_used * shape.expert_intermediate_size
        inner = self._tokens * max(shape.intermediate_size, routed) * _F32
        results = self._tokens * shape.experts_used * shape.hidden_size * _F32
        spread = results if routed and results > 2 * self._tokens * routed * _F32 else 0
        mask = self._mask * (_HALF if self._flash else _F32)
        return (3 if is_gated(shape) else 2) * inner + 4 * self._hidden + mask + spread

    @property
    def _copy(self) -> int:
        """One layer's keys and values in 16 bits, where the cache is quantised."""
        kept = self._request.kv_precision
        if self._build < HALF_COPY_BUILD or kept in (None, "fp16", "bf16"):
            return 0
        return round(self._cells * bytes_per_token_and_layer(self._shape, Fraction(_HALF)))


def _query_elements(architecture: Architecture) -> int:
    """Of one token beside the scores: four tensors of all heads; with MLA the queries, as wide as the cache, and the result."""
    heads = architecture.heads
    if architecture.kv_lora_rank:
        return heads * (architecture.kv_lora_rank + architecture.rope_head_dim) * _MLA_PERCENT // 100
    width = heads * architecture.head_dim * (2 if architecture.family in _GATED_ATTENTION else 1)
    return 4 * max(architecture.hidden_size, width)
