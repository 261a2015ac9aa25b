"""Measured use of AMD GPUs: memory of each device, and of each process on each partition."""

from collections.abc import Iterator
from dataclasses import dataclass

from aimgpu.domain import Device, DeviceUsage, ForeignProcess
from aimgpu.hardware.amd.gpus import AmdGpu
from aimgpu.hardware.amd.processes import KfdProcess, ProcessBook
from aimgpu.hardware.amd.sysfs import Sysfs


class UsageReader:
    """Cheap to call again: processes are read anew on GPUs whose used bytes changed, and on one more in turn.

    The turn is for two changes between two polls that leave a GPU's sum as it was.
    """

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._book = ProcessBook(sysfs)
        self._gpus: tuple[AmdGpu, ...] = ()
        self._used: list[int | None] = []
        self._last: dict[str, _OnDevice] = {}
        self._turn = 0

    def read(self, gpus: tuple[AmdGpu, ...], devices: tuple[Device, ...]) -> tuple[DeviceUsage, ...]:
        """`gpus` and `devices` of one read. Mode files are not touched: reading them may wake an idle GPU."""
        used = [self._sysfs.read_int(f"{gpu.path}/mem_info_vram_used") for gpu in gpus]
        processes = self._book.read(self._stale(gpus, used))
        self._gpus, self._used = gpus, used
        return tuple(self._usage(gpu, device, size, processes) for gpu, device, size in zip(gpus, devices, used, strict=True))

    def _stale(self, gpus: tuple[AmdGpu, ...], used: list[int | None]) -> list[int]:
        if gpus != self._gpus:
            self._last = {}
            return [node.gpu_id for gpu in gpus for node in gpu.nodes]
        self._turn += 1
        return [
            node.gpu_id
            for number, gpu in enumerate(gpus)
            if used[number] is None or used[number] != self._used[number] or self._turn % len(gpus) == number
            for node in gpu.nodes
        ]

    def _usage(self, gpu: AmdGpu, device: Device, used: int | None, processes: tuple[KfdProcess, ...]) -> DeviceUsage:
        found = self._last.get(device.id)
        if found is None or found.of != processes:
            found = self._last[device.id] = _place(gpu, device, processes)
        busy = self._sysfs.read_int(f"{gpu.path}/gpu_busy_percent")
        by_partition = found.bytes_by_partition
        if used is not None and len(device.layout.partitions) == 1:  # the GPU's own figure knows more than its processes
            by_partition = {device.layout.partitions[0].id: used}
        return DeviceUsage(
            device_id=device.id,
            used_bytes=used,
            used_bytes_by_partition=by_partition,
            utilization_percent=min(busy, 100) if busy is not None else None,
            processes=found.processes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnDevice:
    of: tuple[KfdProcess, ...]
    processes: tuple[ForeignProcess, ...]
    bytes_by_partition: dict[str, int]


def _place(gpu: AmdGpu, device: Device, processes: tuple[KfdProcess, ...]) -> _OnDevice:
    partitions = {node.gpu_id: part.id for node, part in zip(gpu.nodes, device.layout.partitions, strict=False)}
    found = tuple(on_device for process in processes for on_device in _on_device(process, partitions))
    by_partition = dict.fromkeys(partitions.values(), 0)
    for process in found:
        if process.partition_id is not None:
            by_partition[process.partition_id] += process.memory_bytes or 0
    return _OnDevice(of=processes, processes=found, bytes_by_partition=by_partition)


def _on_device(process: KfdProcess, partitions: dict[int, str]) -> Iterator[ForeignProcess]:
    """Once for each partition with bytes on it; a process that only sees the device holds it too, and is told with none."""
    sizes = process.bytes_by_gpu
    seen = [gpu_id for gpu_id in partitions if gpu_id in sizes]
    used = [gpu_id for gpu_id in seen if sizes[gpu_id] > 0]
    for gpu_id in used:
        yield ForeignProcess(pid=process.pid, name=process.name, memory_bytes=sizes[gpu_id], partition_id=partitions[gpu_id])
    if seen and not used:
        yield ForeignProcess(pid=process.pid, name=process.name, memory_bytes=0, partition_id=None)
