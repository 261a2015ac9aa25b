"""NVIDIA GPUs behind the protocols of `hardware`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import TypeVar

from aimgpu.domain import Device, DeviceUsage, Partition
from aimgpu.errors import HardwareUnavailable, UnknownDevice
from aimgpu.hardware.nvidia import identity, partitioner
from aimgpu.hardware.nvidia.bounded import CHANGE_SECONDS, READ_SECONDS, BoundedCalls
from aimgpu.hardware.nvidia.devices import read_device
from aimgpu.hardware.nvidia.facts import Gpu
from aimgpu.hardware.nvidia.findings import absent, inspect_gpu, lost
from aimgpu.hardware.nvidia.nvml import Nvml, NvmlFailure, Presence, translate
from aimgpu.hardware.nvidia.presence import PCI_DEVICES, nvidia_may_be_here
from aimgpu.hardware.nvidia.usage import PROC, read_device_usage
from aimgpu.hardware.protocols import Finding, Identity

_Read = TypeVar("_Read")


class NvidiaHardware:
    """Every GPU that NVML shows. A machine without NVIDIA has none; what is there and cannot be read is a finding.

    Calls into the driver are bounded in time: one that hangs raises HardwareUnavailable.
    """

    def __init__(
        self,
        nvml: Nvml | None = None,
        *,
        pci: Path = PCI_DEVICES,
        proc: Path = PROC,
        dev: Path = Path("/dev"),
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._nvml = nvml or Nvml()
        self._pci = pci
        self._proc = proc
        self._dev = dev
        self._read_seconds = read_seconds
        self._calls = BoundedCalls()
        self._presence = Presence(lambda: nvidia_may_be_here(pci, dev))

    def read_devices(self) -> tuple[Device, ...]:
        """Raises HardwareUnavailable where the driver hangs."""
        return self._bounded("read the GPUs", lambda: tuple(self._each(read_device)))

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """Raises HardwareUnavailable where the driver hangs."""
        return self._bounded(
            "read what the GPUs use", lambda: tuple(self._each(lambda gpu: read_device_usage(gpu, self._proc)))
        )

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """MIG needs no driver reload; a GPU that must be reset first says so in LayoutNotApplied."""
        del reload_driver
        return self._calls.run("change the layout", CHANGE_SECONDS, lambda: self._apply_layout(device_id, layout_name))

    def _apply_layout(self, device_id: str, layout_name: str) -> Device:
        gpu = self._gpu(device_id)
        try:
            partitioner.change_layout(gpu, layout_name)
            return read_device(gpu)
        except NvmlFailure as failure:
            raise translate(failure, f"cannot set {layout_name} on {device_id}") from failure

    def identify(self, device: Device, partition: Partition) -> Identity:
        """Raises HardwareUnavailable where the partition is gone or the driver hangs."""
        files = self._proc / "driver/nvidia/capabilities"
        return self._bounded("identify the GPU", lambda: identity.identify(self._nvml, device, partition, files))

    def inspect(self) -> tuple[Finding, ...]:
        """What is wrong with each GPU; a driver that hangs is the one finding."""
        try:
            return self._bounded("look at the GPUs", self._inspect)
        except HardwareUnavailable as error:
            return (Finding(code="no-answer", subject=None, text=error.message, hint=error.hint),)

    def _bounded(self, doing: str, call: Callable[[], _Read]) -> _Read:
        """At once where there is no sign of an NVIDIA GPU: nothing can hang then, so no thread is needed.

        With a GPU on the bus and no device file, NVML loads the driver first, which can hang too.
        """
        if not self._nvml.is_started and not self._presence.look(monotonic()):
            return call()
        return self._calls.run(doing, self._read_seconds, call)

    def _inspect(self) -> tuple[Finding, ...]:
        try:
            count = self._nvml.call("nvmlDeviceGetCount")
        except NvmlFailure as failure:
            return absent(failure, self._pci, self._dev)
        found: list[Finding] = []
        for index in range(count):
            try:
                gpu = Gpu(self._nvml, index)
                read_device(gpu)  # a GPU that this fails for is not among the devices, which is a finding too
                read_device_usage(gpu, self._proc)
                found += inspect_gpu(gpu)
            except NvmlFailure as failure:
                found.append(lost(index, failure))
        return tuple(found)

    def close(self) -> None:
        """Shut NVML down."""
        self._nvml.close()

    def _each(self, read: Callable[[Gpu], _Read]) -> Iterator[_Read]:
        """A GPU that is lost, also between two questions, is left out: `inspect` says so, and the others still work."""
        try:
            count = self._nvml.call("nvmlDeviceGetCount")
        except NvmlFailure:
            return
        for index in range(count):
            try:
                yield read(Gpu(self._nvml, index))
            except NvmlFailure:
                continue

    def _gpu(self, device_id: str) -> Gpu:
        found = [gpu for gpu in self._each(lambda gpu: gpu) if gpu.uuid == device_id]
        if not found:
            known = ", ".join(gpu.uuid for gpu in self._each(lambda gpu: gpu)) or "none"
            raise UnknownDevice(f"there is no NVIDIA GPU {device_id}", hint=f"GPUs here: {known}.")
        return found[0]
