"""Decisions: a placement, or a refusal with a reason for every device looked at."""

from dataclasses import dataclass

from aimgpu.domain.ask import Priority
from aimgpu.domain.grant import Grant, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One share on one partition: what a grant will be made of."""

    node: str
    device_id: str
    partition_id: str
    memory_bytes: int
    compute_ppm: int | None = None
    exclusive: bool = False

    @classmethod
    def of(cls, grant: Grant) -> "Slot":
        return cls(
            node=grant.node,
            device_id=grant.device_id,
            partition_id=grant.partition_id,
            memory_bytes=grant.memory_bytes,
            compute_ppm=grant.compute_ppm,
            exclusive=grant.exclusive,
        )

    def granted(self, grant_id: str, instance_id: str, deployment: str, priority: Priority, level: Level) -> Grant:
        return Grant(
            id=grant_id,
            instance_id=instance_id,
            deployment=deployment,
            node=self.node,
            device_id=self.device_id,
            partition_id=self.partition_id,
            memory_bytes=self.memory_bytes,
            compute_ppm=self.compute_ppm,
            priority=priority,
            level=level,
            exclusive=self.exclusive,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    ask: str  # the ask's name
    slots: tuple[Slot, ...]
    because: str  # why here, one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReason:
    """Why one device was not taken."""

    node: str
    device_id: str
    code: str  # stable; placement.reasons.ReasonCode lists them
    text: str
    short_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    ask: str
    summary: str
    reasons: tuple[DeviceReason, ...]
    would_fit: tuple[str, ...] = ()  # the smallest changes that would make it fit, one sentence each


Decision = Placement | Refusal
