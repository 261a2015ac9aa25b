"""Bytes of the KV cache, on one GPU."""

from fractions import Fraction

from aimgpu.sizing.model import Architecture, ModelKind


def bytes_per_token_and_layer(architecture: Architecture, element: Fraction, tensor_parallel: int = 1) -> Fraction:
    """Keys and values of one token in one attention layer.

    MLA keeps one compressed vector and one positional key for all heads, on every GPU alike. Heads are divided over GPUs, but
    none gets less than one.
    """
    if architecture.kv_lora_rank:
        return (architecture.kv_lora_rank + architecture.rope_head_dim) * element
    heads = max(1, -(-architecture.kv_heads // tensor_parallel))
    return 2 * heads * architecture.head_dim * element


def cache_bytes(
    architecture: Architecture, *, full_tokens: int, window_tokens: int, element: Fraction, tensor_parallel: int = 1
) -> int:
    """The whole cache, given the tokens that a full layer and a sliding-window layer keep (all sequences together)."""
    full = max(architecture.caching_layers - architecture.sliding_layers, 0) * full_tokens
    sliding = architecture.sliding_layers * min(window_tokens, full_tokens)
    each = bytes_per_token_and_layer(architecture, element, tensor_parallel)
    of_window = Fraction(architecture.sliding_kv_elements, tensor_parallel) * element or each
    return round(full * each + sliding * of_window)


def state_bytes(architecture: Architecture, sequences: int, element_bytes: int, tensor_parallel: int = 1) -> int:
    """Constant state of linear-attention and SSM layers."""
    return -(-architecture.state_elements * sequences * element_bytes // tensor_parallel)


def kv_formula(architecture: Architecture, tokens: str) -> str:
    """How the cache is counted, for people; `tokens` says which."""
    if architecture.kind is ModelKind.ENCODER:
        return "an encoder keeps no cache"
    if architecture.kv_lora_rank:
        return f"layers x (compressed vector + positional key) x {tokens} x bytes per element"
    return f"2 x layers x KV heads x head size x {tokens} x bytes per element"


def kv_inputs(architecture: Architecture, tokens: int, window: int, element: Fraction) -> dict[str, int | str]:
    """What a cache term was computed from, for people."""
    inputs: dict[str, int | str] = {
        "layers": architecture.caching_layers,
        "kv_heads": architecture.kv_heads,
        "head_dim": architecture.head_dim,
        "tokens": tokens,
        "bytes_per_element": str(element),
    }
    if architecture.sliding_layers:
        inputs |= {"sliding_layers": architecture.sliding_layers, "window_tokens": min(window, tokens)}
    if architecture.kv_lora_rank:
        inputs |= {"kv_lora_rank": architecture.kv_lora_rank, "rope_head_dim": architecture.rope_head_dim}
    return inputs


def round_up(value: int, multiple: int) -> int:
    """To the next multiple."""
    return -(-value // multiple) * multiple
