"""Measured use of AMD GPUs: memory of each device, and of each process on each partition."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from aimgpu.domain import Device, DeviceUsage, ForeignProcess
from aimgpu.hardware.amd.gpus import AmdGpu
from aimgpu.hardware.amd.processes import KfdProcess, ProcessBook
from aimgpu.hardware.amd.sysfs import Sysfs
from aimgpu.units import MIB

_UNEXPLAINED_BYTES = 16 * MIB  # page tables and the like come and go with what processes allocate
_AT_ONCE = 4  # GPUs that are asked about in full in one poll beside the one in turn, so that no poll takes long


class AmdUsageReader:
    """Cheap to call again: a process that sees every partition has a file for each, and most of them say 0 for ever.

    Where a GPU's used bytes changed, those that had bytes there are asked; if that does not explain the change, everyone is,
    on a few GPUs at once and on the others at the next poll.
    One more GPU is asked about in full in turn, for changes between two polls that cancel out.
    """

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._book = ProcessBook(sysfs)
        self._gpus: tuple[AmdGpu, ...] = ()
        self._used: list[int | None] = []
        self._last: dict[str, _OnDevice] = {}
        self._turn = 0
        self._owed: frozenset[str] = frozenset()  # addresses of GPUs to ask about in full at the next poll

    def read(self, gpus: tuple[AmdGpu, ...], devices: tuple[Device, ...]) -> tuple[DeviceUsage, ...]:
        """`gpus` and `devices` of one read. Mode files are not touched: reading them may wake an idle GPU."""
        used = [self._sysfs.read_int(f"{gpu.path}/mem_info_vram_used") for gpu in gpus]
        processes = self._read_processes(gpus, used)
        self._gpus, self._used = gpus, used
        return tuple(self._usage(gpu, device, size, processes) for gpu, device, size in zip(gpus, devices, used, strict=True))

    def _read_processes(self, gpus: tuple[AmdGpu, ...], used: list[int | None]) -> tuple[KfdProcess, ...]:
        if gpus != self._gpus:
            self._last = {}
            return self._book.read(_ids(gpus))
        self._turn += 1
        grown: list[tuple[AmdGpu, int]] = []
        in_full = []
        for number, (gpu, now, before) in enumerate(zip(gpus, used, self._used, strict=True)):
            if now is None or before is None or gpu.bdf in self._owed or self._turn % len(gpus) == number:
                in_full.append(gpu)
            elif now != before:
                grown.append((gpu, now - before))
        processes = self._book.read(_ids(in_full), set(_ids(gpu for gpu, _ in grown)))
        growth = self._book.growth
        hidden = [gpu for gpu, size in grown if abs(size - sum(growth[gpu_id] for gpu_id in _ids([gpu]))) > _UNEXPLAINED_BYTES]
        most = max(0, _AT_ONCE - len(self._owed))
        self._owed = frozenset(gpu.bdf for gpu in hidden[most:])
        return self._book.read_more(_ids(hidden[:most])) if hidden[:most] else processes

    def _usage(self, gpu: AmdGpu, device: Device, used: int | None, processes: tuple[KfdProcess, ...]) -> DeviceUsage:
        found = self._last.get(device.id)
        if found is None:
            found = self._last[device.id] = _OnDevice(gpu, device)
        found.update(processes, self._book.touched)
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
    """The processes of one device, reported again where their bytes on it changed."""

    def __init__(self, gpu: AmdGpu, device: Device) -> None:
        self._partitions = {node.gpu_id: part.id for node, part in zip(gpu.nodes, device.layout.partitions, strict=False)}
        self._told: dict[int, tuple[ForeignProcess, ...]] = {}
        self.processes: tuple[ForeignProcess, ...] = ()
        self.bytes_by_partition = dict.fromkeys(self._partitions.values(), 0)

    def update(self, processes: tuple[KfdProcess, ...], touched: Mapping[int, Collection[int]]) -> None:
        """`touched`: gpu_ids by pid, whose bytes changed since the last update."""
        before, mine = self._told, self._partitions.keys()
        changed = {pid for pid, gpu_ids in touched.items() if not mine.isdisjoint(gpu_ids)}
        if not changed and [process.pid for process in processes] == list(before):
            return
        self._told = {
            process.pid: before[process.pid]
            if process.pid in before and process.pid not in changed
            else tuple(self._tell(process))
            for process in processes
        }
        self.processes = tuple(chain.from_iterable(self._told.values()))
        self.bytes_by_partition = dict.fromkeys(self._partitions.values(), 0)
        for found in self.processes:
            if found.partition_id is not None:
                self.bytes_by_partition[found.partition_id] += found.memory_bytes or 0

    def _tell(self, process: KfdProcess) -> Iterator[ForeignProcess]:
        """Once for each partition with bytes on it; one that only sees the device holds it too, and is reported with none."""
        sizes = [process.bytes_by_gpu.get(gpu_id) for gpu_id in self._partitions]
        for partition_id, size in zip(self._partitions.values(), sizes, strict=True):
            if size:
                yield ForeignProcess(pid=process.pid, name=process.name, memory_bytes=size, partition_id=partition_id)
        if not any(sizes) and any(size is not None for size in sizes):
            yield ForeignProcess(pid=process.pid, name=process.name, memory_bytes=0, partition_id=None)


def _ids(gpus: Iterable[AmdGpu]) -> list[int]:
    return [node.gpu_id for gpu in gpus for node in gpu.nodes]
