"""A real AMD GPU: modes as read from it, changed through it."""

from aimgpu.domain import Device, DeviceUsage
from aimgpu.errors import DriverReloadNeeded, HardwareUnavailable, InvalidLayout, NotInitialized, UnknownDevice
from aimgpu.hardware.amd import ServingAmdHardware
from aimgpu.hardware.protocols import Hardware
from aimgpu.home import Home, find_home
from aimgpu.runtime.accounting import accounting_problems
from aimgpu.runtime.claims import real_claim
from aimgpu.runtime.partitioner import (
    SYSTEM_RESERVE_GB,
    ComputePartitionMode,
    MemoryPartition,
    MemoryPartitionMode,
    check_gigabytes,
    check_gpu_id,
    find_partition,
    memory_partitions,
)
from aimgpu.runtime.sizing import MIN_PARTITION_GB, gigabytes

_NOT_READ = "the GPU was not read yet"


class ROCmPartitionerReal:
    """The AMD GPU with this number. Everything it reports was read back from the device.

    A scheduler on it takes the lock of the daemon (`home`), so that only one of them grants. `system_reserve_gb` of the GPU are
    never scheduled, divided equally over its partitions.
    """

    def __init__(
        self,
        gpu_id: int = 0,
        *,
        hardware: Hardware | None = None,
        home: Home | None = None,
        min_partition_gb: float = MIN_PARTITION_GB,
        system_reserve_gb: float = SYSTEM_RESERVE_GB,
    ) -> None:
        check_gpu_id(gpu_id)
        self.claim = real_claim(home or find_home(), gpu_id)
        self._gpu_id = gpu_id
        self._hardware: Hardware = hardware or ServingAmdHardware()
        self._least_bytes = check_gigabytes(min_partition_gb, "min_partition_gb")
        self._system_bytes = check_gigabytes(system_reserve_gb, "system_reserve_gb")
        self._initialized = False

    def initialize(
        self,
        compute_mode: ComputePartitionMode | str | None = None,
        memory_mode: MemoryPartitionMode | str | None = None,
        *,
        reload_driver: bool = False,
    ) -> bool:
        """Take the modes that are there, or change them first; True.

        Raises HardwareUnavailable where no program can run on the GPU, PartitionBusy while models are scheduled or processes
        use it, LedgerOwned while the daemon has the GPUs, UnknownLayout or InvalidLayout for modes that the GPU does not have,
        DriverReloadNeeded, NotAllowed, or LayoutNotApplied where the device did not take them.
        """
        with self.claim.lock:
            device = self._read()
            if compute_mode is not None or memory_mode is not None:
                compute = str(compute_mode or device.layout.compute_mode)
                memory = str(memory_mode or device.layout.memory_mode)
                self._change(device, f"{compute}/{memory}".upper(), reload_driver=reload_driver)
            self._initialized = True
        return True

    def device(self) -> Device:
        """The GPU as it is now. Raises NotInitialized before `initialize`."""
        if not self._initialized:
            raise NotInitialized(_NOT_READ, hint="Call initialize() first.")
        return self._read()

    def usage(self) -> DeviceUsage | None:
        """What was measured on the GPU: memory, utilization and processes."""
        device = self.device()
        return next((usage for usage in self._hardware.read_usage() if usage.device_id == device.id), None)

    def environment(self, partition_id: int) -> dict[str, str]:
        """What a process must be started with to see this partition and no other."""
        device = self.device()
        return dict(self._hardware.identify(device, find_partition(device, partition_id)).environment)

    def partitions(self) -> tuple[MemoryPartition, ...]:
        """The partitions that the GPU has now; `ModelScheduler.partitions()` also counts what is scheduled."""
        device = self.device()
        return memory_partitions(device, (), dict.fromkeys((each.id for each in device.layout.partitions), self.reserve_bytes))

    def validate(self) -> tuple[str, ...]:
        """What is wrong with the GPU's layout, one sentence each; empty where nothing is."""
        if not self._initialized:
            return (_NOT_READ,)
        device = self.device()
        findings = tuple(each.text for each in self._hardware.inspect() if each.serious and each.subject in (None, device.id))
        return (*accounting_problems(device, (), self.usage()), *findings)

    @property
    def reserve_bytes(self) -> int:
        """Bytes of each partition that are never scheduled."""
        return self._system_bytes // len(self.device().layout.partitions)

    def _change(self, device: Device, wanted: str, *, reload_driver: bool) -> None:
        if wanted == device.layout.name:
            return
        smallest = [
            min(partition.memory_bytes for partition in layout.partitions) for layout in device.layouts if layout.name == wanted
        ]
        if smallest and smallest[0] < self._least_bytes:
            raise InvalidLayout(
                f"{wanted} has partitions of {gigabytes(smallest[0])} GB, the least is {gigabytes(self._least_bytes)} GB",
                hint="Use modes with fewer partitions, or a smaller min_partition_gb.",
            )
        try:
            with self.claim.change(device.id):
                self._hardware.apply_layout(device.id, wanted, reload_driver=reload_driver)
        except DriverReloadNeeded as error:
            hint = "Pass reload_driver=True when all work on the AMD GPUs of this machine may stop."
            raise DriverReloadNeeded(error.message, hint=hint) from error

    def _read(self) -> Device:
        devices = self._hardware.read_devices()
        for device in devices:
            if device.index == self._gpu_id:
                return _usable(device)
        raise UnknownDevice(
            f"there is no GPU {self._gpu_id}", hint=f"GPUs here: {len(devices)}. `aimgpu doctor` reports what is missing."
        )


def _usable(device: Device) -> Device:
    if not device.layout.partitions:
        raise HardwareUnavailable(
            f"no model can run on {device.id}: the compute driver (KFD) does not know it, or /dev/kfd is not here",
            hint="`aimgpu doctor` reports what is missing.",
        )
    return device
