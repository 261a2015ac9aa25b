"""What an isolation mechanism offers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aimgpu.domain import Device, Grant, Level, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """How a Grant will be made true: the Level it really gives, and what the process must be started with."""

    level: Level
    mechanism: str  # "partition", "mig", "mps", "interposer", "engine flag", "none"
    environment: Mapping[str, str] = field(default_factory=dict)


class Isolator(Protocol):
    def available_levels(self, device: Device, partition: Partition, *, exclusive: bool) -> frozenset[Level]:
        """The Levels that a Grant on this Partition could have here and now."""

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """Prepare what makes the Grant true. Raises NotAllowed or HardwareUnavailable rather than giving less than asked."""

    def release(self, grant: Grant) -> None:
        """Undo what `enforce` prepared; safe to call twice."""
