"""The room that starting takes: warm-up, graph capture and workspaces need memory that no other term counts.

An engine under a cap dies where this is missing, although it would have run with less later. The constants are measured per
engine; what a model was seen to take is learned and used in their place (`SizingRequest.learned_startup_bytes`).
"""

from dataclasses import dataclass, replace

from aimgpu.domain import Exactness, Footprint, Term
from aimgpu.sizing.request import SizingRequest
from aimgpu.units import MIB

NAME = "startup"
_PPM = 1_000_000
_LEAST_LEARNED = 2  # a learned value is at least 1/2 of the constant: later requests may need what starting did not
_MARGIN_BYTES = 64 * MIB  # above what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupRoom:
    """A constant, and a share of the terms that are themselves allocated while starting."""

    constant_bytes: int
    share_ppm: int = 0  # of activations and graphs: the allocator's fragments, and captures that differ from the estimate

    def bytes_for(self, terms: tuple[Term, ...]) -> int:
        """Beside these terms."""
        varying = sum(term.memory_bytes for term in terms if term.name in ("activations", "graphs"))
        return self.constant_bytes + varying * self.share_ppm // _PPM + sum(map(_second_peak, terms))


# vLLM 0.26.0 on an H200, ten shapes of 0.5 to 14 B (benchmarks/engines_h200): with 192 MiB nine had 80 to 240 MiB left when
# they were ready, one missed 24. llama.cpp allocates its buffers before it serves; the room is for cuBLAS and graphs.
VLLM = StartupRoom(constant_bytes=320 * MIB, share_ppm=250_000)
LLAMACPP = StartupRoom(constant_bytes=96 * MIB)


def _second_peak(term: Term) -> int:
    """Warming up runs the largest forward pass and the sampler, one after the other; PyTorch keeps the memory of both."""
    peaks = [value for name in ("forward_bytes", "sampler_bytes") if isinstance(value := term.inputs.get(name), int)]
    return min(peaks) if len(peaks) > 1 else 0


def startup_term(request: SizingRequest, room: StartupRoom, terms: tuple[Term, ...]) -> Term:
    """As learned of this model on this engine, else the engine's constants."""
    estimated = room.bytes_for(terms)
    learned = request.learned_startup_bytes
    if learned is None:
        return Term(
            name=NAME,
            memory_bytes=estimated,
            exactness=Exactness.ESTIMATED,
            formula="constant per engine + a share of activations and graphs",
            inputs={"constant_bytes": room.constant_bytes},
        )
    return Term(
        name=NAME,
        memory_bytes=max(learned + _MARGIN_BYTES, estimated // _LEAST_LEARNED),
        exactness=Exactness.MEASURED,
        formula="as measured when this model started, + 64 MiB",
        inputs={"estimated_bytes": estimated, "measured_bytes": learned, "runs": request.learned_startup_runs},
    )


def with_more_startup(footprint: Footprint, added_bytes: int) -> Footprint:
    """After a start that missed memory: the same footprint with that much more room for starting."""
    larger = tuple(replace(one, terms=_with_missed(one.terms, added_bytes)) for one in footprint.larger)
    return replace(footprint, terms=_with_missed(footprint.terms, added_bytes), larger=larger)


def with_more_room(terms: tuple[Term, ...], added_bytes: int, why: str) -> tuple[Term, ...]:
    """With more room for starting; `why` names it among the inputs of the term."""
    return tuple(
        replace(term, memory_bytes=term.memory_bytes + added_bytes, inputs={**term.inputs, why: added_bytes})
        if term.name == NAME
        else term
        for term in terms
    )


def _with_missed(terms: tuple[Term, ...], added_bytes: int) -> tuple[Term, ...]:
    if any(term.name == NAME for term in terms):
        return with_more_room(terms, added_bytes, "missed_bytes")
    room = Term(name=NAME, memory_bytes=added_bytes, exactness=Exactness.MEASURED, formula="missed at the last start")
    return (*terms, room)
