"""Why a mode was refused, reported by the kernel as an errno or by amd-smi as a status; both end in the same errors."""

import errno
import os
from enum import Enum

from aimgpu.errors import AimGpuError, HardwareFailed, HardwareUnavailable, LayoutNotApplied, NotAllowed, PartitionBusy
from aimgpu.hardware.amd.gpus import AmdGpu
from aimgpu.hardware.amd.products import is_virtual_function


class Cause(Enum):
    """One cause with its error class, message and hint."""

    BUSY = (PartitionBusy, "a process holds it", "Stop what runs on this GPU.")
    READ_ONLY = (
        NotAllowed,
        "/sys is read-only here",
        "This looks like a container. Run it privileged, or change the layout on the host.",
    )
    NOT_ROOT = (NotAllowed, "only root may change modes", "Run the command with sudo.")
    VIRTUAL = (NotAllowed, "it is a virtual function", "Partition the GPU on the host, then give this machine a part of it.")
    FIXED = (LayoutNotApplied, "its driver does not let this mode be changed", "Update the driver and the firmware.")
    IN_RESET = (HardwareUnavailable, "the GPU is in reset", "Wait until the reset is over, then try again.")
    REFUSED = (LayoutNotApplied, "the driver refused the mode", "Look at `aimgpu partition list` for what this GPU offers.")
    LOST = (LayoutNotApplied, "the compute driver did not come back", "Look at the kernel log, then reload the driver.")
    NOT_RELOADED = (HardwareFailed, "the driver could not be reloaded", "Stop all GPU work and reload it by hand.")
    NO_DRIVER = (HardwareUnavailable, "the amdgpu driver is not loaded", "Load it: sudo modprobe amdgpu.")


_ERRNOS = {
    errno.EBUSY: Cause.BUSY,
    errno.EROFS: Cause.READ_ONLY,
    errno.EACCES: Cause.FIXED,  # as root: the file's own mode forbids it
    errno.ENOENT: Cause.FIXED,
    errno.EPERM: Cause.IN_RESET,
    errno.EINVAL: Cause.REFUSED,
    errno.EIO: Cause.LOST,
}
_STATUSES = {
    "BUSY": Cause.BUSY,
    "NO_PERM": Cause.NOT_ROOT,
    "PermissionDenied": Cause.NOT_ROOT,
    "NOT_SUPPORTED": Cause.FIXED,
    "SETTING_UNAVAILABLE": Cause.REFUSED,
    "INVAL": Cause.REFUSED,
    "InvalidParameterValue": Cause.REFUSED,
    "AMDGPU_RESTART_ERR": Cause.NOT_RELOADED,
    "DRIVER_NOT_LOADED": Cause.NO_DRIVER,
}


def explain_errno(error: OSError, gpu: AmdGpu, mode: str) -> AimGpuError:
    """The meaning of an errno of the mode files (Linux 7.2, amdgpu)."""
    cause = _ERRNOS.get(error.errno or 0)
    if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() != 0:
        cause = Cause.NOT_ROOT
    return _refusal(cause, str(error.strerror), gpu, mode)


def explain_status(status: str, line: str, gpu: AmdGpu, mode: str) -> AimGpuError:
    """The meaning of a status that amd-smi prints; `line` is quoted where there is no better text."""
    return _refusal(_STATUSES.get(status), line, gpu, mode)


def _refusal(cause: Cause | None, reported: str, gpu: AmdGpu, mode: str) -> AimGpuError:
    if cause is Cause.FIXED and is_virtual_function(gpu.pci_device):
        cause = Cause.VIRTUAL
    error, text, hint = cause.value if cause else (HardwareFailed, reported, "Look at the kernel log.")
    return error(f"cannot set {mode} on {gpu.id}: {text}", hint=hint)
