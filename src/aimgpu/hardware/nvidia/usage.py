"""What NVIDIA GPUs were measured to use."""

from pathlib import Path

from aimgpu.domain import DeviceUsage, ForeignProcess
from aimgpu.hardware.nvidia.devices import partition_id
from aimgpu.hardware.nvidia.facts import Gpu, ProcessFacts
from aimgpu.hardware.nvidia.instances import MigInstance, read_device_memory, read_instances, read_offered_profiles
from aimgpu.hardware.nvidia.mig import WHOLE

PROC = Path("/proc")


def read_device_usage(gpu: Gpu, proc: Path = PROC) -> DeviceUsage:
    """Measured now. In a container, pids may be those of the host and then have no name here."""
    mode = gpu.mig_mode()
    instances = read_instances(gpu, read_offered_profiles(gpu)) if mode is not None and mode[0] else None
    memory = read_device_memory(gpu, instances)
    if instances is None:
        by_partition = {f"{gpu.uuid}/{WHOLE}-0": memory.used_bytes}
    else:
        by_partition = {partition_id(gpu.uuid, one): one.memory.used_bytes for one in instances if one.memory is not None}
    return DeviceUsage(
        device_id=gpu.uuid,
        used_bytes=memory.used_bytes,
        used_bytes_by_partition=by_partition,
        utilization_percent=gpu.utilization_percent(),
        processes=tuple(_foreign(gpu.uuid, process, instances, proc) for process in gpu.processes()),
    )


def describe(process: ProcessFacts, proc: Path = PROC) -> str:
    """As an error names it: pid 411 (python3)."""
    name = process_name(process.pid, proc)
    return f"pid {process.pid} ({name})" if name else f"pid {process.pid}"


def process_name(pid: int, proc: Path = PROC) -> str | None:
    try:
        return (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # gone, or in another process namespace
        return None


def _foreign(device_id: str, process: ProcessFacts, instances: tuple[MigInstance, ...] | None, proc: Path) -> ForeignProcess:
    if instances is None:
        where: str | None = f"{device_id}/{WHOLE}-0"
    else:
        where = next((partition_id(device_id, one) for one in instances if one.usable and one.id == process.gpu_instance), None)
    return ForeignProcess(
        pid=process.pid,
        name=process_name(process.pid, proc),
        memory_bytes=process.memory_bytes,
        partition_id=where,
    )
