"""What is known about one engine and about one device: how much they do, what they take, whether they answer."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.qos.queueing.breaker import Breaker
from aimgpu.qos.queueing.concurrency import AdaptiveLimit
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.ticket import Ticket

HIGHEST = Priority.HIGH.rank


class Backend(Protocol):
    """One ready instance, as far as queueing needs to know it."""

    @property
    def instance_id(self) -> str:
        """Stable while the instance lives."""

    @property
    def slots(self) -> int:
        """Requests that it serves at once."""

    @property
    def device_id(self) -> str | None:
        """The device that it shares with others; None: not known."""


class Arrival(Protocol):
    """A model that has no server yet."""

    @property
    def slots(self) -> int:
        """Requests that it will serve at once."""

    def seconds_left(self, now: float) -> float | None:
        """Until it is up; None: not known."""


@dataclass(slots=True, eq=False)
class Pool:
    """Slots that requests of all classes share, some kept for higher classes: as many as these needed at once lately."""

    by_rank: list[int] = field(default_factory=lambda: [0, 0, 0])
    in_flight: int = 0
    reserved: dict[int, tuple[float, float]] = field(default_factory=dict)  # rank and above -> most at once, when

    def began(self, rank: int) -> None:
        """A request of this rank holds a slot."""
        self.in_flight += 1
        self.by_rank[rank] += 1

    def ended(self, rank: int) -> None:
        """A request of this rank has given its slot back."""
        self.in_flight -= 1
        self.by_rank[rank] -= 1

    def has_room(self, rank: int, allowed: int, policy: QueuePolicy, now: float, low_share: float = 1.0) -> bool:
        """Room for a request of this rank, beside what is kept for higher ones; the lowest always has one slot."""
        if self.in_flight >= allowed:
            return False
        for above in range(rank + 1, len(self.by_rank)):
            kept = self._kept_for(above, allowed, policy, now)
            if kept and sum(self.by_rank[:above]) >= max(1, allowed - kept):
                return False
        return rank > 0 or low_share >= 1 or self.by_rank[0] < max(1, int(low_share * allowed))

    def usable(self, rank: int, allowed: int, policy: QueuePolicy, now: float, low_share: float) -> int:
        """Slots that requests of this rank may hold at most, here and now."""
        most = allowed
        for above in range(rank + 1, len(self.by_rank)):
            most = min(most, allowed - self._kept_for(above, allowed, policy, now))
        if rank == 0:
            most = min(most, int(low_share * allowed))
        return max(most, 1)

    def note_need(self, rank: int, waiting: int, now: float, decay_seconds: float) -> None:
        """A request of this rank came while `waiting` like it wait: that number of slots would have been needed at once."""
        need = sum(self.by_rank[rank:]) + waiting + 1
        kept = self.reserved.get(rank)
        if kept is None or need >= kept[0] * math.exp((kept[1] - now) / decay_seconds):
            self.reserved[rank] = (float(need), now)

    def _kept_for(self, rank: int, allowed: int, policy: QueuePolicy, now: float) -> int:
        """What such requests needed at once lately, fading, at most the policy's part; for the highest at least its least."""
        least = int(policy.least_reserve_part * allowed) if rank == HIGHEST else 0
        seen = self.reserved.get(rank)
        if seen is None:
            return least
        faded = round(seen[0] * math.exp((seen[1] - now) / policy.reserve_seconds))
        return max(least, min(faded, int(policy.reserve_part * allowed)))


@dataclass(slots=True, eq=False)
class BackendState:
    """What is known about one engine while it is listed."""

    limit: AdaptiveLimit
    device_id: str | None
    pool: Pool = field(default_factory=Pool)
    breaker: Breaker = field(default_factory=Breaker)
    recallable: dict[Ticket, None] = field(default_factory=dict)  # runs here below the highest class, nothing of it is out yet
