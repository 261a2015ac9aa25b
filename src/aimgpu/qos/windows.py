"""Sliding windows by time: counts and latencies of the last minutes and hours in bounded memory.

A request is written down once, in the slice of now; a slice that is over is added to every window. A window is a ring of
slices of its own width; the oldest is forgotten whole, so a window of an hour covers 59 to 60 minutes. Latencies go into
buckets that grow by 5 %, so a percentile read back is at most 5 % above the true one.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SLICES = 60
_GROWTH = math.log(1.05)
_SMALLEST_SECONDS = 1e-4

Buckets = dict[int, int]  # bucket -> how many


def bucket_of(seconds: float) -> int:
    return 0 if seconds <= _SMALLEST_SECONDS else math.ceil(math.log(seconds / _SMALLEST_SECONDS) / _GROWTH)


def percentile(buckets: Mapping[int, int], part: float) -> float | None:
    """The upper edge of the bucket that holds it; None when nothing was seen."""
    total = sum(buckets.values())
    if total == 0:
        return None
    wanted = max(1, math.ceil(part * total))
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
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
    ttft: Buckets = field(default_factory=dict)
    tpot: Buckets = field(default_factory=dict)
    latency: Buckets = field(default_factory=dict)

    def merge(self, other: "Slice") -> None:
        self.requests += other.requests
        self.failures += other.failures
        self.output_tokens += other.output_tokens
        for mine, theirs in ((self.met, other.met), (self.judged, other.judged)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        for own, added in ((self.ttft, other.ttft), (self.tpot, other.tpot), (self.latency, other.latency)):
            for bucket, count in added.items():
                own[bucket] = own.get(bucket, 0) + count


@dataclass(slots=True)
class SlidingWindow:
    seconds: float
    _slices: deque[Slice] = field(default_factory=deque)

    def add(self, part: Slice) -> None:
        """A slice that is over; it is counted where it began."""
        width = self.seconds / SLICES
        began = math.floor(part.began / width) * width
        if not self._slices or self._slices[-1].began < began:
            self._slices.append(Slice(began))
            self._forget(part.began)
        self._slices[-1].merge(part)

    def total(self, now: float, seconds: float | None = None) -> Slice:
        """All of the window, or its last `seconds`."""
        self._forget(now)
        merged = Slice(now)
        for part in self._slices:
            if seconds is None or part.began > now - seconds:
                merged.merge(part)
        return merged

    def _forget(self, now: float) -> None:
        while self._slices and self._slices[0].began <= now - self.seconds:
            self._slices.popleft()
