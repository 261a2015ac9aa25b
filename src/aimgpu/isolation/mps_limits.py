"""MPS as a mechanism: the driver keeps a tenant's memory and its part of the threads, and runs kernels of all tenants at once.

By itself it knows no priority: measured on an H200 beside a matrix-product hog, a critical request took many times as long; see
docs/explanation/isolation.md. So the interposer's gate goes beside it, and it is chosen only where it is put into the list of
mechanisms on purpose.
"""

from collections.abc import Mapping
from typing import Protocol

from aimgpu.domain import Device, Grant, Level, Partition, Priority, Vendor
from aimgpu.errors import HardwareUnavailable
from aimgpu.isolation.protocols import Enforcement, Offer


class MpsControl(Protocol):
    """What the NVIDIA backend offers: one daemon a partition, limits a tenant."""

    def unavailable_reason(self) -> str | None: ...

    def start(self, uuid: str) -> None: ...

    def tenant_environment(
        self, uuid: str, *, memory_bytes: int | None = None, compute_ppm: int | None = None, yields: bool = False
    ) -> Mapping[str, str]: ...


class MpsMechanism:
    name = "mps"

    def __init__(self, control: MpsControl) -> None:
        self._control = control

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """The level that it can give on this partition, or why it gives none."""
        if device.simulated or device.vendor is not Vendor.NVIDIA:
            return Offer(level=None, reason="MPS is for real NVIDIA devices")
        if exclusive:
            return Offer(level=None, reason="the partition is not shared")
        if partition.uuid is None:
            return Offer(level=None, reason=f"the UUID of {partition.id} is unknown")
        reason = self._control.unavailable_reason()
        return Offer(level=None if reason else Level.DRIVER, reason=reason)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """Prepare the grant's limits, and return how its process has to be started."""
        if partition.uuid is None:
            raise HardwareUnavailable(f"the UUID of {partition.id} on {device.id} is unknown")
        self._control.start(partition.uuid)
        environment = self._control.tenant_environment(
            partition.uuid,
            memory_bytes=grant.memory_bytes,
            compute_ppm=grant.compute_ppm,
            yields=grant.priority is Priority.LOW,
        )
        return Enforcement(level=Level.DRIVER, mechanism=self.name, environment=environment)

    def holds_compute(self, grant: Grant, device: Device, partition: Partition) -> bool:
        """By the part of the threads that its kernels may use at once."""
        del device, partition
        return grant.compute_ppm is not None

    def release(self, grant: Grant) -> None:
        """The daemon serves other tenants too; the NVIDIA backend ends it when none is left."""
