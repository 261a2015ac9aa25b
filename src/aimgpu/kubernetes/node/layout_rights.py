"""Which layouts the node agent may change: what it was allowed, and what its container can really do.

Where it lacks a right, the layouts that need it are not offered, a claim or plan that asks for one is refused with the reason,
and the GpuNode shows what is missing. A node with AppArmor is the usual case: containerd's default profile denies writes below
/sys and allows them below another mount of it (seen with containerd 1.6.20 on Linux 6.1).
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from aimgpu.domain import Device, DeviceUsage, Partition
from aimgpu.errors import NotAllowed
from aimgpu.hardware.protocols import Finding, Hardware, Identity

_SYS_MODULE = 16  # CAP_SYS_MODULE
_MODES = "class/drm/card*/device/current_compute_partition"
_OTHERS = "Set agent.layouts={} in the values of the chart."


class LayoutRights(StrEnum):
    """What an agent is allowed to change."""

    NONE = "none"
    VENDOR = "vendor"  # the vendor's own manager changes layouts, the agent follows
    COMPUTE = "compute"  # compute modes and MIG instances
    MEMORY = "memory"  # memory modes too, which take a reload of the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimits:
    """Why this agent cannot change compute modes, and memory modes. None: it can."""

    compute: str | None = None
    memory: str | None = None
    offered: bool = False  # all the same: the vendor's manager changes them when a plan asks it to

    def reasons(self) -> tuple[str, ...]:
        """Each once, for the GpuNode; none where somebody else changes layouts."""
        return () if self.offered else tuple(dict.fromkeys(reason for reason in (self.compute, self.memory) if reason))


def read_limits(
    rights: LayoutRights, sysfs: Path, *, proc: Path = Path("/proc"), modules: Path = Path("/lib/modules"), real: bool = True
) -> LayoutLimits:
    """Changes nothing: files are opened for writing and not written. `real`: not simulated, so that the machine matters."""
    if rights in (LayoutRights.NONE, LayoutRights.VENDOR):
        reason = f"the agent may not change layouts (agent.layouts is {rights})"
        return LayoutLimits(compute=reason, memory=reason, offered=rights is LayoutRights.VENDOR)
    compute = _unwritable(sysfs, proc) if real else None
    if rights is LayoutRights.COMPUTE:
        return LayoutLimits(compute=compute, memory="the agent may not change memory modes (agent.layouts is compute)")
    return LayoutLimits(compute=compute, memory=compute or (_no_reload(proc, modules) if real else None))


class LimitedHardware:
    """GPUs with the layouts that this agent can change them to."""

    def __init__(self, hardware: Hardware, limits: LayoutLimits) -> None:
        self._hardware = hardware
        self.limits = limits

    def read_devices(self) -> tuple[Device, ...]:
        """Without the layouts that are out of reach."""
        return tuple(map(self._limited, self._hardware.read_devices()))

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """As the hardware reads it."""
        return self._hardware.read_usage()

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """Raises NotAllowed with what is missing, beside what the hardware raises."""
        device = next((one for one in self._hardware.read_devices() if one.id == device_id), None)
        if device is not None and (reason := self._refusal(device, layout_name)):
            wanted = "compute" if self.limits.compute else "memory"
            raise NotAllowed(f"{device_id} cannot become {layout_name}: {reason}", hint=_OTHERS.format(wanted))
        return self._limited(self._hardware.apply_layout(device_id, layout_name, reload_driver=reload_driver))

    def identify(self, device: Device, partition: Partition) -> Identity:
        """As the hardware does."""
        return self._hardware.identify(device, partition)

    def inspect(self) -> tuple[Finding, ...]:
        """What the hardware found."""
        return self._hardware.inspect()

    def _limited(self, device: Device) -> Device:
        if self.limits.offered:
            return device
        if self.limits.compute:
            return replace(device, layouts=(device.layout,), profiles=())
        if self.limits.memory:
            return replace(device, layouts=tuple(one for one in device.layouts if not self._refusal(device, one.name)))
        return device

    def _refusal(self, device: Device, layout_name: str) -> str | None:
        if layout_name.lower() == device.layout.name.lower():
            return None
        if self.limits.compute:
            return self.limits.compute
        wanted = next((one for one in device.layouts if one.name.lower() == layout_name.lower()), None)
        return self.limits.memory if wanted is not None and wanted.memory_mode != device.layout.memory_mode else None


def _unwritable(sysfs: Path, proc: Path) -> str | None:
    """Of the files that hold compute modes; None where there are none, as on nodes without AMD GPUs."""
    for path in sorted(sysfs.glob(_MODES)):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            profile = "".join(f", under the profile {name}" for name in _profile(proc))
            return f"{path} cannot be written: {error.strerror}{profile}"
    return None


def _profile(proc: Path) -> Iterator[str]:
    """Of AppArmor or SELinux, where one confines this process."""
    try:
        name = (proc / "self" / "attr" / "current").read_text(encoding="utf-8").strip("\0\n ")
    except OSError:  # no such module in the kernel
        return
    if name and name != "unconfined":
        yield name


def _no_reload(proc: Path, modules: Path) -> str | None:
    status = (proc / "self" / "status").read_text(encoding="utf-8")
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    if not effective >> _SYS_MODULE & 1:
        return "a memory mode needs a reload of the driver, and the container lacks the capability SYS_MODULE"
    if shutil.which("modprobe") is None:
        return "a memory mode needs a reload of the driver, and the image lacks modprobe"
    if not (modules / os.uname().release).is_dir():
        return f"a memory mode needs a reload of the driver, and {modules / os.uname().release} is not mounted"
    return None
