"""How long requests may wait, how many of them, and how many run on one GPU, as the user wrote it."""

from dataclasses import dataclass, field

from aimgpu.domain.ask import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class ByClass:
    """A number for each class; None: the default."""

    high: int | None = None
    medium: int | None = None
    low: int | None = None

    def of(self, priority: Priority) -> int | None:
        return {Priority.HIGH: self.high, Priority.MEDIUM: self.medium, Priority.LOW: self.low}[priority]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    per_gpu: int | None = None  # requests at once on each GPU, over all its models; None: as many as its engines take
    longest_wait_ms: ByClass = field(default_factory=ByClass)
    most_queued: ByClass = field(default_factory=ByClass)  # for each model
