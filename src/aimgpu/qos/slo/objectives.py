"""What was promised, as objectives that each request keeps or breaks."""

from dataclasses import dataclass, field

from aimgpu.domain import ServiceObjective
from aimgpu.domain.objective import MEASURES
from aimgpu.units import PPM

THROUGHPUT = "throughput"
_THROUGHPUT_PART = 0.95
_LEAST_ALLOWED = 1e-6  # who promised that nothing ever fails has no budget, and still a number to read


@dataclass(slots=True)
class Sample:
    """One request that is over. A latency that was never reached is None; `failed` is our fault, not the caller's.

    Neither frozen nor by keyword only: one is made for every request, and that would cost more than all the rest of it.
    """

    failed: bool
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    latency_seconds: float | None = None
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """At least `part` of the requests keep `measure` within `seconds` (None: only that they do not fail).

    With `tokens_per_second`: at least `part` of the time slices, see `throughput.ThroughputMeter`.
    """

    name: str  # "ttft_p95"
    measure: str  # "ttft", "tpot", "latency", "availability" or "throughput"
    part: float
    seconds: float | None = None
    tokens_per_second: float | None = None
    promise: str = field(init=False, compare=False)  # for people: "95% ttft <= 500ms"
    allowed: float = field(init=False, compare=False)  # part of the requests that may break it

    def __post_init__(self) -> None:
        object.__setattr__(self, "promise", self._describe())
        object.__setattr__(self, "allowed", max(1 - self.part, _LEAST_ALLOWED))

    def _describe(self) -> str:
        text = f"{self.part * 100:.6g}% {self.measure}"
        if self.tokens_per_second is not None:
            return f"{text} >= {self.tokens_per_second:g} tok/s"
        if self.seconds is None:
            return text
        return f"{text} <= {self.seconds * 1000:g}ms" if self.seconds < 1 else f"{text} <= {self.seconds:g}s"

    def judge(self, sample: Sample) -> bool | None:
        """Kept, broken, or not applicable (one output token has no time per token). A failure breaks every target."""
        if sample.failed:
            return False
        if self.seconds is None:
            return True
        value = _measured(sample, self.measure)
        return None if value is None else value <= self.seconds


def targets_of(objective: ServiceObjective | None) -> tuple[Target, ...]:
    """What each request is judged by; the classes' own promises and a rate of tokens are not among them."""
    if objective is None:
        return ()
    found = [
        Target(name=f"{measure}_p{percent}", measure=measure, part=percent / 100, seconds=milliseconds / 1000)
        for measure in MEASURES
        for percent, milliseconds in objective.percentiles_ms(measure).items()
    ]
    if objective.availability_ppm is not None:
        found.append(Target(name="availability", measure="availability", part=objective.availability_ppm / PPM))
    return tuple(found)


def throughput_target(objective: ServiceObjective | None) -> Target | None:
    """Judged by slices of time and not by request."""
    if objective is None or objective.tokens_per_second is None:
        return None
    return Target(
        name=THROUGHPUT, measure=THROUGHPUT, part=_THROUGHPUT_PART, tokens_per_second=float(objective.tokens_per_second)
    )


def _measured(sample: Sample, measure: str) -> float | None:
    if measure == "ttft":
        return sample.ttft_seconds
    if measure == "tpot":
        return sample.tpot_seconds
    return sample.latency_seconds
