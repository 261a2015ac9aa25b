"""A real AMD GPU: modes as read from it, changed through it."""

from aimgpu.domain import Device
from aimgpu.errors import NotInitialized, UnknownDevice
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.protocols import Hardware
from aimgpu.runtime.partitioner import ComputePartitionMode, MemoryPartitionMode


class ROCmPartitionerReal:
    """The GPU with this number. Everything it reports was read back from the device."""

    def __init__(self, gpu_id: int = 0, *, hardware: Hardware | None = None) -> None:
        self._gpu_id = gpu_id
        self._hardware: Hardware = hardware or AmdHardware()
        self._initialized = False

    def initialize(
        self,
        compute_mode: ComputePartitionMode | str | None = None,
        memory_mode: MemoryPartitionMode | str | None = None,
        *,
        reload_driver: bool = False,
    ) -> bool:
        """Take the modes that are there, or change them first. Raises what the hardware room raises; True otherwise."""
        device = self._read()
        compute = str(compute_mode or device.layout.compute_mode)
        memory = str(memory_mode or device.layout.memory_mode)
        wanted = f"{compute}/{memory}".upper()
        if compute_mode is not None or memory_mode is not None:
            self._hardware.apply_layout(device.id, wanted, reload_driver=reload_driver)
        self._initialized = True
        return True

    def device(self) -> Device:
        if not self._initialized:
            raise NotInitialized("the GPU was not looked at yet", hint="Call initialize() first.")
        return self._read()

    def environment(self, partition_id: int) -> dict[str, str]:
        """What a process must be started with to see this Partition and no other."""
        device = self.device()
        partitions = {partition.index: partition for partition in device.layout.partitions}
        if partition_id not in partitions:
            raise UnknownDevice(f"no partition {partition_id}", hint=f"There are {len(partitions)}.")
        return dict(self._hardware.identify(device, partitions[partition_id]).environment)

    def _read(self) -> Device:
        devices = self._hardware.read_devices()
        for device in devices:
            if device.index == self._gpu_id:
                return device
        raise UnknownDevice(f"no GPU {self._gpu_id}", hint=f"GPUs here: {len(devices)}. `aimgpu doctor` says what is missing.")
