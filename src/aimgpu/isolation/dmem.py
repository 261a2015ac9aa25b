"""cgroup v2 `dmem`: the kernel itself limits the device memory of a control group (amdgpu; Linux 6.14 and later)."""

import re
from pathlib import Path

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.errors import HardwareUnavailable, NotAllowed
from aimgpu.isolation.protocols import Enforcement, Offer

CGROUPS = Path("/sys/fs/cgroup")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)


class DmemLimits:
    """One control group a tenant, under `parent`; whoever starts the tenant puts it there (`join`).

    The limit counts a whole physical GPU, so it is offered on unpartitioned Devices only. Not tried on AMD hardware: the
    files are those of the kernel's documentation.
    """

    name = "dmem"

    def __init__(self, parent: str = "aimgpu", *, root: Path = CGROUPS) -> None:
        self._root = root
        self._parent = root / parent

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        del exclusive
        if device.simulated or device.vendor is not Vendor.AMD:
            return Offer(level=None, reason="dmem is for real AMD devices")
        if len(device.layout.partitions) != 1:
            return Offer(level=None, reason=f"dmem counts the whole of {device.id}, which is partitioned")
        reason = self._missing() or (None if self._region_of(device, partition) else f"dmem does not know {device.id}")
        return Offer(level=None if reason else Level.DRIVER, reason=reason)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        reason, region = self._missing(), self._region_of(device, partition)
        if reason is not None or region is None:
            raise HardwareUnavailable(f"no dmem limit for {device.id}: {reason or 'the kernel does not list it'}")
        group = self._group(grant)
        try:
            self._parent.mkdir(exist_ok=True)
            (self._parent / "cgroup.subtree_control").write_text("+dmem")
            group.mkdir(exist_ok=True)
            (group / "dmem.max").write_text(f"{region} {grant.memory_bytes}\n")
            limits = _parse((group / "dmem.max").read_text())
        except PermissionError as error:
            raise NotAllowed(
                f"may not write {group}", hint="Run the daemon as root, or delegate a control group to it."
            ) from error
        if limits.get(region) != str(grant.memory_bytes):
            raise HardwareUnavailable(f"dmem of {group} reads {limits.get(region)!r}, {grant.memory_bytes} was written")
        return Enforcement(level=Level.DRIVER, mechanism=self.name)

    def join(self, grant: Grant, pid: int) -> None:
        """Put a process, and all that it will start, under the limit; before it opens the device."""
        (self._group(grant) / "cgroup.procs").write_text(str(pid))

    def release(self, grant: Grant) -> None:
        group = self._group(grant)
        if group.exists():
            group.rmdir()

    def _group(self, grant: Grant) -> Path:
        return self._parent / _UNSAFE.sub("_", grant.id)

    def _missing(self) -> str | None:
        try:
            controllers = (self._root / "cgroup.controllers").read_text().split()
        except OSError:
            return "no cgroup v2 here"
        return None if "dmem" in controllers else "the kernel has no dmem controller"

    def _region_of(self, device: Device, partition: Partition) -> str | None:
        """`drm/0000:05:00.0/vram` of this Device, as the kernel lists it."""
        try:
            known = _parse((self._root / "dmem.capacity").read_text())
        except OSError:
            return None
        names = [text.lower() for text in (device.id, partition.uuid or "", partition.render_node or "")]
        addresses = {found for name in names for found in _BDF.findall(name)}
        matches = [key for key in known if any(address in key.lower() for address in addresses) and key.endswith("/vram")]
        return matches[0] if len(matches) == 1 else None


def _parse(text: str) -> dict[str, str]:
    lines = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}  # noqa: PLR2004 name and value
