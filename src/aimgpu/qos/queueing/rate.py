"""Token buckets and smoothed rates."""

import math
from dataclasses import dataclass


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
