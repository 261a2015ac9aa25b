"""Every engine that can be sized, and how."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from aimgpu.domain import Growth, Term
from aimgpu.sizing.engines.llamacpp import llamacpp_flags, llamacpp_notes, llamacpp_terms, loaded_gguf, ollama_variables
from aimgpu.sizing.engines.llamacpp_growth import OLLAMA_FREE_BYTES, larger_requests, with_free_slots
from aimgpu.sizing.engines.transformers import loaded_in_transformers, transformers_terms
from aimgpu.sizing.engines.vllm import loaded_in_vllm, vllm_growth, vllm_terms, with_own_sequences
from aimgpu.sizing.engines.vllm_flags import vllm_flags
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.startup import LLAMACPP, VLLM, StartupRoom

Loaded = tuple[str, tuple[str, ...]]  # the precision that is loaded, and what there is to say about it


def _no_growth(_request: SizingRequest, _architecture: Architecture) -> Growth | None:
    return None


def _no_larger(_request: SizingRequest) -> Iterator[SizingRequest]:
    return iter(())


def _one_at_once(request: SizingRequest) -> SizingRequest:
    return replace(request, concurrency=1)


def _no_flags(_request: SizingRequest, _terms: tuple[Term, ...]) -> Mapping[str, str]:
    return {}


def _no_notes(_request: SizingRequest) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizing:
    """How the memory of one engine is estimated. `flags` may also be environment variables."""

    terms: Callable[[SizingRequest, str, Architecture], tuple[Term, ...]]
    loaded_precision: Callable[[SizingRequest, str], Loaded]
    flags: Callable[[SizingRequest, tuple[Term, ...]], Mapping[str, str]] = _no_flags
    notes: Callable[[SizingRequest], Iterator[str]] = _no_notes
    growth: Callable[[SizingRequest, Architecture], Growth | None] = _no_growth
    larger: Callable[[SizingRequest], Iterator[SizingRequest]] = _no_larger  # steps in which more memory is used
    free_bytes: int = 0  # that any of these steps leaves unused
    own_concurrency: Callable[[SizingRequest], SizingRequest] = _one_at_once  # where the user leaves it to the engine
    startup: StartupRoom | None = None  # None: it is not started under a cap


ENGINE_SIZINGS: Mapping[str, EngineSizing] = {
    "vllm": EngineSizing(
        terms=vllm_terms,
        loaded_precision=loaded_in_vllm,
        flags=vllm_flags,
        growth=vllm_growth,
        own_concurrency=with_own_sequences,
        startup=VLLM,
    ),
    "llamacpp": EngineSizing(
        terms=llamacpp_terms,
        loaded_precision=loaded_gguf,
        flags=llamacpp_flags,
        notes=llamacpp_notes,
        larger=larger_requests,
        own_concurrency=with_free_slots,
        startup=LLAMACPP,
    ),
    "ollama": EngineSizing(
        terms=llamacpp_terms,
        loaded_precision=loaded_gguf,
        flags=ollama_variables,
        larger=larger_requests,
        free_bytes=OLLAMA_FREE_BYTES,
        own_concurrency=with_free_slots,
        startup=LLAMACPP,
    ),
    "transformers": EngineSizing(terms=transformers_terms, loaded_precision=loaded_in_transformers),
}
