"""Software GPUs behind the same protocol as real ones: layouts as of a simulated GPU, usage from the driver's own meter."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from aimgpu import procfs
from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Partition
from aimgpu.errors import InvalidInput
from aimgpu.hardware.protocols import Identity
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.hardware.software.state import MOST_DEVICES, VARIABLE, MeteredProcess, SoftwareGpu

PARTITIONS_EACH = 8
MOST_GPUS = MOST_DEVICES // PARTITIONS_EACH
_NO_MEMORY = 1  # bytes of a partition that the layout does not have: no allocation fits


class SoftwareHardware(SimulatedHardware):
    """GPUs of the software driver. Each partition is a device of the driver, with memory and a queue of its own."""

    id_prefix = "software-gpu"  # so that every answer, metric and page names what it is

    def __init__(self, products: Sequence[tuple[str, int]], state_path: Path, find_libraries: Callable[[], Path]) -> None:
        """`find_libraries`: the folder with the driver's libraries, built where they were not before."""
        super().__init__(products, state_path)
        if sum(count for _, count in products) > MOST_GPUS:
            raise InvalidInput(f"a machine has at most {MOST_GPUS} software GPUs", hint="Ask for fewer.")
        self._find_libraries = find_libraries
        state_path.parent.mkdir(parents=True, exist_ok=True)
        self.gpu = SoftwareGpu(state_path.with_suffix(".meter"))
        self._busy: dict[str, tuple[float, int]] = {}
        self._set_sizes()

    def read_devices(self) -> tuple[Device, ...]:
        """With the layouts that were last applied."""
        return tuple(replace(device, software=True) for device in super().read_devices())

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """What the driver measured, of every process that it knows."""
        processes = self.gpu.read_processes()
        return tuple(self._usage_of(device, processes) for device in self.read_devices())

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """Refuses what a real GPU would refuse."""
        super().apply_layout(device_id, layout_name, reload_driver=reload_driver)
        self._set_sizes()
        return next(device for device in self.read_devices() if device.id == device_id)

    def identify(self, device: Device, partition: Partition) -> Identity:
        """The driver's libraries before any other, its state, and one of its devices."""
        number = str(_number(device, partition))
        libraries = str(self._find_libraries())
        own = {
            VARIABLE: str(self.gpu.path.absolute()),
            "LD_LIBRARY_PATH": ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH")))),
            "CUDA_VISIBLE_DEVICES": number,
            "HIP_VISIBLE_DEVICES": number,
        }
        return Identity(environment={**super().identify(device, partition).environment, **own})

    def _set_sizes(self) -> None:
        devices = self.read_devices()
        sizes = [_NO_MEMORY] * (PARTITIONS_EACH * len(devices))
        for device in devices:
            for partition in device.layout.partitions:
                sizes[_number(device, partition)] = partition.memory_bytes
        self.gpu.set_devices(sizes)

    def _usage_of(self, device: Device, processes: Sequence[MeteredProcess]) -> DeviceUsage:
        partitions = {_number(device, partition): partition for partition in device.layout.partitions}
        by_partition = {
            partition.id: sum(one.used_bytes.get(number, 0) for one in processes) for number, partition in partitions.items()
        }
        holders = tuple(
            ForeignProcess(
                pid=one.pid,
                name=procfs.read_name(one.pid),
                memory_bytes=size,
                partition_id=partitions[number].id,
            )
            for one in processes
            for number, size in one.used_bytes.items()
            if number in partitions
        )
        return DeviceUsage(
            device_id=device.id,
            used_bytes=sum(by_partition.values()),
            used_bytes_by_partition=by_partition,
            utilization_percent=self._utilization(device, list(partitions)),
            processes=holders,
        )

    def _utilization(self, device: Device, numbers: Sequence[int]) -> int | None:
        """Of the time since the last look; None at the first."""
        now, busy = time.monotonic(), sum(self.gpu.state.busy_ns[number] for number in numbers)
        before = self._busy.get(device.id)
        self._busy[device.id] = (now, busy)
        if before is None or now <= before[0]:
            return None
        return min(100, int((busy - before[1]) / 1e7 / (now - before[0]) / len(numbers)))


def _number(device: Device, partition: Partition) -> int:
    return PARTITIONS_EACH * device.index + partition.index
