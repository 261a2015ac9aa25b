"""Sliding windows by time: counts and latencies of the last minutes and hours in bounded memory.

A window is a ring of slices; the oldest slice is forgotten whole, so a window of an hour covers 59 to 60 minutes. Latencies go
into buckets that grow by 5 %, so a percentile read back is at most 5 % above the true one.
"""

import math
from collections import deque
from dataclasses import dataclass, field

SLICES = 60
_GROWTH = math.log(1.05)
_SMALLEST_SECONDS = 1e-4


@dataclass(slots=True)
class Histogram:
    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, seconds: float) -> None:
        bucket = 0 if seconds <= _SMALLEST_SECONDS else math.ceil(math.log(seconds / _SMALLEST_SECONDS) / _GROWTH)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += 1

    def merge(self, other: "Histogram") -> None:
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += other.total

    def percentile(self, part: float) -> float | None:
        """The upper edge of the bucket that holds it; None when nothing was seen."""
        if self.total == 0:
            return None
        wanted = max(1, math.ceil(part * self.total))
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return _SMALLEST_SECONDS * math.exp(bucket * _GROWTH)
        raise AssertionError  # the counts add up to the total


@dataclass(slots=True)
class Slice:
    began: float
    requests: int = 0
    failures: int = 0
    output_tokens: int = 0
    met: dict[str, int] = field(default_factory=dict)  # objective -> requests that kept it
    judged: dict[str, int] = field(default_factory=dict)  # objective -> requests that it applied to
    latencies: dict[str, Histogram] = field(default_factory=dict)

    def merge(self, other: "Slice") -> None:
        self.requests += other.requests
        self.failures += other.failures
        self.output_tokens += other.output_tokens
        for name, count in other.met.items():
            self.met[name] = self.met.get(name, 0) + count
        for name, count in other.judged.items():
            self.judged[name] = self.judged.get(name, 0) + count
        for name, histogram in other.latencies.items():
            self.latencies.setdefault(name, Histogram()).merge(histogram)

    def add_latency(self, name: str, seconds: float) -> None:
        histogram = self.latencies.get(name)
        if histogram is None:
            histogram = self.latencies[name] = Histogram()
        histogram.add(seconds)


@dataclass(slots=True)
class SlidingWindow:
    seconds: float
    first_seen: float | None = None
    _slices: deque[Slice] = field(default_factory=deque)

    def slice_at(self, now: float) -> Slice:
        """Where an event of now is counted."""
        width = self.seconds / SLICES
        began = math.floor(now / width) * width
        if not self._slices or self._slices[-1].began < began:
            self._slices.append(Slice(began))
            self._forget(now)
        if self.first_seen is None:
            self.first_seen = now
        return self._slices[-1]

    def total(self, now: float) -> Slice:
        self._forget(now)
        merged = Slice(now)
        for part in self._slices:
            merged.merge(part)
        return merged

    def covered_seconds(self, now: float) -> float:
        """How much time the numbers speak for: less than the window while it is young."""
        if self.first_seen is None:
            return 0.0
        return min(self.seconds, max(now - self.first_seen, self.seconds / SLICES))

    def _forget(self, now: float) -> None:
        while self._slices and self._slices[0].began <= now - self.seconds:
            self._slices.popleft()
