"""Decisions: a Placement, or a Refusal with a reason for every Device looked at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One Share on one Partition: what a Grant will be made of."""

    node: str
    device_id: str
    partition_id: str
    memory_bytes: int
    compute_ppm: int | None = None
    exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    ask: str  # the Ask's name
    slots: tuple[Slot, ...]
    because: str  # why here, one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReason:
    """Why one Device was not taken."""

    node: str
    device_id: str
    code: str  # stable: "memory", "busy", "part", "layout", "isolation", "compute", "foreign"
    text: str
    short_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    ask: str
    summary: str
    reasons: tuple[DeviceReason, ...]
    would_fit: tuple[str, ...] = ()  # the smallest changes that would make it fit, one sentence each


Decision = Placement | Refusal
