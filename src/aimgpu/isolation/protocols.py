"""What an isolation mechanism offers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from aimgpu.domain import Device, Grant, Level, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """How a grant will be made true: the level it really gives, and what the process must be started with."""

    level: Level
    mechanism: str  # "partition", "mig", "mps", "interposer", "engine flag", "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    control_group: Path | None = None  # where its processes must be put before they open the device
    beside: tuple[str, ...] = ()  # mechanisms that act beside it
    notes: tuple[str, ...] = ()  # what was wanted beside it and is not available, one sentence each

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """All of them, the one that gives the level first."""
        return (self.mechanism, *self.beside)


class Isolator(Protocol):
    def available_levels(self, device: Device, partition: Partition, *, exclusive: bool) -> frozenset[Level]:
        """The levels that a grant on this partition could have here and now."""

    def enforce(self, grant: Grant, device: Device, partition: Partition, *, grouped: bool = True) -> Enforcement:
        """Prepare what makes the grant true. Raises NotAllowed or HardwareUnavailable rather than giving less than asked.

        `grouped`: the launcher puts the process into a control group where that is asked for.
        """

    def release(self, grant: Grant) -> None:
        """Undo what `enforce` prepared; safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one mechanism can do on one partition; a level of None means nothing, for this reason."""

    level: Level | None
    reason: str | None = None


@runtime_checkable
class UsageMeter(Protocol):
    """An isolator or mechanism that knows how much of a grant is in use."""

    def read_used_bytes(self, grant: Grant) -> int | None:
        """None: nothing of this kind holds it."""


@runtime_checkable
class PeakMeter(Protocol):
    """An Isolator or Mechanism that knows the most of a grant that was in use at once."""

    def read_peak_bytes(self, grant: Grant) -> int | None:
        """Since the grant is held; None: nothing of this kind holds it."""


@runtime_checkable
class Grouping(Protocol):
    """A mechanism that limits a control group, so only a launcher that puts processes there can use it."""

    def group_of(self, grant: Grant) -> Path: ...


class Mechanism(Protocol):
    """One way to make a grant true; the chooser composes them."""

    name: str

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """What it gives here and now; cheap, no side effects."""

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement: ...

    def release(self, grant: Grant) -> None: ...


@runtime_checkable
class Resizer(Protocol):
    """An isolator or mechanism that can change the bytes of a grant while its instance runs."""

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        """From now on the instance may hold that much; does nothing where nothing of this kind holds it. Raises ShareInUse."""


@runtime_checkable
class SpaceLimit(Mechanism, Protocol):
    """A mechanism that limits compute to a part of the device's units, where others limit it to a part of the time.

    Only one of the two may act on a grant: half of the units for half of the time would be a quarter.
    """

    def holds_compute(self, grant: Grant, device: Device, partition: Partition) -> bool:
        """Whether `enforce` would limit the compute of this grant."""
