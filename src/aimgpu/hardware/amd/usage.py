"""Measured use of AMD GPUs: memory of each device, and of each process on each partition."""

from collections.abc import Iterator

from aimgpu.domain import Device, DeviceUsage, ForeignProcess
from aimgpu.hardware.amd.gpus import AmdGpu
from aimgpu.hardware.amd.processes import KfdProcess, process_name, read_processes
from aimgpu.hardware.amd.sysfs import Sysfs


def read_usages(sysfs: Sysfs, gpus: tuple[AmdGpu, ...], devices: tuple[Device, ...]) -> tuple[DeviceUsage, ...]:
    """`gpus` and `devices` of one read. Mode files are not touched: reading them may wake an idle GPU."""
    processes = read_processes(sysfs)
    return tuple(_usage(sysfs, gpu, device, processes) for gpu, device in zip(gpus, devices, strict=True))


def _usage(sysfs: Sysfs, gpu: AmdGpu, device: Device, processes: tuple[KfdProcess, ...]) -> DeviceUsage:
    partitions = {node.gpu_id: part.id for node, part in zip(gpu.nodes, device.layout.partitions, strict=False)}
    found = tuple(on_device for process in processes for on_device in _on_device(process, partitions))
    by_partition = dict.fromkeys(partitions.values(), 0)
    for process in found:
        if process.partition_id is not None:
            by_partition[process.partition_id] += process.memory_bytes or 0
    busy = sysfs.read_int(f"{gpu.path}/gpu_busy_percent")
    return DeviceUsage(
        device_id=device.id,
        used_bytes=sysfs.read_int(f"{gpu.path}/mem_info_vram_used"),
        used_bytes_by_partition=by_partition,
        utilization_percent=min(busy, 100) if busy is not None else None,
        processes=found,
    )


def _on_device(process: KfdProcess, partitions: dict[int, str]) -> Iterator[ForeignProcess]:
    """Once for each partition with bytes on it; a process that only sees the device holds it too, and is told with none."""
    name = None
    seen = [gpu_id for gpu_id in partitions if gpu_id in process.bytes_by_gpu]
    used = [gpu_id for gpu_id in seen if process.bytes_by_gpu[gpu_id] > 0]
    if seen:
        name = process_name(process.pid)
    for gpu_id in used:
        size = process.bytes_by_gpu[gpu_id]
        yield ForeignProcess(pid=process.pid, name=name, memory_bytes=size, partition_id=partitions[gpu_id])
    if seen and not used:
        yield ForeignProcess(pid=process.pid, name=name, memory_bytes=0, partition_id=None)
