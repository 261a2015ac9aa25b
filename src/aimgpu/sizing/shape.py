"""Parameters that follow from a shape: a floor that a published count cannot be under."""

from aimgpu.sizing.model import Architecture, ModelKind

_GATED_MATRICES = 3  # gate, up and down
_PLAIN_MATRICES = 2
# Decoders without a gate in their feed-forward part, by `model_type` and by GGUF's name.
_PLAIN_FAMILIES = frozenset(
    {"gpt2", "gptneox", "gpt_neox", "gptj", "gpt_bigcode", "starcoder", "starcoder2", "bloom", "mpt", "opt", "falcon", "phi"}
    | {"phi2", "nemotron", "nemotron_h"}
)
_TOLERANCE_PERCENT = 90  # families differ in biases, norms, dense first layers and shared experts


def least_parameters(architecture: Architecture) -> int:
    """A lower bound: nine tenths of embeddings and layers, since other weights of a family are not known here."""
    return (embedding_parameters(architecture) + layer_parameters(architecture)) * _TOLERANCE_PERCENT // 100


def embedding_parameters(architecture: Architecture) -> int:
    return architecture.vocab_size * architecture.hidden_size * (1 if architecture.tied_embeddings else 2)


def layer_parameters(architecture: Architecture) -> int:
    """Attention and feed-forward of all layers. Linear-attention layers are counted by their feed-forward only."""
    matrices = _GATED_MATRICES if is_gated(architecture) else _PLAIN_MATRICES
    plain = _feeding_layers(architecture) - _expert_layers(architecture)
    dense = plain * matrices * architecture.hidden_size * architecture.intermediate_size
    attending = architecture.layers if architecture.kind is ModelKind.ENCODER else architecture.caching_layers
    return expert_parameters(architecture) + dense + attending * _attention_parameters(architecture)


def is_gated(architecture: Architecture) -> bool:
    """Whether the feed-forward part multiplies two matrices' results; encoders are counted as if it did not."""
    return architecture.kind is not ModelKind.ENCODER and architecture.family not in _PLAIN_FAMILIES


def expert_parameters(architecture: Architecture) -> int:
    """The routed experts of all layers."""
    expert = _GATED_MATRICES * architecture.hidden_size * architecture.expert_intermediate_size
    return _expert_layers(architecture) * architecture.experts * expert


def _expert_layers(architecture: Architecture) -> int:
    if not architecture.experts:
        return 0
    known, feeding = architecture.expert_layers, _feeding_layers(architecture)
    return feeding if known is None else min(known, feeding)


def _feeding_layers(architecture: Architecture) -> int:
    known = architecture.feed_forward_layers
    return architecture.layers if known is None else known


def _attention_parameters(architecture: Architecture) -> int:
    hidden, heads, width = architecture.hidden_size, architecture.heads, architecture.head_dim
    if architecture.kv_lora_rank:
        return hidden * heads * width + hidden * (architecture.kv_lora_rank + architecture.rope_head_dim)
    return 2 * hidden * heads * width + 2 * hidden * architecture.kv_heads * width
