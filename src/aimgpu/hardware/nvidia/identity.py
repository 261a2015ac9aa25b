"""What a workload is given to open its partition and no other."""

import re
from pathlib import Path
from typing import Any

from aimgpu.domain import Device, Partition
from aimgpu.errors import HardwareUnavailable
from aimgpu.hardware.nvidia.nvml import Nvml, NvmlFailure
from aimgpu.hardware.protocols import Identity

CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
_SHARED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_CAP_MINOR = re.compile(r"^DeviceFileMinor:\s*([0-9]+)", re.MULTILINE)


def identify(nvml: Nvml, device: Device, partition: Partition, capabilities: Path = CAPABILITIES) -> Identity:
    """CUDA selects by UUID: indices change with visibility, and MPS renumbers them. Raises HardwareUnavailable."""
    if partition.uuid is None:
        raise HardwareUnavailable(
            f"{partition.id} has no UUID to select it by",
            hint="It is planned and not made, or cut into several compute instances. Apply its layout first.",
        )
    return Identity(
        environment={
            "AIM_PARTITION_ID": str(partition.index),
            "AIM_PARTITION_STABLE_ID": partition.id,
            "CUDA_VISIBLE_DEVICES": partition.uuid,
            "NVIDIA_VISIBLE_DEVICES": partition.uuid,  # read by the NVIDIA container toolkit
        },
        device_nodes=_device_nodes(nvml, device, partition.uuid, capabilities),
    )


def _device_nodes(nvml: Nvml, device: Device, uuid: str, capabilities: Path) -> tuple[str, ...]:
    try:
        minor = nvml.ask("nvmlDeviceGetMinorNumber", nvml.call("nvmlDeviceGetHandleByUUID", device.id))
        mig = None if uuid == device.id else nvml.call("nvmlDeviceGetHandleByUUID", uuid)
        cap_nodes = () if mig is None or minor is None else _capability_nodes(nvml, mig, minor, capabilities)
    except NvmlFailure as failure:
        raise HardwareUnavailable(f"{uuid} is not there any more: {failure}", hint=failure.hint) from failure
    own = () if minor is None else (f"/dev/nvidia{minor}",)
    return (*own, *_SHARED_NODES, *cap_nodes)


def _capability_nodes(nvml: Nvml, mig: Any, minor: int, capabilities: Path) -> tuple[str, ...]:  # noqa: ANN401 - a handle
    """The two files that give access to a GPU instance and to its compute instance; NVIDIA MIG user guide, "Device nodes"."""
    instance = nvml.call("nvmlDeviceGetGpuInstanceId", mig)
    compute = nvml.call("nvmlDeviceGetComputeInstanceId", mig)
    folder = capabilities / f"gpu{minor}" / "mig" / f"gi{instance}"
    found = []
    for access in (folder / "access", folder / f"ci{compute}" / "access"):
        try:
            match = _CAP_MINOR.search(access.read_text(encoding="ascii", errors="replace"))
        except OSError:
            continue
        if match is not None:
            found.append(f"/dev/nvidia-caps/nvidia-cap{match[1]}")
    return tuple(found)
