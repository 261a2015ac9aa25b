"""A SizingRequest in, a Footprint out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from aimgpu.domain import Exactness, Footprint, Term
from aimgpu.sizing.assumed import assumed_architecture
from aimgpu.sizing.correction import apply_correction
from aimgpu.sizing.engines.llamacpp import llamacpp_flags, llamacpp_terms, ollama_variables
from aimgpu.sizing.engines.transformers import transformers_terms
from aimgpu.sizing.engines.vllm import vllm_terms
from aimgpu.sizing.engines.vllm_flags import vllm_flags
from aimgpu.sizing.formats.gguf_mixes import GGUF_MIXES
from aimgpu.sizing.formats.gguf_types import GGUF_TYPES
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.overhead import context_term, engine_term
from aimgpu.sizing.precision import PRECISIONS, find_precision
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.version import llamacpp_build
from aimgpu.sizing.weights import same_precision

_GGUF_ONLY = frozenset((*GGUF_TYPES, *GGUF_MIXES)) - frozenset(PRECISIONS)
# What a general word means in files that llama.cpp reads.
_IN_GGUF = {"int4": "q4_k_m", "awq": "q4_k_m", "nf4": "q4_k_m", "int8": "q8_0", "fp8": "q8_0"}


def estimate_footprint(request: SizingRequest) -> Footprint:
    """What one Instance needs on each of its Devices, and the flags that make it so."""
    asked = find_precision(request.precision or request.model.precision).name
    loaded, notes = _loaded_precision(request, asked)
    architecture = request.model.architecture
    if architecture is None:
        terms, fallback = _by_parameter_count(request, loaded)
        notes = (*notes, fallback)
    else:
        terms = _engine_terms(request, loaded, architecture)
    terms = tuple(
        apply_correction(term, request.corrections.get(term.name))
        for term in (*terms, engine_term(request), context_term(request))
    )
    return Footprint(
        model=request.model.name,
        engine=request.engine,
        precision=asked,
        context_tokens=request.context,
        concurrency=request.concurrency,
        terms=terms,
        flags=_flags(request, terms),
        notes=(*request.model.remarks, *notes, *_notes(request)),
        engine_version=request.engine_version,
        family=architecture.family if architecture else None,
        gpu=request.gpu,
    )


def _loaded_precision(request: SizingRequest, asked: str) -> tuple[str, tuple[str, ...]]:
    """What the engine will really load for the precision that was asked for."""
    if request.engine == "transformers" and asked in _GGUF_ONLY:
        return "fp16", (f"transformers unpacks {asked} while it loads: 16 bits a weight are charged",)
    if request.engine == "vllm" and request.precision is None and asked == "fp32":
        return "fp16", ("vLLM loads fp32 weights in 16 bits unless fp32 is asked for",)
    if request.engine not in ("llamacpp", "ollama"):
        return asked, ()
    if request.model.in_gguf:
        own = request.model.precision
        differs = request.precision is not None and not same_precision(own, asked)
        return own, (f"{asked} was asked for, but the file at hand is {own}: its own bytes are charged",) if differs else ()
    if asked in _IN_GGUF:
        return _IN_GGUF[asked], (f"{asked} is taken as {_IN_GGUF[asked].upper()}, which {request.engine} reads",)
    return asked, ()


def _engine_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    if request.engine == "vllm":
        return vllm_terms(request, precision, architecture)
    if request.engine == "transformers":
        return transformers_terms(request, precision, architecture)
    return llamacpp_terms(request, precision, architecture)


def _flags(request: SizingRequest, terms: tuple[Term, ...]) -> Mapping[str, str]:
    if request.engine == "vllm":
        cache = next(term for term in terms if term.name == "kv_cache")
        return vllm_flags(request, cache, sum(term.memory_bytes for term in terms))
    if request.engine == "llamacpp":
        return llamacpp_flags(request)
    if request.engine == "ollama":
        return ollama_variables(request)
    return {}


def _by_parameter_count(request: SizingRequest, precision: str) -> tuple[tuple[Term, ...], str]:
    """Only a size is known: a typical dense model of that size is assumed, and said."""
    assumed = assumed_architecture(request.model.parameters)
    terms = tuple(replace(term, exactness=Exactness.ESTIMATED) for term in _engine_terms(request, precision, assumed))
    note = (
        f"fallback: of {request.model.name} only the size is known; cache and activations are those of a dense model with "
        f"{assumed.layers} layers and {assumed.kv_heads} KV heads"
    )
    return terms, note


def _notes(request: SizingRequest) -> Iterator[str]:
    yield from _context_notes(request)
    yield from _division_notes(request)
    yield from _tower_notes(request)
    if request.engine == "llamacpp" and not llamacpp_build(request.engine_version):
        yield "which build of llama.cpp will run is not known: the larger buffers of early ones are charged"


def _context_notes(request: SizingRequest) -> tuple[str, ...]:
    architecture = request.model.architecture
    if architecture is None or not architecture.max_context or request.context <= architecture.max_context:
        return ()
    return (f"the context of {request.context} is more than the {architecture.max_context} that the model was trained for",)


def _division_notes(request: SizingRequest) -> tuple[str, ...]:
    if request.can_divide(request.tensor_parallel):
        return ()
    return (f"{request.engine} will refuse {request.tensor_parallel} devices: the model's heads cannot be divided by it",)


def _tower_notes(request: SizingRequest) -> tuple[str, ...]:
    architecture = request.model.architecture
    if request.engine != "llamacpp" or architecture is None or not architecture.encoder_parameters:
        return ()
    return ("the vision tower is a file of its own (--mmproj), which these flags do not load: it is not charged",)
