"""What Hugging Face transformers allocates on a GPU: the peak of its caching allocator in a generation."""

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.kv import cache_bytes, state_bytes
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.weights import weights_term

_HALF = 2
_F32 = 4


def transformers_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    return (
        weights_term(request.model, precision, tensor_parallel=request.tensor_parallel, on_host=0),
        _kv_term(request, architecture),
        _activation_term(request, architecture),
    )


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    element = kv_element_bytes(request.kv_precision or "bf16")
    tokens = request.context * request.concurrency
    kept = cache_bytes(
        architecture,
        full_tokens=tokens,
        window_tokens=min(architecture.sliding_window, request.context) * request.concurrency,
        element=element,
        tensor_parallel=request.tensor_parallel,
    )
    state = state_bytes(architecture, request.concurrency, _F32, request.tensor_parallel)
    return Term(
        name="kv_cache",
        memory_bytes=kept + state,
        exactness=Exactness.EXACT,
        formula="2 x layers x KV heads x head size x tokens x bytes per element",
        inputs={"layers": architecture.caching_layers, "kv_heads": architecture.kv_heads, "tokens": tokens},
    )


def _activation_term(request: SizingRequest, architecture: Architecture) -> Term:
    """The feed-forward of the longest prompt, prefilled in one piece."""
    tokens = (request.prompt_tokens or request.context) * request.concurrency
    width = 3 * architecture.intermediate_size + 4 * architecture.hidden_size
    return Term(
        name="activations",
        memory_bytes=tokens * width * _HALF,
        exactness=Exactness.ESTIMATED,
        formula="prompt tokens x (3 feed-forward + 4 hidden) x 2 B",
        inputs={"prompt_tokens": tokens, "width": width},
    )
