"""Prometheus's text format, written directly: the client library takes ten times as long for the same text."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate

from aimgpu.monitoring.metrics import METRICS, Metric, MetricKind
from aimgpu.qos.slo.request_counts import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_SERIES = 5000  # of one metric: whatever happens, a scrape stays bounded

Row = tuple[str, tuple[str, ...], float]  # metric, label values in the table's order, value


class Exposition:
    """Collects rows by metric and renders them in the table's order."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self.dropped = 0

    def add(self, rows: Iterable[Row]) -> None:
        lines, current = self._lines, ""
        found: list[str] = []
        for name, labels, value in rows:
            if name is not current:
                current, found = name, lines.setdefault(name, [])
            if len(found) < MOST_SERIES:
                found.append(f"{_prefix(name, labels)} {value}")
            else:
                self.dropped += 1

    def add_histogram(self, name: str, labels: tuple[str, ...], histogram: Histogram) -> None:
        template = _histogram_template(name, labels)
        found = self._lines.setdefault(name, [])
        if len(found) * (len(histogram.counts) + 2) > MOST_SERIES:
            self.dropped += len(histogram.counts) + 2
            return
        counts = tuple(accumulate(histogram.counts))
        found.append(template % (*counts, histogram.total, counts[-1]))

    def family(self, name: str) -> list[str]:
        """The lines of a metric, for a writer that makes them itself with `prefixes`."""
        return self._lines.setdefault(name, [])

    def render(self) -> bytes:
        texts = []
        for name in METRICS:
            lines = self._lines.get(name)
            if lines:
                texts.append(_head(name))
                texts.append("\n".join(lines))
        return ("\n".join(texts) + "\n").encode()


def escape(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value


@lru_cache(maxsize=256)
def _head(name: str) -> str:
    metric = METRICS[name]
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {_exported(metric)} {text}\n# TYPE {_exported(metric)} {metric.kind.value}"


def _exported(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name


@lru_cache(maxsize=32_768)
def _prefix(name: str, labels: tuple[str, ...]) -> str:
    metric = METRICS[name]
    return f"{_exported(metric)}{{{_labels(metric.labels, labels)}}}"


@lru_cache(maxsize=4096)
def _histogram_template(name: str, labels: tuple[str, ...]) -> str:
    """To be filled with the cumulative counts, the sum and the count."""
    metric = METRICS[name]
    text = _labels(metric.labels, labels).replace("%", "%%")
    bounds = (*(_bound(bound) for bound in metric.buckets), "+Inf")
    buckets = [f'{name}_bucket{{{text},le="{bound}"}} %d' for bound in bounds]
    return "\n".join([*buckets, f"{name}_sum{{{text}}} %r", f"{name}_count{{{text}}} %d"])


@lru_cache(maxsize=8192)
def prefixes(names: tuple[str, ...], labels: tuple[str, ...]) -> tuple[str, ...]:
    """What a line of each of these metrics begins with; all have the same labels."""
    return tuple(_prefix(name, labels) for name in names)


def _bound(value: float) -> str:
    return str(float(value))


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{escape(value)}"' for name, value in zip(names, values, strict=True))


def count_series(text: bytes) -> Mapping[str, int]:
    """Lines by the name that they begin with; for tests and the benchmark."""
    found: dict[str, int] = {}
    for line in text.decode().splitlines():
        if line and not line.startswith("#"):
            name = line.partition("{")[0]
            found[name] = found.get(name, 0) + 1
    return found
