"""What reading cannot raise: a GPU without its driver, a lost one, answers that this driver does not have."""

from pathlib import Path

from aimgpu.hardware.nvidia.devices import unplaceable_reason
from aimgpu.hardware.nvidia.facts import Gpu
from aimgpu.hardware.nvidia.instances import read_instances, read_offered_profiles
from aimgpu.hardware.nvidia.nvml import FUNCTION_NOT_FOUND, GPU_IS_LOST, NO_PERMISSION, RESET_REQUIRED, NvmlFailure
from aimgpu.hardware.nvidia.presence import bound_driver, nvidia_gpus_on_bus
from aimgpu.hardware.protocols import Finding

_OWN_DRIVER = "nvidia"
_CONTROL_FILE = "nvidiactl"


def absent(failure: NvmlFailure, pci: Path, dev: Path) -> tuple[Finding, ...]:
    """NVML does not start. On a machine without an NVIDIA GPU that is not a finding."""
    found = []
    for address in nvidia_gpus_on_bus(pci):
        driver = bound_driver(address, pci)
        whose = f" (the kernel driver {driver} has it)" if driver not in (None, _OWN_DRIVER) else ""
        found.append(
            Finding(
                code="no-driver",
                subject=address,
                text=f"there is an NVIDIA GPU at {address}{whose}, but NVML does not start: {failure.text}",
                hint=failure.hint,
            )
        )
    if not found and (dev / _CONTROL_FILE).exists():
        text = f"{dev / _CONTROL_FILE} is here, but NVML does not start: {failure.text}"
        found.append(Finding(code="no-driver", subject=None, text=text, hint=failure.hint))
    return tuple(found)


def lost(index: int, failure: NvmlFailure) -> Finding:
    """A GPU that no longer answers."""
    code = "lost" if failure.code in {GPU_IS_LOST, RESET_REQUIRED} else "unreadable"
    return Finding(code=code, subject=f"gpu{index}", text=f"GPU {index} cannot be read: {failure}", hint=failure.hint)


def inspect_gpu(gpu: Gpu) -> tuple[Finding, ...]:
    """What is wrong with one GPU."""
    return (*_old_driver(gpu), *_memory_errors(gpu), *_mig(gpu))


def _memory_errors(gpu: Gpu) -> tuple[Finding, ...]:
    try:
        pending, failed = gpu.remapping()
    except NvmlFailure as failure:
        if failure.code in {GPU_IS_LOST, RESET_REQUIRED}:
            raise
        return ()  # everything else about the GPU can be read
    if failed:
        text = "the GPU has had uncorrectable memory errors, and could not replace all rows that they were in"
        return (Finding(code="memory-failed", subject=gpu.uuid, text=text, hint="Have the GPU replaced."),)
    if pending:
        text = "the GPU has had uncorrectable memory errors, and replaces the rows that they were in with its next reset"
        hint = "Stop its processes and reset the GPU, or reboot."
        return (Finding(code="memory-pending", subject=gpu.uuid, text=text, hint=hint, serious=False),)
    return ()


def _old_driver(gpu: Gpu) -> tuple[Finding, ...]:
    missing = []
    if not _tells_reserve(gpu):
        missing.append("what it reserves for itself (counted as used)")
    if not gpu.lists_processes():
        missing.append("which processes run (their bytes are counted, their names are not known)")
    if not missing:
        return ()
    return (
        Finding(
            code="old-driver",
            subject=gpu.uuid,
            text=f"the driver does not report {' and '.join(missing)}",
            hint=NvmlFailure("", FUNCTION_NOT_FOUND, "").hint,
            serious=False,
        ),
    )


def _tells_reserve(gpu: Gpu) -> bool:
    try:
        return gpu.memory().reserved_bytes is not None
    except NvmlFailure as failure:
        if failure.code == NO_PERMISSION:  # in MIG mode the sums are for privileged users: a right, not an age
            return True
        raise


def _mig(gpu: Gpu) -> tuple[Finding, ...]:
    mode = gpu.mig_mode()
    if mode is None:
        return ()
    found = []
    if mode[0] != mode[1]:
        found.append(
            Finding(
                code="mig-pending",
                subject=gpu.uuid,
                text=f"MIG is {'on' if mode[0] else 'off'} and becomes {'on' if mode[1] else 'off'} with the next GPU reset",
                hint="Stop its processes and reset the GPU, or reboot.",
                serious=False,
            )
        )
    offered = read_offered_profiles(gpu)
    reason = unplaceable_reason(offered)
    if reason is not None:
        found.append(
            Finding(
                code="mig-unknown",
                subject=gpu.uuid,
                text=f"the GPU has MIG, but no layout can be listed while MIG is {'on' if mode[0] else 'off'}: {reason}",
                hint="Reading them may take root"
                + ("." if mode[0] else ", or MIG to be on: `aimgpu partition apply GPU mig-empty`, then look again."),
                serious=False,
            )
        )
    if mode[0]:
        found += [
            Finding(
                code="mig-cut-up",
                subject=gpu.uuid,
                text=f"instance {one.id} ({one.kind}) has {one.compute_instances} compute instances and is not offered",
                hint="Someone else made it. Apply a layout to take it over.",
                serious=False,
            )
            for one in read_instances(gpu, offered)
            if not one.usable
        ]
    return tuple(found)
