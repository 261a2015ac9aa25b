"""Sliding windows by time: counts and latencies of the last minutes and hours in bounded memory.

A request is written down once, in the slice of now; a slice that is over is added to every window. A window is a ring of
slices of its own width; the oldest is forgotten whole, so a window of an hour covers 59 to 60 minutes. Latencies go into
buckets that grow by 5 %, so a percentile read back is at most 5 % above the true one.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

SLICES = 60
_GROWTH = math.log(1.05)
_SMALLEST_SECONDS = 1e-4

_Key = TypeVar("_Key", int, str)
Buckets = dict[int, int]  # bucket -> how many


def bucket_of(seconds: float) -> int:
    """The number of the bucket that a latency falls into."""
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
    """What was counted in a short stretch of time."""

    began: float
    requests: int = 0
    failures: int = 0
    output_tokens: int = 0
    met: dict[str, int] = field(default_factory=dict)  # objective -> requests that kept it
    judged: dict[str, int] = field(default_factory=dict)  # objective -> requests that it applied to
    ttft: Buckets = field(default_factory=dict)
    tpot: Buckets = field(default_factory=dict)
    latency: Buckets = field(default_factory=dict)

    def merge(self, other: "Slice", sign: int = 1) -> None:
        """Add it, or with -1 take away what was added before."""
        self.requests += sign * other.requests
        self.failures += sign * other.failures
        self.output_tokens += sign * other.output_tokens
        _add(self.met, other.met, sign)
        _add(self.judged, other.judged, sign)
        for own, added in ((self.ttft, other.ttft), (self.tpot, other.tpot), (self.latency, other.latency)):
            _add(own, added, sign)


def _add(own: dict[_Key, int], added: Mapping[_Key, int], sign: int) -> None:
    if not own and sign > 0 and 0 not in added.values():
        own.update(added)
        return
    for key, count in added.items():
        left = own.get(key, 0) + sign * count
        if left:
            own[key] = left
        else:
            own.pop(key, None)


@dataclass(slots=True)
class SlidingWindow:
    """The slices of the last `seconds`, and their sum."""

    seconds: float
    _slices: deque[Slice] = field(default_factory=deque)
    _sum: Slice = field(default_factory=lambda: Slice(began=float("-inf")))  # of all slices, so that they need not be added up

    def add(self, part: Slice) -> None:
        """A slice that is over; it is counted where it began."""
        width = self.seconds / SLICES
        began = math.floor(part.began / width) * width
        if not self._slices or self._slices[-1].began < began:
            self._slices.append(Slice(began=began))
            self._forget(part.began)
        self._slices[-1].merge(part)
        self._sum.merge(part)

    def total(self, now: float) -> Slice:
        """Everything in the window."""
        self._forget(now)
        merged = Slice(began=now)
        merged.merge(self._sum)
        return merged

    def parts(self, now: float, seconds: float | None = None) -> Iterable[Slice]:
        """What adds up to all of the window, or to its last `seconds`; not to be changed."""
        self._forget(now)
        return (self._sum,) if seconds is None else [part for part in self._slices if part.began > now - seconds]

    def _forget(self, now: float) -> None:
        while self._slices and self._slices[0].began <= now - self.seconds:
            self._sum.merge(self._slices.popleft(), -1)
