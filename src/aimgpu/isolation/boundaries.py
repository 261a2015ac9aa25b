"""The two ends of the scale: a boundary that the hardware draws, and a wish that an engine is asked to respect."""

from aimgpu.domain import Device, Grant, Level, Partition
from aimgpu.isolation.protocols import Enforcement, Offer


class HardwareBoundary:
    """A partition (or whole device) that one grant has for itself: its size is the limit, and the hardware keeps it."""

    name = "partition"

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """The level that it can give on this partition, or why it gives none."""
        if device.simulated:
            return Offer(level=None, reason=f"{device.id} is simulated")
        if not exclusive:
            return Offer(level=None, reason=f"{partition.id} is shared; the hardware does not part its tenants")
        if not partition.capped:
            return Offer(level=None, reason=f"{partition.id} has no cap: its neighbours may take of its memory")
        return Offer(level=Level.HARDWARE)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """Prepare the grant's limits, and return how its process has to be started."""
        del grant
        whole = len(device.layout.partitions) == 1 and partition.memory_bytes >= device.layout.memory_bytes
        named = "device" if whole else ("mig" if partition.start is not None else "partition")
        return Enforcement(level=Level.HARDWARE, mechanism=named)

    def release(self, grant: Grant) -> None:
        """Nothing was prepared."""


class EngineFlags:
    """The engine gets its share on the command line; nothing stops it from taking more."""

    name = "engine flag"

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """The level that it can give on this partition, or why it gives none."""
        del partition, exclusive
        if device.simulated:
            return Offer(level=None, reason=f"{device.id} is simulated: the engine runs on the CPU")
        return Offer(level=Level.ADVISORY)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """Prepare the grant's limits, and return how its process has to be started."""
        del grant, device, partition
        return Enforcement(level=Level.ADVISORY, mechanism=self.name)

    def release(self, grant: Grant) -> None:
        """Nothing was prepared."""
