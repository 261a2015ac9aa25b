"""Measured use of AMD GPUs: memory of each device, and of each process on each partition."""

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
    found = tuple(
        ForeignProcess(pid=process.pid, name=process_name(process.pid), memory_bytes=size, partition_id=partition_id)
        for process in processes
        for gpu_id, partition_id in partitions.items()
        if (size := process.bytes_by_gpu.get(gpu_id, 0)) > 0
    )
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
