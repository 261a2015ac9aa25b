"""What Hugging Face transformers allocates on a GPU: the peak of its allocator over loading, prefill and decoding.

The moments follow from the model code: those of prefill, with the whole prompt in one piece, are in `prefill`. In decoding the
whole cache is there and attention expands grouped keys and values unless flash attention runs. With several GPUs the layers are
divided.
"""

from dataclasses import replace
from fractions import Fraction

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.allocator import rounding_bytes
from aimgpu.sizing.engines.prefill import prefill_moments, prompt_tokens
from aimgpu.sizing.formats.gguf_mixes import GGUF_MIXES
from aimgpu.sizing.formats.gguf_types import GGUF_TYPES
from aimgpu.sizing.kv import cache_bytes, kv_formula, kv_inputs, state_bytes
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import PRECISIONS, find_precision, kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import at_least
from aimgpu.sizing.weights import weights_term

_HALF = 2
_F32 = 4
_GGUF_ONLY = frozenset((*GGUF_TYPES, *GGUF_MIXES)) - frozenset(PRECISIONS)
_PACKED = {"int4": Fraction(1, 2), "awq": Fraction(1, 2), "int8": Fraction(1), "fp8": Fraction(1)}  # scales lie apart
_TIES_BEFORE_LOADING = "4.48"
_LOADS_INTO_ONE_BLOCK = "4.50"
_GROUPED_ATTENTION = "4.53"


def transformers_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    """Weights, KV cache and the peak of activations."""
    kind = find_precision(precision).name
    # Qwen3's FP8 checkpoints carry the head beside the embedding that their config says it is tied to.
    by_name = request.model.tensor_bytes is None and architecture.family.startswith("qwen3")
    extra_head = kind == "fp8" and architecture.tied_embeddings and by_name
    beside = architecture.embedding_parameters * _HALF if extra_head else 0
    if _is_before(request, _LOADS_INTO_ONE_BLOCK):
        beside += rounding_bytes(architecture, _PACKED.get(kind, find_precision(precision).weight_bytes))
    weights = weights_term(request.model, precision, tensor_parallel=request.tensor_parallel, beside=beside)
    cache = _kv_term(request, architecture)
    return (weights, cache, _activation_term(request, architecture, kind, cache.memory_bytes))


def loaded_in_transformers(_request: SizingRequest, asked: str) -> tuple[str, tuple[str, ...]]:
    """GGUF types are unpacked to 16 bits while loading."""
    if asked in _GGUF_ONLY:
        return "fp16", (f"transformers unpacks {asked} while it loads: 16 bits a weight are charged",)
    return asked, ()


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    element = kv_element_bytes(request.cache_kind)
    tokens, window = request.context * request.concurrency, architecture.sliding_window * request.concurrency
    kept = _as_cached(architecture)
    state = state_bytes(architecture, request.concurrency, _F32)
    return Term(
        name="kv_cache",
        memory_bytes=-(-(_cached(architecture, tokens, window, element) + state) // request.tensor_parallel),
        exactness=Exactness.EXACT,
        formula=kv_formula(kept, "tokens") + (" + state" if architecture.state_elements else ""),
        inputs=kv_inputs(kept, tokens, window, element) | {"state_bytes": state},
    )


def _cached(architecture: Architecture, tokens: int, window: int, element: Fraction) -> int:
    return cache_bytes(_as_cached(architecture), full_tokens=tokens, window_tokens=window, element=element)


def _as_cached(architecture: Architecture) -> Architecture:
    """MLA is expanded before it is kept: in every head a key with its positional part, and a value.

    The mean of the two is the head size here (transformers' modeling_deepseek_v3.py).
    """
    if not architecture.kv_lora_rank:
        return architecture
    width = architecture.head_dim + -(-architecture.rope_head_dim // 2)
    return replace(architecture, kv_lora_rank=0, kv_heads=architecture.heads, head_dim=width)


def _activation_term(request: SizingRequest, architecture: Architecture, kind: str, cache: int) -> Term:
    """What the peak needs beyond weights and the full cache."""
    moments = prefill_moments(request, architecture)
    prefill = max(moments.values()) + _prompt_cache_bytes(request, architecture) - cache
    decode = _decode_bytes(request, architecture, kind)
    load = _load_bytes(request, architecture, kind) - cache
    kernel = _kernel_bytes(architecture, kind)
    return Term(
        name="activations",
        memory_bytes=max(prefill, decode, load, 0) + kernel,
        exactness=Exactness.ESTIMATED,
        formula="largest of: the widest moment of prefill (feed-forward, attention with its mask, experts) with the prompt's "
        "cache, less the whole cache; expanded keys and values of one layer; loading; plus the kernel's buffer",
        inputs=dict(moments)
        | {"prefill_bytes": prefill, "decode_bytes": decode, "load_bytes": max(load, 0), "kernel_bytes": kernel},
    )


def _prompt_cache_bytes(request: SizingRequest, architecture: Architecture) -> int:
    """The cache at the end of prefill. Layers with a window hold the whole prompt until the first token of the answer."""
    tokens = prompt_tokens(request)
    element = kv_element_bytes(request.cache_kind)
    state = state_bytes(architecture, request.concurrency, _F32)
    return -(-(_cached(architecture, tokens, tokens, element) + state) // request.tensor_parallel)


def _decode_bytes(request: SizingRequest, architecture: Architecture, kind: str) -> int:
    """What attention holds beyond the cache, where flash attention does not run (AutoAWQ is without it).

    Early versions repeated keys and values of one layer for every head; later ones only hold the keys of one layer twice while
    a token is added.
    """
    logits = 4 * request.concurrency * architecture.vocab_size * _F32
    if request.flash_attention is not False and kind != "awq":  # not given: published runs had it
        return logits
    heads = 2 * architecture.heads if _is_before(request, _GROUPED_ATTENTION) else architecture.kv_heads
    return logits + heads * architecture.head_dim * request.element_bytes * request.context * request.concurrency


def _load_bytes(request: SizingRequest, architecture: Architecture, kind: str) -> int:
    """AutoAWQ under early transformers made a head of its own before tying it to the embedding."""
    untied = kind == "awq" and architecture.tied_embeddings and _is_before(request, _TIES_BEFORE_LOADING)
    return architecture.embedding_parameters * _HALF if untied else 0


def _kernel_bytes(architecture: Architecture, kind: str) -> int:
    """ExLlama's kernel for 4-bit GPTQ keeps room for the largest matrix unpacked."""
    return architecture.hidden_size * architecture.intermediate_size * _HALF if kind == "int4" else 0


def _is_before(request: SizingRequest, version: str) -> bool:
    """An unknown version is taken for a current one."""
    return request.engine_version is not None and not at_least(request.engine_version, version)
