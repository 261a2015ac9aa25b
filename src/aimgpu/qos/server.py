"""What is known about one engine: how much it does, takes, and whether it answers."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.qos.breaker import Breaker
from aimgpu.qos.concurrency import AdaptiveLimit

HIGH, MEDIUM = Priority.HIGH.rank, Priority.MEDIUM.rank


class Server(Protocol):
    """One ready Instance, as far as queueing needs to know it."""

    @property
    def instance_id(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def device_id(self) -> str | None: ...


@dataclass(slots=True, eq=False)
class ServerState:
    limit: AdaptiveLimit
    device_id: str | None
    breaker: Breaker = field(default_factory=Breaker)
    by_rank: list[int] = field(default_factory=lambda: [0, 0, 0])
    in_flight: int = 0
    reserved: dict[int, float] = field(default_factory=dict)  # slots kept free for this rank and above
    reserved_at: float = 0.0

    def began(self, rank: int) -> None:
        self.in_flight += 1
        self.by_rank[rank] += 1
        self.breaker.sent()

    def ended(self, rank: int) -> None:
        self.in_flight -= 1
        self.by_rank[rank] -= 1

    def can_take(self, rank: int, low_share: float) -> bool:
        """Room for a request of this rank, beside what is kept for higher ones."""
        allowed = self.limit.allowed
        if self.in_flight >= allowed:
            return False
        for kept_for, slots in self.reserved.items():
            if kept_for > rank and sum(self.by_rank[:kept_for]) >= max(1, allowed - round(slots)):
                return False
        return rank > 0 or low_share >= 1 or self.by_rank[0] < max(1, int(low_share * allowed))

    def was_blocked(self, rank: int, now: float, decay_seconds: float) -> None:
        """A request of this rank found every slot taken, some by lower ones: keep one more free from now on."""
        if sum(self.by_rank[:rank]) and self.limit.allowed > 1:
            self.relax(now, decay_seconds)
            self.reserved[rank] = min(self.reserved.get(rank, 0.0) + 1, self.limit.allowed - 1)

    def relax(self, now: float, decay_seconds: float) -> None:
        if self.reserved:
            keep = math.exp(-(now - self.reserved_at) / decay_seconds)
            self.reserved = {rank: left for rank, slots in self.reserved.items() if (left := slots * keep) > 0.1}  # noqa: PLR2004
        self.reserved_at = now
