"""What was given: the only thing that is charged, and released by the same record."""

from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain.ask import IsolationRequirement, Priority


class Level(StrEnum):
    """How a grant is enforced, strongest first."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    RUNTIME = "runtime"
    ADVISORY = "advisory"
    NONE = "none"

    @property
    def rank(self) -> int:
        """Higher enforces more."""
        return _RANKS[self]


_RANKS = {
    Level.NONE: 0,
    Level.ADVISORY: 1,
    Level.RUNTIME: 2,
    Level.DRIVER: 3,
    Level.HARDWARE: 4,
}  # asked for at every partition

# The weakest level that meets a requirement.
LEAST_LEVEL = {
    IsolationRequirement.HARDWARE: Level.HARDWARE,
    IsolationRequirement.ENFORCED: Level.RUNTIME,
    IsolationRequirement.ADVISORY: Level.ADVISORY,
    IsolationRequirement.NONE: Level.NONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A partition and a share of it, given to one instance."""

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
    exclusive: bool = False  # the whole partition, whatever the bytes
    mechanisms: tuple[str, ...] = ()  # what enforces it ("interposer", "mig", "dmem" and "interposer"); none: nothing does yet

    @property
    def mechanism(self) -> str | None:
        """The same for people; None: nothing does yet."""
        return " + ".join(self.mechanisms) or None
