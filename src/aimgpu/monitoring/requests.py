"""Requests as they end, for Prometheus.

Counted here and not by the library's own metrics, which cost more on every request than the whole queue does.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from aimgpu.monitoring.metrics import METRICS

_LATENCY = METRICS["aim_model_request_latency_seconds"]
_FIRST_TOKEN = METRICS["aim_model_time_to_first_token_seconds"]
_OUTPUT_TOKEN = METRICS["aim_model_time_per_output_token_seconds"]


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        found, seen = [], 0
        for bound, count in zip((*map(floatToGoString, self.bounds), "+Inf"), tuple(self.counts), strict=True):
            seen += count
            found.append((bound, float(seen)))
        return found


@dataclass(slots=True)
class _OfModel:
    by_status: dict[int, int] = field(default_factory=dict)
    latency: _Histogram = field(default_factory=lambda: _Histogram(_LATENCY.buckets))
    first_token: _Histogram = field(default_factory=lambda: _Histogram(_FIRST_TOKEN.buckets))
    output_token: _Histogram = field(default_factory=lambda: _Histogram(_OUTPUT_TOKEN.buckets))


class RequestCollector(Collector):
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self._models: dict[str, _OfModel] = {}

    def observe(self, model: str, status: int, seconds: float, ttft_seconds: float | None, tpot_seconds: float | None) -> None:
        """One request that is over."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _OfModel()
        found.by_status[status] = found.by_status.get(status, 0) + 1
        found.latency.observe(seconds)
        if ttft_seconds is not None:
            found.first_token.observe(ttft_seconds)
        if tpot_seconds is not None:
            found.output_token.observe(tpot_seconds)

    def describe(self) -> list[Metric]:
        return []  # says to the registry that it need not collect at once

    def collect(self) -> Iterator[Metric]:
        models = tuple(self._models.items())
        metric = METRICS["aim_model_requests"]
        counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for name, found in models:
            for status, count in tuple(found.by_status.items()):
                counter.add_metric((name, str(status)), count)
        yield counter
        for metric in (_LATENCY, _FIRST_TOKEN, _OUTPUT_TOKEN):
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for name, found in models:
                histogram = {_LATENCY.name: found.latency, _FIRST_TOKEN.name: found.first_token}.get(
                    metric.name, found.output_token
                )
                if any(histogram.counts):
                    family.add_metric((name,), buckets=histogram.buckets(), sum_value=histogram.total)
            yield family
