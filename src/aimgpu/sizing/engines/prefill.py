"""What transformers holds beyond weights and cache while it reads a prompt in one piece: the moments that can be the widest.

Read off the model code of transformers 5.17 and the attention of torch 2.11. All are moments of the last layer, when the keys
and values of every layer are there; through all of them the embeddings, the layer's input, the positions and the masks live.
"""

from collections.abc import Mapping

from aimgpu.sizing.model import Architecture
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import at_least

_BOOL = 1
_INDEX_BYTES = 32  # token ids, positions, mask and cache positions: four 64-bit numbers a token
_ROUTING_BYTES = 48  # of one token and expert: its number, its place, the way back (64 bits each), the weight and its copies
_EXPERTS_TOGETHER = "5.0"  # before, one expert after another
# One matrix makes gate and up together; the result lives until both halves are used.
_FUSED_GATE = ("phi3", "phi4_multimodal", "glm", "glm4", "glm4v", "granitemoehybrid")
# Full and sliding layers turn by different angles, so there are two tables of cosines and sines.
_TWO_ROTARY_TABLES = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "olmo3", "modernbert")
# No kernel of torch knows attention sinks: the scores of all heads are written out, three copies at once.
_SCORES_WRITTEN_OUT = ("gpt_oss",)
_SCORE_COPIES = 3
# Inner tensors of an expert while it is gated: gate and up, and both again; gpt-oss adds its biases and clamps both apart.
_GATE_TENSORS = 4
_GATE_TENSORS_OF = {"gpt_oss": 9}


def prefill_moments(request: SizingRequest, architecture: Architecture) -> Mapping[str, int]:
    """Bytes at each moment, by its name."""
    tokens, hidden = prompt_tokens(request), architecture.hidden_size
    masks = _mask_bytes(request, architecture)
    rotary = 2 * architecture.head_dim * (2 if architecture.family in _TWO_ROTARY_TABLES else 1)
    alive = tokens * (rotary * request.element_bytes + _INDEX_BYTES) + masks
    # The layer's input, the embeddings, the residual and the normed copy.
    feed_forward = tokens * (_feed_forward_width(request, architecture) + 4 * hidden) * request.element_bytes
    # The layer's input, the embeddings and the normed copy; queries of every head, and the result. Keys and values of a group
    # are read from the cache, not repeated (measured: Gemma 3 1B with prompts of 30,001 and 32,768 tokens).
    heads = tokens * (3 * hidden + 2 * architecture.heads * architecture.head_dim) * request.element_bytes
    attention = heads + _attention_bytes(request, architecture, masks)
    return {
        "feed_forward_bytes": alive + feed_forward,
        "attention_bytes": alive + attention,
        "experts_bytes": alive + tokens * 4 * hidden * request.element_bytes + _experts_bytes(request, architecture),
        "mask_bytes": masks,
    }


def prompt_tokens(request: SizingRequest) -> int:
    """Of all requests together."""
    return _prompt(request) * request.concurrency


def _prompt(request: SizingRequest) -> int:
    return min(request.prompt_tokens or request.context, request.context)


def _feed_forward_width(request: SizingRequest, architecture: Architecture) -> int:
    routed = architecture.expert_intermediate_size if architecture.experts else 0
    tensors = 4 if architecture.family in _FUSED_GATE else 3
    return tensors * max(architecture.intermediate_size, 0 if _runs_experts_together(request, architecture) else routed)


def _mask_bytes(request: SizingRequest, architecture: Architecture) -> int:
    """A prompt longer than the window needs a mask of prompt x prompt; without a window the kernel masks by itself."""
    pairs = _pairs(request)
    if _writes_scores(request, architecture):
        return pairs * request.element_bytes * (2 if architecture.sliding_layers else 1)
    has_window = architecture.sliding_layers > 0 and _prompt(request) >= architecture.sliding_window
    return pairs * _BOOL if has_window and not request.flash_attention else 0


def _attention_bytes(request: SizingRequest, architecture: Architecture, masks: int) -> int:
    """Torch converts the mask to numbers again in every layer."""
    if _writes_scores(request, architecture):
        return _SCORE_COPIES * architecture.heads * _pairs(request) * request.element_bytes
    return _pairs(request) * request.element_bytes if masks else 0


def _experts_bytes(request: SizingRequest, architecture: Architecture) -> int:
    """All experts of all tokens at once: a row for each pair of token and expert."""
    if not _runs_experts_together(request, architecture):
        return 0
    rows = prompt_tokens(request) * architecture.experts_used
    hidden = architecture.hidden_size
    gate = _GATE_TENSORS_OF.get(architecture.family, _GATE_TENSORS) * architecture.expert_intermediate_size
    width = max(hidden + gate, 4 * hidden)  # later: the chosen input, the result, weighted, and in the old order
    return rows * (width * request.element_bytes + _ROUTING_BYTES)


def _runs_experts_together(request: SizingRequest, architecture: Architecture) -> bool:
    version = request.engine_version
    return architecture.experts > 0 and (version is None or at_least(version, _EXPERTS_TOGETHER))


def _writes_scores(request: SizingRequest, architecture: Architecture) -> bool:
    return architecture.family in _SCORES_WRITTEN_OUT and not request.flash_attention


def _pairs(request: SizingRequest) -> int:
    """Of tokens that see each other, in all requests."""
    return _prompt(request) ** 2 * request.concurrency
