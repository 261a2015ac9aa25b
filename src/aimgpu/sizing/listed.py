"""The memory that a user listed for a model: a footprint is never below it."""

from collections.abc import Iterator

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.request import SizingRequest
from aimgpu.sizing.weights import same_precision
from aimgpu.units import format_bytes

NAME = "listed"


def listed_bytes(request: SizingRequest, precision: str) -> int | None:
    """Of one of its devices at this precision; None where none was listed."""
    for listed_precision, total in request.model.listed_memory:
        if same_precision(listed_precision, precision):
            return -(-total // request.tensor_parallel)
    return None


def listed_term(listed: int, terms: tuple[Term, ...]) -> Iterator[Term]:
    """What the other terms leave of the listed memory, if anything."""
    estimated = sum(term.memory_bytes for term in terms)
    if estimated < listed:
        yield Term(
            name=NAME,
            memory_bytes=listed - estimated,
            exactness=Exactness.ESTIMATED,
            formula="memory listed for the model - the other terms",
            inputs={"listed_bytes": listed, "other_terms_bytes": estimated},
        )


def listed_note(listed: int, terms: tuple[Term, ...]) -> str:
    """Which of the two figures was taken."""
    estimated, has = sum(term.memory_bytes for term in terms), f"{format_bytes(listed, up=True)} are listed for it"
    if estimated <= listed:
        return f"{has}, at least as much as the estimate, and are used"
    return f"{has}; the estimate of {format_bytes(estimated, up=True)} for this context and these requests is more, and is used"
