"""What was promised, as objectives that each request keeps or breaks."""

from dataclasses import dataclass

from aimgpu.domain import ServiceObjective
from aimgpu.units import PPM

_P95 = 0.95


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request that is over. A latency that was never reached is None; `failed` is our fault, not the caller's.

    Not frozen: one is made for every request, and freezing costs more than all the rest of it.
    """

    failed: bool
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    latency_seconds: float | None = None
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """At least `part` of the requests keep `measure` within `seconds` (None: only that they do not fail)."""

    name: str  # "ttft_p95"
    measure: str  # "ttft", "tpot", "latency" or "availability"
    part: float
    seconds: float | None = None

    def judge(self, sample: Sample) -> bool | None:
        """Kept, broken, or not applicable (one output token has no time per token). A failure breaks every target."""
        if sample.failed:
            return False
        if self.seconds is None:
            return True
        value = _measured(sample, self.measure)
        return None if value is None else value <= self.seconds


def targets_of(objective: ServiceObjective | None) -> tuple[Target, ...]:
    if objective is None:
        return ()
    found = [
        Target(name=f"{measure}_p95", measure=measure, part=_P95, seconds=milliseconds / 1000)
        for measure, milliseconds in (
            ("ttft", objective.ttft_p95_ms),
            ("tpot", objective.tpot_p95_ms),
            ("latency", objective.latency_p95_ms),
        )
        if milliseconds is not None
    ]
    if objective.availability_ppm is not None:
        found.append(Target(name="availability", measure="availability", part=objective.availability_ppm / PPM))
    return tuple(found)


def _measured(sample: Sample, measure: str) -> float | None:
    if measure == "ttft":
        return sample.ttft_seconds
    if measure == "tpot":
        return sample.tpot_seconds
    return sample.latency_seconds
