"""What llama.cpp allocates on a GPU with every layer offloaded."""

from collections.abc import Mapping

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.kv import cache_bytes, kv_inputs, round_up, state_bytes
from aimgpu.sizing.model import Architecture, ModelKind
from aimgpu.sizing.precision import kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import llamacpp_build
from aimgpu.sizing.weights import input_embedding_bytes, weights_term

UBATCH = 512  # llama.cpp's -ub: tokens whose activations are held at once
_PAD = 256  # cells are padded to this
_F32 = 4
_HALF = 2
_HALF_TYPES = {"fp16": "f16", "bf16": "bf16"}
# From this build on llama-server reserves logits for one token a slot (ggml-org/llama.cpp#23861), and the mask is half as wide.
_FEW_OUTPUTS_BUILD = 9500


def llamacpp_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    on_host = _host_bytes(request, precision, architecture)
    return (
        weights_term(request.model, precision, tensor_parallel=request.tensor_parallel, on_host=on_host),
        _kv_term(request, architecture),
        _compute_term(request, architecture),
    )


def llamacpp_flags(request: SizingRequest) -> Mapping[str, str]:
    """`--ctx-size` is the context of all slots together; the cache is made for exactly that."""
    flags = {
        "--ctx-size": str(cells(request)),
        "--parallel": str(request.concurrency),
        "--ubatch-size": str(ubatch(request)),
        "--n-gpu-layers": "999",
        "--flash-attn": "off" if request.flash_attention is False else "on",
    }
    if request.kv_precision:
        kind = _HALF_TYPES.get(request.kv_precision, request.kv_precision)
        flags |= {"--cache-type-k": kind, "--cache-type-v": kind}
    if request.is_encoder:
        flags["--embedding"] = ""
    return flags


def ollama_variables(request: SizingRequest) -> Mapping[str, str]:
    """Ollama is told by its environment; it gives every parallel request the whole context."""
    variables = {
        "OLLAMA_CONTEXT_LENGTH": str(request.context),
        "OLLAMA_NUM_PARALLEL": str(request.concurrency),
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_FLASH_ATTENTION": "0" if request.flash_attention is False else "1",
    }
    if request.kv_precision:
        variables["OLLAMA_KV_CACHE_TYPE"] = _HALF_TYPES.get(request.kv_precision, request.kv_precision)
    return variables


def cells(request: SizingRequest) -> int:
    """Tokens of cache: every slot has its whole context, padded as llama.cpp pads it."""
    return request.concurrency * _slot_cells(request)


def ubatch(request: SizingRequest) -> int:
    return min(request.batched_tokens or UBATCH, cells(request))


def _slot_cells(request: SizingRequest) -> int:
    return round_up(request.context, _PAD)


def _host_bytes(request: SizingRequest, precision: str, architecture: Architecture) -> int:
    """The input embedding stays on the host, unless it is the output head too: then the GPU holds it."""
    is_head = architecture.tied_embeddings and architecture.kind is not ModelKind.ENCODER
    if request.model.architecture is None or is_head:
        return 0
    return input_embedding_bytes(request.model, architecture, precision)


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    element = kv_element_bytes(request.kv_precision or "fp16")
    window = request.concurrency * round_up(architecture.sliding_window + ubatch(request), _PAD)
    kept = cache_bytes(
        architecture,
        full_tokens=cells(request),
        window_tokens=window,
        element=element,
        tensor_parallel=request.tensor_parallel,
    )
    state = state_bytes(architecture, request.concurrency, _F32, request.tensor_parallel)
    return Term(
        name="kv_cache",
        memory_bytes=kept + state,
        exactness=Exactness.EXACT,
        formula="2 x layers x KV heads x head size x cells x bytes per element (+ constant state of SSM layers)",
        inputs=kv_inputs(architecture, cells(request), window, element) | {"state_bytes": state},
    )


def _compute_term(request: SizingRequest, architecture: Architecture) -> Term:
    """The scheduler's buffer: the widest moment of the graph for one micro-batch, in fp32."""
    tokens, recent = ubatch(request), llamacpp_build(request.engine_version) >= _FEW_OUTPUTS_BUILD
    hidden = tokens * architecture.hidden_size * _F32
    outputs = min(request.concurrency, tokens) if recent else tokens
    logits = 0 if architecture.kind is ModelKind.ENCODER else outputs * architecture.vocab_size * _F32 + hidden
    layer = _layer_bytes(request, architecture, recent=recent)
    return Term(
        name="activations",
        memory_bytes=max(logits, layer),
        exactness=Exactness.ESTIMATED,
        formula="wider of: logits of the outputs; one layer with its attention mask; for one micro-batch in fp32",
        inputs={"ubatch": tokens, "outputs": outputs, "logits_bytes": logits, "layer_bytes": layer},
    )


def _layer_bytes(request: SizingRequest, architecture: Architecture, *, recent: bool) -> int:
    """The wider of one layer's attention and feed-forward. Early builds also cast the mask from fp32, which is freed after."""
    tokens = ubatch(request)
    hidden = tokens * architecture.hidden_size * _F32
    heads = tokens * max(architecture.hidden_size, architecture.heads * architecture.head_dim) * _F32
    mask = tokens * _slot_cells(request)
    if request.flash_attention is False:
        return mask * (architecture.heads + 1) * _F32 + 4 * heads
    feed_forward = 3 * _feed_forward_bytes(architecture, tokens) + 5 * hidden + mask * _HALF
    return feed_forward if recent else max(feed_forward, mask * (_F32 + _HALF) + 4 * heads)


def _feed_forward_bytes(architecture: Architecture, tokens: int) -> int:
    routed = architecture.experts_used * architecture.expert_intermediate_size
    return tokens * max(architecture.intermediate_size, routed) * _F32
