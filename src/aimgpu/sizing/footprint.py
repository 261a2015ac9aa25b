"""A SizingRequest in, a Footprint out."""

from collections.abc import Mapping
from dataclasses import replace

from aimgpu.domain import Exactness, Footprint, Term, Vendor
from aimgpu.sizing.assumed import assumed_architecture
from aimgpu.sizing.llamacpp import llamacpp_flags, llamacpp_terms, ollama_variables
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.transformers import transformers_terms
from aimgpu.sizing.vllm import vllm_flags, vllm_terms
from aimgpu.units import MIB

# What a process holds on the device before its first tensor, and libraries beside the allocator (facts with their sources in
# docs/explanation/sizing.md). HIP measured on one card: 1.35 GiB in all for a small model.
_CONTEXT_BYTES = {Vendor.NVIDIA: 450 * MIB, Vendor.AMD: 1000 * MIB}
_ENGINE_BYTES = {"vllm": 200 * MIB, "llamacpp": 64 * MIB, "ollama": 64 * MIB, "transformers": 64 * MIB}
_AMD_ENGINE_EXTRA_BYTES = 256 * MIB  # hipBLASLt workspaces and code objects


def estimate_footprint(request: SizingRequest) -> Footprint:
    """What one Instance needs on each of its Devices, and the flags that make it so."""
    precision = find_precision(request.precision or request.model.precision).name
    architecture = request.model.architecture
    notes: tuple[str, ...] = ()
    if architecture is None:
        terms, notes = _by_parameter_count(request, precision)
    else:
        terms = _engine_terms(request, precision, architecture)
    terms = (*terms, _engine_term(request), _context_term(request))
    return Footprint(
        model=request.model.name,
        engine=request.engine,
        precision=precision,
        context_tokens=request.context,
        concurrency=request.concurrency,
        terms=terms,
        flags=_flags(request, terms),
        notes=(*notes, *_context_notes(request)),
    )


def _engine_terms(request: SizingRequest, precision: str, architecture: Architecture) -> tuple[Term, ...]:
    if request.engine == "vllm":
        return vllm_terms(request, precision, architecture)
    if request.engine == "transformers":
        return transformers_terms(request, precision, architecture)
    return llamacpp_terms(request, precision, architecture)


def _flags(request: SizingRequest, terms: tuple[Term, ...]) -> Mapping[str, str]:
    if request.engine == "vllm":
        kv_bytes = next(term.memory_bytes for term in terms if term.name == "kv_cache")
        return vllm_flags(request, kv_bytes)
    if request.engine == "llamacpp":
        return llamacpp_flags(request)
    if request.engine == "ollama":
        return ollama_variables(request)
    return {}


def _by_parameter_count(request: SizingRequest, precision: str) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """Only a size is known: a typical dense model of that size is assumed, and said."""
    assumed = assumed_architecture(request.model.parameters)
    terms = tuple(replace(term, exactness=Exactness.ESTIMATED) for term in _engine_terms(request, precision, assumed))
    note = (
        f"fallback: of {request.model.name} only the size is known; cache and activations are those of a dense model with "
        f"{assumed.layers} layers and {assumed.kv_heads} KV heads"
    )
    return terms, (note,)


def _engine_term(request: SizingRequest) -> Term:
    extra = _AMD_ENGINE_EXTRA_BYTES if request.vendor is Vendor.AMD else 0
    return Term(
        name="engine",
        memory_bytes=_ENGINE_BYTES[request.engine] + extra,
        exactness=Exactness.ESTIMATED,
        formula="libraries' workspaces beside the allocator, a constant per engine and vendor",
        inputs={"engine": request.engine, "vendor": request.vendor.value},
    )


def _context_term(request: SizingRequest) -> Term:
    return Term(
        name="context",
        memory_bytes=_CONTEXT_BYTES[request.vendor],
        exactness=Exactness.ESTIMATED,
        formula="what a process holds on the device before its first tensor, a constant per vendor",
        inputs={"vendor": request.vendor.value},
    )


def _context_notes(request: SizingRequest) -> tuple[str, ...]:
    architecture = request.model.architecture
    if architecture is None or not architecture.max_context or request.context <= architecture.max_context:
        return ()
    return (f"the context of {request.context} is more than the {architecture.max_context} that the model was trained for",)
