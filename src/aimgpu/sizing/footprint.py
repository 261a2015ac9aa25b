"""A SizingRequest in, a footprint out."""

from collections.abc import Iterator
from dataclasses import replace

from aimgpu.domain import Exactness, Footprint, LargerService, Term
from aimgpu.sizing.adapters import adapter_term
from aimgpu.sizing.assumed import assumed_architecture
from aimgpu.sizing.correction import apply_correction
from aimgpu.sizing.engines.table import ENGINE_SIZINGS, EngineSizing
from aimgpu.sizing.listed import listed_bytes, listed_note, listed_term
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.overhead import context_term, engine_term
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.startup import NAME as STARTUP
from aimgpu.sizing.startup import startup_term, with_more_room


def estimate_footprint(request: SizingRequest) -> Footprint:
    """What one instance needs on each of its devices, the flags that make it so, and what more memory would be good for."""
    engine = ENGINE_SIZINGS[request.engine]
    larger = tuple(_larger(step, engine) for step in engine.larger(request))
    return replace(estimate_need(request), larger=larger)


def estimate_need(request: SizingRequest) -> Footprint:
    """As `estimate_footprint`, without what more memory would be good for."""
    engine = ENGINE_SIZINGS[request.engine]
    asked = find_precision(request.precision or request.model.precision).name
    loaded, notes = engine.loaded_precision(request, asked)
    known = request.model.architecture
    architecture = known or assumed_architecture(request.model.parameters)
    terms = engine.terms(request, loaded, architecture)
    if request.adapters:
        terms = (*terms, adapter_term(request.engine, request.adapters, architecture, request.tensor_parallel))
    if known is None:
        terms = tuple(replace(term, exactness=Exactness.ESTIMATED) for term in terms)
        notes = (*notes, _fallback_note(request, architecture))
    terms = _all_terms(request, engine, terms)
    listed = listed_bytes(request, asked)
    if listed is not None:
        terms, notes = (*terms, *listed_term(listed, terms)), (*notes, listed_note(listed, terms))
    return Footprint(
        model=request.model.name,
        engine=request.engine,
        precision=asked,
        context_tokens=request.context,
        concurrency=request.requests_at_once,
        terms=terms,
        flags=engine.flags(request, terms),
        notes=(*request.model.remarks, *notes, *_notes(request), *engine.notes(request)),
        engine_version=request.engine_version,
        family=known.family if known else None,
        gpu=request.gpu,
        growth=engine.growth(request, architecture),
    )


def _larger(request: SizingRequest, engine: EngineSizing) -> LargerService:
    need = estimate_need(request)
    terms = with_more_room(need.terms, engine.free_bytes, "kept_free_bytes") if engine.free_bytes else need.terms
    return LargerService(concurrency=need.concurrency, context_tokens=need.context_tokens, terms=terms, flags=need.flags)


def _all_terms(request: SizingRequest, engine: EngineSizing, terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """With what every process holds, what earlier runs corrected, and the room for starting last."""
    corrected = tuple(
        apply_correction(term, request.corrections.get(term.name))
        for term in (*terms, engine_term(request), context_term(request))
    )
    if engine.startup is None:
        return corrected
    startup = startup_term(request, engine.startup, corrected)
    if startup.exactness is Exactness.ESTIMATED:
        startup = apply_correction(startup, request.corrections.get(STARTUP))
    return (*corrected, startup)


def _fallback_note(request: SizingRequest, assumed: Architecture) -> str:
    """Only a size is known: a typical dense model of that size is assumed, and the footprint says so."""
    return (
        f"fallback: of {request.model.name} only the size is known; cache and activations are those of a dense model with "
        f"{assumed.layers} layers and {assumed.kv_heads} KV heads"
    )


def _notes(request: SizingRequest) -> Iterator[str]:
    architecture = request.model.architecture
    if architecture is not None and architecture.max_context and request.context > architecture.max_context:
        yield f"the context of {request.context} is more than the {architecture.max_context} that the model was trained for"
    if not request.can_divide(request.tensor_parallel):
        yield f"{request.engine} will refuse {request.tensor_parallel} devices: the model's heads cannot be divided by it"
