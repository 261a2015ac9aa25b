"""What was given: the only thing that is charged, and released by the same record."""

from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain.ask import Priority


class Level(StrEnum):
    """How a Grant is enforced, strongest first."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    RUNTIME = "runtime"
    ADVISORY = "advisory"
    NONE = "none"

    @property
    def rank(self) -> int:
        """Higher enforces more."""
        return {"hardware": 4, "driver": 3, "runtime": 2, "advisory": 1, "none": 0}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A Partition and a Share of it, given to one instance."""

    id: str
    instance_id: str
    deployment: str
    node: str
    device_id: str
    partition_id: str
    memory_bytes: int
    compute_ppm: int | None
    priority: Priority
    level: Level
    exclusive: bool = False  # the whole Partition, whatever the bytes
