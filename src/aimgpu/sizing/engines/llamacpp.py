"""What llama.cpp allocates on a GPU with every layer offloaded."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.engines.llamacpp_compute import Batch, compute_term
from aimgpu.sizing.kv import cache_bytes, kv_inputs, round_up, state_bytes
from aimgpu.sizing.model import Architecture, ModelFacts, ModelKind
from aimgpu.sizing.precision import kv_element_bytes
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import llamacpp_build
from aimgpu.sizing.weights import input_embedding_bytes, same_precision, weights_term

UBATCH = 512  # llama.cpp's -ub: tokens whose activations are held at once
_PAD = 256  # cells are padded to this
_EARLY_PAD = 32  # without flash attention, before build 6975 (#17046)
_PAD_BUILD = 6975
_WINDOW_BUILD = 5429  # before it every layer kept the whole context (#13194)
_F32 = 4
# What a general word means in files that llama.cpp reads.
_IN_GGUF = {"int4": "q4_k_m", "awq": "q4_k_m", "nf4": "q4_k_m", "int8": "q8_0", "fp8": "q8_0"}
_HALF_TYPES = {"fp16": "f16", "bf16": "bf16"}


def llamacpp_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    """Weights, KV cache and compute buffer on the GPU."""
    on_host = _host_bytes(request, precision, architecture)
    return (
        weights_term(_loaded_model(request, architecture), precision, tensor_parallel=request.tensor_parallel, on_host=on_host),
        _kv_term(request, architecture),
        compute_term(request, architecture, _batch(request, architecture)),
    )


def loaded_gguf(request: SizingRequest, asked: str) -> tuple[str, tuple[str, ...]]:
    """A file at hand has its own precision; a general word means one of the GGUF types."""
    if request.model.in_gguf:
        own = request.model.precision
        differs = request.precision is not None and not same_precision(own, asked)
        return own, (f"{asked} was asked for, but the file at hand is {own}: its own bytes are charged",) if differs else ()
    if asked in _IN_GGUF:
        return _IN_GGUF[asked], (f"{asked} is taken as {_IN_GGUF[asked].upper()}, which {request.engine} reads",)
    return asked, ()


def llamacpp_notes(request: SizingRequest) -> Iterator[str]:
    """What these flags do not load, and what is not known of the build."""
    architecture = request.model.architecture
    if architecture is not None and architecture.encoder_parameters:
        yield "the vision tower is a file of its own (--mmproj), which these flags do not load: it is not charged"
    if not llamacpp_build(request.engine_version):
        yield "which build of llama.cpp will run is not known: the larger buffers of early ones are charged"


def llamacpp_flags(request: SizingRequest, _terms: tuple[Term, ...] = ()) -> Mapping[str, str]:
    """`--ctx-size` is the context of all slots together; the cache is made for exactly that.

    No batch is larger than what is computed at once: while one lasts, no other slot gets a token.
    """
    flags = {
        "--ctx-size": str(cells(request)),
        "--parallel": str(request.concurrency),
        "--batch-size": str(ubatch(request)),
        "--ubatch-size": str(ubatch(request)),
        "--n-gpu-layers": "999",
        "--flash-attn": "off" if request.flash_attention is False else "on",
    }
    if request.kv_precision:
        kind = _HALF_TYPES.get(request.kv_precision, request.kv_precision)
        flags |= {"--cache-type-k": kind, "--cache-type-v": kind}
    if request.shared_cache:
        flags["--kv-unified"] = ""
    if request.is_encoder:
        flags["--embedding"] = ""
    return flags


def ollama_variables(request: SizingRequest, _terms: tuple[Term, ...] = ()) -> Mapping[str, str]:
    """Ollama is configured by its environment; it gives every parallel request the whole context."""
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
    """Tokens of cache: every slot has its whole context, padded as llama.cpp pads it, or all share one."""
    return _slot_cells(request) * (1 if request.shared_cache else request.concurrency)


def ubatch(request: SizingRequest) -> int:
    """Tokens that are computed at once."""
    return min(request.batched_tokens or UBATCH, cells(request))


def _slot_cells(request: SizingRequest) -> int:
    early = 0 < llamacpp_build(request.engine_version) < _PAD_BUILD and request.flash_attention is False
    return round_up(request.context, _EARLY_PAD if early else _PAD)


def _window_cells(request: SizingRequest, architecture: Architecture) -> int:
    """Of a layer with a window: what it looks back at and what is in flight, for every slot."""
    if 0 < llamacpp_build(request.engine_version) < _WINDOW_BUILD:
        return cells(request)
    slots = request.concurrency
    if request.shared_cache:
        return round_up(architecture.sliding_window * slots + ubatch(request), _PAD)
    return slots * round_up(architecture.sliding_window + ubatch(request), _PAD)


def _batch(request: SizingRequest, architecture: Architecture) -> Batch:
    own = _window_cells(request, architecture) // (1 if request.shared_cache else request.concurrency)
    slides = architecture.sliding_layers > 0 and not 0 < architecture.max_context <= architecture.sliding_window
    window = min(own, _slot_cells(request)) if slides else 0
    return Batch(tokens=ubatch(request), slot_cells=_slot_cells(request), window_cells=window, cells=cells(request))


def _loaded_model(request: SizingRequest, architecture: Architecture) -> ModelFacts:
    """llama.cpp reads a vision tower from a file of its own, and only on request; Ollama always loads it."""
    tower = architecture.encoder_parameters
    if (
        not tower
        or request.engine != "llamacpp"
        or request.model.architecture is None
        or request.model.tensor_bytes is not None
    ):
        return request.model
    text = replace(architecture, encoder_parameters=0)
    return replace(request.model, parameters=request.model.parameters - tower, architecture=text)


def _host_bytes(request: SizingRequest, precision: str, architecture: Architecture) -> int:
    """The input embedding stays on the host, unless it is the output head too: then the GPU holds it."""
    is_head = architecture.tied_embeddings and architecture.kind is not ModelKind.ENCODER
    if request.model.architecture is None or is_head:
        return 0
    return input_embedding_bytes(request.model, architecture, precision)


def _kv_term(request: SizingRequest, architecture: Architecture) -> Term:
    element = kv_element_bytes(request.kv_precision or "fp16")
    window = _window_cells(request, architecture)
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
