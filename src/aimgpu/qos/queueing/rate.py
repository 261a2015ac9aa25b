"""Token buckets, smoothed rates and counts of the last while."""

import math
from collections import deque
from dataclasses import dataclass, field

_PARTS = 60


@dataclass(slots=True)
class TokenBucket:
    """`per_second` on average, `burst` at once."""

    per_second: float
    burst: float
    tokens: float
    updated: float

    @classmethod
    def full(cls, per_second: float, burst: float, now: float) -> "TokenBucket":
        """A bucket that has not been used yet."""
        return cls(per_second, burst, burst, now)

    def take(self, now: float) -> float:
        """0 when the request may go; else the seconds until it could, and nothing is taken."""
        self.tokens = min(self.burst, self.tokens + (now - self.updated) * self.per_second)
        self.updated = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / self.per_second


@dataclass(slots=True)
class SmoothedRate:
    """Events a second over about the last `over_seconds`; None until enough has been seen to say."""

    over_seconds: float
    weight: float = 0.0  # decayed count of events
    seen_since: float | None = None
    updated: float = 0.0

    def add(self, now: float) -> None:
        """One event."""
        if self.seen_since is None:
            self.seen_since = self.updated = now
        self._decay(now)
        self.weight += 1

    def read(self, now: float) -> float | None:
        """Events per second; None: too little seen."""
        if self.seen_since is None:
            return None
        watched = now - self.seen_since
        if watched < self.over_seconds / 10:
            return None
        self._decay(now)
        # A window that is not yet full divides by what it covers of an exponential window, not by all of it.
        covered = self.over_seconds * (1 - math.exp(-watched / self.over_seconds))
        return self.weight / covered

    def _decay(self, now: float) -> None:
        self.weight *= math.exp(-(now - self.updated) / self.over_seconds)
        self.updated = now


@dataclass(slots=True)
class RecentCount:
    """Events of about the last `seconds`: in sixtieths of it, so that memory does not grow with how many there are."""

    seconds: float
    last: float | None = None  # when the last one was
    _parts: deque[list[int]] = field(default_factory=deque)  # which sixtieth, how many
    _part_ends: float = float("-inf")  # the last one

    def add(self, now: float) -> None:
        """One event."""
        self.last = now
        if now < self._part_ends:
            self._parts[-1][1] += 1
            return
        part = math.floor(now / self.seconds * _PARTS)
        self._part_ends = (part + 1) / _PARTS * self.seconds
        self._forget(now)
        self._parts.append([part, 1])

    def read(self, now: float) -> int:
        """Events in the window that ends now."""
        self._forget(now)
        return sum(count for _, count in self._parts)

    def _forget(self, now: float) -> None:
        oldest = math.floor(now / self.seconds * _PARTS) - _PARTS
        while self._parts and self._parts[0][0] <= oldest:
            self._parts.popleft()
