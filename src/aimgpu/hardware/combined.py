"""Several backends as one: a machine may hold GPUs of both vendors."""

from collections.abc import Sequence
from dataclasses import replace

from aimgpu.domain import Device, DeviceUsage, Partition
from aimgpu.errors import UnknownDevice
from aimgpu.hardware.protocols import Finding, Hardware, Identity


class CombinedHardware:
    """Devices are numbered through; every call goes to the backend that knows the device."""

    def __init__(self, backends: Sequence[Hardware]) -> None:
        self._backends = tuple(backends)

    def read_devices(self) -> tuple[Device, ...]:
        """Those of every backend, numbered in one row."""
        found = [device for backend in self._backends for device in backend.read_devices()]
        return tuple(replace(device, index=index) for index, device in enumerate(found))

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """Of every backend's GPUs."""
        return tuple(usage for backend in self._backends for usage in backend.read_usage())

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """By the backend that has the GPU."""
        device = self._backend_of(device_id).apply_layout(device_id, layout_name, reload_driver=reload_driver)
        index = next((known.index for known in self.read_devices() if known.id == device_id), device.index)
        return replace(device, index=index)

    def identify(self, device: Device, partition: Partition) -> Identity:
        """By the backend that has the GPU."""
        return self._backend_of(device.id).identify(device, partition)

    def inspect(self) -> tuple[Finding, ...]:
        """What every backend found."""
        return tuple(finding for backend in self._backends for finding in backend.inspect())

    def _backend_of(self, device_id: str) -> Hardware:
        for backend in self._backends:
            if any(device.id == device_id for device in backend.read_devices()):
                return backend
        known = ", ".join(device.id for device in self.read_devices()) or "none"
        raise UnknownDevice(f"there is no GPU {device_id!r}", hint=f"GPUs here: {known}.")
