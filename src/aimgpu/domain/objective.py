"""What was promised to callers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from aimgpu.domain.ask import Priority
from aimgpu.units import format_duration_ms

MEASURES = ("ttft", "tpot", "latency")
PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObjective:
    """None: nothing was promised. `ttft_p95_ms`: of 100 requests, 95 have their first token within that time.

    Times per token may be fractions of a millisecond: small models need less than 3 ms on a large GPU.

    A class with promises of its own (`high`, `medium`, `low`) is held to those alone; the others to what stands beside them.
    """

    ttft_p50_ms: int | None = None
    ttft_p90_ms: int | None = None
    ttft_p95_ms: int | None = None
    ttft_p99_ms: int | None = None
    tpot_p50_ms: float | None = None
    tpot_p90_ms: float | None = None
    tpot_p95_ms: float | None = None
    tpot_p99_ms: float | None = None
    latency_p50_ms: int | None = None
    latency_p90_ms: int | None = None
    latency_p95_ms: int | None = None
    latency_p99_ms: int | None = None
    tokens_per_second: int | None = None  # of output, while there are requests
    availability_ppm: int | None = None
    high: "ServiceObjective | None" = None
    medium: "ServiceObjective | None" = None
    low: "ServiceObjective | None" = None

    def of_class(self, priority: Priority) -> "ServiceObjective":
        """What a request of this class was promised."""
        return self.own_of(priority) or self

    def own_of(self, priority: Priority) -> "ServiceObjective | None":
        """What only this class was promised; None: as the others."""
        return {Priority.HIGH: self.high, Priority.MEDIUM: self.medium, Priority.LOW: self.low}[priority]

    def percentiles_ms(self, measure: str) -> Mapping[int, float]:
        """For "ttft", "tpot" or "latency": percent of the requests -> milliseconds, as promised."""
        found = {percent: getattr(self, f"{measure}_p{percent}_ms") for percent in PERCENTS}
        return {percent: milliseconds for percent, milliseconds in found.items() if milliseconds is not None}

    @property
    def has_times(self) -> bool:
        """Whether any time was promised, to all requests or to one class."""
        own = any(self.percentiles_ms(measure) for measure in MEASURES)
        return own or any(one is not None and one.has_times for one in (self.high, self.medium, self.low))

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """A promise that cannot be meant, as the name of its second half and a sentence."""
        for measure in MEASURES:
            for (fewer, longer), (more, shorter) in pairwise(self.percentiles_ms(measure).items()):
                if shorter < longer:
                    second = f"{measure}_p{more}"
                    first = f"{measure}_p{fewer} ({format_duration_ms(longer)})"
                    yield second, f"{second} ({format_duration_ms(shorter)}) is shorter than {first}"
