"""Finished requests counted per model, as Prometheus wants them: by status, and histograms of their latencies.

Counted here and not by Prometheus's client library, whose metrics cost more per request than the whole queue does.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

# As the OpenTelemetry GenAI conventions have them, with a longer tail for engines that queue.
FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 15, 30, 60, 120)
OUTPUT_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
LATENCY_BOUNDS = tuple(0.01 * 2**power for power in range(14))


@dataclass(slots=True)
class Histogram:
    """`counts` has one entry per bound and one for what lies above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class ModelCounts:
    """The requests of one model since the start."""

    by_status: dict[int, int] = field(default_factory=dict)
    latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN_BOUNDS))


class RequestCounts:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}

    def observe(self, model: str, status: int, seconds: float, ttft_seconds: float | None, tpot_seconds: float | None) -> None:
        """One request that is over."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelCounts()
        found.by_status[status] = found.by_status.get(status, 0) + 1
        found.latency.observe(seconds)
        if ttft_seconds is not None:
            found.first_token.observe(ttft_seconds)
        if tpot_seconds is not None:
            found.output_token.observe(tpot_seconds)

    def read(self) -> tuple[tuple[str, ModelCounts], ...]:
        """Models by name, with what was counted so far."""
        return tuple(self._models.items())
