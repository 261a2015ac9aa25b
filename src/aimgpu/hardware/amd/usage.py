"""Measured use of AMD GPUs: memory of each device, and of each process on each partition."""

from collections.abc import Iterator
from itertools import chain

from aimgpu.domain import Device, DeviceUsage, ForeignProcess
from aimgpu.hardware.amd.gpus import AmdGpu
from aimgpu.hardware.amd.processes import KfdProcess, ProcessBook
from aimgpu.hardware.amd.sysfs import Sysfs

_Sizes = tuple[int | None, ...]


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
        if found is None:
            found = self._last[device.id] = _OnDevice(gpu, device)
        found.update(processes)
        busy = self._sysfs.read_int(f"{gpu.path}/gpu_busy_percent")
        by_partition = found.bytes_by_partition
        if gpu.is_partly_hidden:  # the GPU's own figure is about what others have too
            used = None
        if used is not None and len(device.layout.partitions) == 1:  # the GPU's own figure knows more than its processes
            by_partition = {device.layout.partitions[0].id: used}
        return DeviceUsage(
            device_id=device.id,
            used_bytes=used,
            used_bytes_by_partition=by_partition,
            utilization_percent=min(busy, 100) if busy is not None else None,
            processes=found.processes,
        )


class _OnDevice:
    """The processes of one device, told anew where their bytes on it changed."""

    def __init__(self, gpu: AmdGpu, device: Device) -> None:
        self._partitions = {node.gpu_id: part.id for node, part in zip(gpu.nodes, device.layout.partitions, strict=False)}
        self._told: dict[int, tuple[KfdProcess, _Sizes, tuple[ForeignProcess, ...]]] = {}
        self._of: tuple[KfdProcess, ...] = ()
        self.processes: tuple[ForeignProcess, ...] = ()
        self.bytes_by_partition = dict.fromkeys(self._partitions.values(), 0)

    def update(self, processes: tuple[KfdProcess, ...]) -> None:
        if processes == self._of:
            return
        before, self._told, self._of = self._told, {}, processes
        for process in processes:
            sizes = tuple(map(process.bytes_by_gpu.get, self._partitions))
            known = before.get(process.pid)
            same = known is not None and known[1] == sizes and known[0].name == process.name
            self._told[process.pid] = known if known and same else (process, sizes, tuple(self._tell(process, sizes)))
        self.processes = tuple(chain.from_iterable(found for _, _, found in self._told.values()))
        self.bytes_by_partition = dict.fromkeys(self._partitions.values(), 0)
        for found in self.processes:
            if found.partition_id is not None:
                self.bytes_by_partition[found.partition_id] += found.memory_bytes or 0

    def _tell(self, process: KfdProcess, sizes: _Sizes) -> Iterator[ForeignProcess]:
        """Once for each partition with bytes on it; a process that only sees the device holds it too, and is told with none."""
        for partition_id, size in zip(self._partitions.values(), sizes, strict=True):
            if size:
                yield ForeignProcess(pid=process.pid, name=process.name, memory_bytes=size, partition_id=partition_id)
        if not any(sizes) and any(size is not None for size in sizes):
            yield ForeignProcess(pid=process.pid, name=process.name, memory_bytes=0, partition_id=None)
