"""The gateway's request counts as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from aimgpu.monitoring.metrics import METRICS
from aimgpu.qos.slo.request_counts import Histogram, ModelCounts, RequestCounts

_LATENCY = METRICS["aim_model_request_latency_seconds"]
_FIRST_TOKEN = METRICS["aim_model_time_to_first_token_seconds"]
_OUTPUT_TOKEN = METRICS["aim_model_time_per_output_token_seconds"]


class RequestCollector(Collector):
    """Reads the counts at each scrape."""

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        """Nothing: so the registry does not collect when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One counter and three histograms per model."""
        models = self._counts.read()
        metric = METRICS["aim_model_requests"]
        counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for name, found in models:
            for status, count in tuple(found.by_status.items()):
                counter.add_metric((name, str(status)), count)
        yield counter
        for metric in (_LATENCY, _FIRST_TOKEN, _OUTPUT_TOKEN):
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for name, found in models:
                histogram = _histogram_of(metric.name, found)
                if any(histogram.counts):
                    family.add_metric((name,), buckets=_cumulative(histogram), sum_value=histogram.total)
            yield family


def _histogram_of(metric: str, counts: ModelCounts) -> Histogram:
    if metric == _LATENCY.name:
        return counts.latency
    return counts.first_token if metric == _FIRST_TOKEN.name else counts.output_token


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    found, seen = [], 0
    for bound, count in zip((*map(floatToGoString, histogram.bounds), "+Inf"), tuple(histogram.counts), strict=True):
        seen += count
        found.append((bound, float(seen)))
    return found
