"""Learning from measured memory: estimates are corrected by what runs of the same kind really took.

A measurement belongs to an engine, its version, an architecture family and a GPU part; it corrects estimates of that kind only,
and only terms that are estimates. Nothing is baked in: without its measurements an estimate is what it was before.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from aimgpu.domain import Exactness, Term
from aimgpu.errors import InvalidInput

_LEAST, _MOST = 0.5, 2.0  # a measurement further off than this is more likely wrong than the formula
_RUNS_TO_SHRINK = 3  # one run may have been idle; raising an estimate needs only one
_KEPT = 32  # newest runs of one kind that count
_STARTS_KEPT = 8  # newest runs of one model that count for its start
_PPM = 1_000_000
_LARGEST_BYTES = 1 << 50
_LAST_SECOND = 253_402_300_799  # of the year 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one term of one run was estimated at, without corrections, and what it took."""

    model: str
    engine: str
    engine_version: str | None
    family: str
    gpu: str
    term: str
    estimated_bytes: int
    measured_bytes: int
    at: int = 0  # seconds since 1970, given by who measured

    def __post_init__(self) -> None:
        for value in (self.estimated_bytes, self.measured_bytes):
            if not 0 <= value <= _LARGEST_BYTES:
                raise InvalidInput(f"{value} bytes cannot have been measured", hint="Measurements are bytes on one device.")
        if not 0 <= self.at <= _LAST_SECOND:
            raise InvalidInput(f"{self.at} is not the time of a measurement", hint="Times are seconds since 1970.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKind:
    """What a measurement must share with an estimate to correct it."""

    engine: str
    engine_version: str | None
    family: str
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """By how much an estimate of one term is multiplied, in millionths, and by how many runs that is borne out."""

    ppm: int
    runs: int


def learn(measurements: Iterable[Measurement], kind: MeasuredKind) -> dict[str, Correction]:
    """The corrections of one kind, by term: the median of measured / estimated, within bounds."""
    ratios: dict[str, list[tuple[int, float]]] = {}
    for one in measurements:
        if kind_of(one) == kind and one.estimated_bytes > 0 and one.measured_bytes > 0:
            ratios.setdefault(one.term, []).append((one.at, one.measured_bytes / one.estimated_bytes))
    return {term: _correction(found) for term, found in ratios.items()}


def learn_startup(measurements: Iterable[Measurement], kind: MeasuredKind, model: str) -> tuple[int, int] | None:
    """The most that starting this very model took in its newest runs, and how many runs those are; None: never seen."""
    found = [one for one in measurements if one.model == model and one.term == "startup" and kind_of(one) == kind]
    newest = sorted(found, key=lambda one: one.at)[-_STARTS_KEPT:]
    return (max(one.measured_bytes for one in newest), len(newest)) if newest else None


def kind_of(measurement: Measurement) -> MeasuredKind:
    """What this measurement can correct."""
    return MeasuredKind(
        engine=measurement.engine,
        engine_version=measurement.engine_version,
        family=measurement.family,
        gpu=measurement.gpu,
    )


def apply_correction(term: Term, correction: Correction | None) -> Term:
    """The term as measured runs would have it; what is exact stays as it is."""
    if correction is None or term.exactness is Exactness.EXACT or correction.ppm == _PPM:
        return term
    return replace(
        term,
        memory_bytes=-(-term.memory_bytes * correction.ppm // _PPM),
        exactness=Exactness.MEASURED,
        formula=f"({term.formula}) x {correction.ppm / _PPM:.3f}, learned from {correction.runs} runs",
        inputs={**term.inputs, "estimated_bytes": term.memory_bytes, "runs": correction.runs},
    )


def to_json(measurements: Iterable[Measurement]) -> list[dict[str, object]]:
    """Rows for the measurements file."""
    return [asdict(one) for one in measurements]


def from_json(rows: object) -> tuple[Measurement, ...]:
    """Rows that were written by `to_json`; a row of another shape is refused."""
    if not isinstance(rows, list):
        raise InvalidInput("the measurements are not a list", hint="Remove the file; estimates go on without it.")
    return tuple(_measurement(row) for row in rows)


def _measurement(row: object) -> Measurement:
    if not isinstance(row, Mapping):
        raise InvalidInput("a measurement is not a table", hint="Remove it; estimates go on without it.")
    version = row.get("engine_version")
    try:
        return Measurement(
            model=str(row["model"]),
            engine=str(row["engine"]),
            engine_version=None if version is None else str(version),
            family=str(row["family"]),
            gpu=str(row["gpu"]),
            term=str(row["term"]),
            estimated_bytes=int(row["estimated_bytes"]),
            measured_bytes=int(row["measured_bytes"]),
            at=int(row.get("at", 0)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"a measurement is damaged: {error}", hint="Remove it; estimates go on without it.") from error


def _correction(found: list[tuple[int, float]]) -> Correction:
    newest = [ratio for _, ratio in sorted(found)[-_KEPT:]]
    median = statistics.median(newest)
    if median < 1 and len(newest) < _RUNS_TO_SHRINK:
        median = 1.0
    bounded = min(max(median, _LEAST), _MOST)
    return Correction(ppm=round(bounded * _PPM), runs=len(newest))
