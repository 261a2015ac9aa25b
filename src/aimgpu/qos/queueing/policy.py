"""The numbers that say who waits how long."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aimgpu.domain import Priority, QueueSettings
from aimgpu.qos.queueing.recalls import RecallPolicy

DEFAULT_LONGEST_WAIT: Mapping[Priority, float] = {Priority.HIGH: 30.0, Priority.MEDIUM: 60.0, Priority.LOW: 120.0}
DEFAULT_MOST_QUEUED: Mapping[Priority, int] = {Priority.HIGH: 2048, Priority.MEDIUM: 1024, Priority.LOW: 1024}

# Batch work keeps every slot busy with a short queue; a long one only makes it old, and old work is lifted above others.
DEFAULT_REFUSE_ABOVE: Mapping[Priority, float] = {Priority.HIGH: 0.5, Priority.MEDIUM: 0.5, Priority.LOW: 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """`longest_wait_seconds` is the stated bound: who is admitted starts within it, or leaves with an honest refusal."""

    longest_wait_seconds: Mapping[Priority, float] = field(default_factory=lambda: dict(DEFAULT_LONGEST_WAIT))
    most_queued: Mapping[Priority, int] = field(default_factory=lambda: dict(DEFAULT_MOST_QUEUED))
    # The expected wait, as a part of the longest, at which new work is refused at the door.
    refuse_above: Mapping[Priority, float] = field(default_factory=lambda: dict(DEFAULT_REFUSE_ABOVE))
    reserve_part: float = 0.25  # at most this part of the slots is kept for higher classes; 0: none
    least_reserve_part: float = 0.0  # kept for the highest class even when none was seen: what a promise costs
    reserve_seconds: float = 600.0  # what higher classes needed at once fades over about this long
    device_limits: Mapping[str, int] = field(default_factory=dict)  # requests at once on a device, over all its models
    every_device_limit: int | None = None  # the same, of every device that is not named; None: as many as its engines take
    recall: RecallPolicy = field(default_factory=RecallPolicy)

    @property
    def limits_devices(self) -> bool:
        """Whether any device has a limit."""
        return self.every_device_limit is not None or bool(self.device_limits)

    def limit_of(self, device_id: str) -> int | None:
        """Requests at once on a device; None: no limit."""
        return self.device_limits.get(device_id, self.every_device_limit)

    def effective_rank(self, priority: Priority, waited: float) -> int:
        """Aging: lifted by one class when two thirds of the longest wait are gone, to the highest after five sixths.

        Later than the point where new work is refused: aging is for the few that were overtaken, not for a queue that is
        too long as a whole, which would raise everyone and protect no one.
        """
        part = waited / self.longest_wait_seconds[priority]
        lift = 0 if part < 2 / 3 else (1 if part < 5 / 6 else 2)
        return min(priority.rank + lift, Priority.HIGH.rank)


def policy_for(settings: QueueSettings) -> QueuePolicy:
    """The defaults, but for what the user wrote."""
    waits = {priority: settings.longest_wait_ms.of(priority) for priority in Priority}
    most = {priority: settings.most_queued.of(priority) for priority in Priority}
    return QueuePolicy(
        longest_wait_seconds={
            priority: DEFAULT_LONGEST_WAIT[priority] if wait is None else wait / 1000 for priority, wait in waits.items()
        },
        most_queued={priority: count or DEFAULT_MOST_QUEUED[priority] for priority, count in most.items()},
        every_device_limit=settings.per_gpu,
    )
