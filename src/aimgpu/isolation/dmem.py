"""cgroup v2 `dmem`: the kernel itself limits the device memory of a control group (amdgpu; Linux 6.14 and later)."""

import contextlib
import errno
import os
import re
import time
from pathlib import Path

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.errors import HardwareUnavailable, NotAllowed, ShareInUse
from aimgpu.isolation.protocols import Enforcement, Offer
from aimgpu.units import format_bytes

MOUNTS = Path("/proc/self/mounts")
SYSFS = Path("/sys")
_DEFAULT_ROOT = Path("/sys/fs/cgroup")
_CONTROLLER = "dmem"
_PAGE_BYTES = 4096
_EMPTY_SECONDS = 2.0  # a killed process leaves its group a moment after it is gone
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)


def find_cgroup_root(mounts: Path = MOUNTS) -> Path:
    """Where cgroup v2 is mounted: by itself, or beside the older hierarchies."""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            words = line.split()
            if len(words) > 2 and words[2] == "cgroup2":  # noqa: PLR2004 - what, where, kind
                return Path(words[1])
    return _DEFAULT_ROOT


class DmemLimits:
    """One control group an instance, under `parent`; the launcher puts its processes there before they open the device.

    `parent` is made where we may (as root), or was delegated to us. The limit counts a whole physical GPU, so it is offered
    on unpartitioned devices only. Not tried on AMD hardware: the files are those of the kernel's documentation.
    """

    name = "dmem"

    def __init__(self, *, root: Path | None = None, parent: Path | None = None, sysfs: Path = SYSFS) -> None:
        self._root = root or find_cgroup_root()
        self._parent = parent or self._root / "aimgpu"
        self._sysfs = sysfs
        self._regions: dict[str, str] = {}  # of each grant, as the kernel names them

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """The level that it can give on this partition, or why it gives none."""
        del exclusive
        if device.simulated or device.vendor is not Vendor.AMD:
            return Offer(level=None, reason="dmem is for real AMD devices")
        if len(device.layout.partitions) != 1:
            return Offer(level=None, reason=f"dmem counts the whole of {device.id}, which is partitioned")
        reason = self._missing() or (None if self._region_of(device, partition) else f"dmem does not know {device.id}")
        return Offer(level=None if reason else Level.DRIVER, reason=reason)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """Prepare the grant's limits, and return how its process has to be started."""
        reason, region = self._missing(), self._region_of(device, partition)
        if reason is not None or region is None:
            raise HardwareUnavailable(f"no dmem limit for {device.id}: {reason or 'the kernel does not list it'}")
        group = self.group_of(grant)
        try:
            self._make(group)
            self._limit(group, region, grant.memory_bytes)
            self._regions[grant.id] = region
        except PermissionError as error:
            raise NotAllowed(
                f"may not write {group}", hint="Run the daemon as root, or delegate a control group to it (AIMGPU_CGROUP)."
            ) from error
        return Enforcement(level=Level.DRIVER, mechanism=self.name, control_group=group)

    def group_of(self, grant: Grant) -> Path:
        """The control group of the grant's processes; None where there is none."""
        return self._parent / _UNSAFE.sub("_", grant.instance_id)

    def read_used_bytes(self, grant: Grant) -> int | None:
        """Of the grant's device; the group's other devices have grants of their own."""
        if not self.group_of(grant).exists():
            return None
        used = self._lines(grant, "dmem.current").get(self._limited(grant), "0")
        return int(used) if used.isdigit() else 0

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        """Change the memory limit of a running instance."""
        used = self.read_used_bytes(grant)
        if used is None:
            return
        if memory_bytes < used:
            raise ShareInUse(
                f"{grant.instance_id} uses {format_bytes(used)}, its limit cannot fall to {format_bytes(memory_bytes)}",
                hint="Let it free memory first, or stop it.",
            )
        self._limit(self.group_of(grant), self._limited(grant), memory_bytes)

    def release(self, grant: Grant) -> None:
        """Remove the group. One that still has processes (which is an error of who stopped them) is left as it is."""
        group = self.group_of(grant)
        deadline = time.monotonic() + _EMPTY_SECONDS
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    return
                time.sleep(0.01)
            else:
                return

    def _make(self, group: Path) -> None:
        """Down from the root: a controller can be used in a group only if every group above hands it down."""
        self._parent.mkdir(parents=True, exist_ok=True)
        for folder in _between(self._root, self._parent):
            control = folder / "cgroup.subtree_control"
            if not control.exists() or _CONTROLLER not in control.read_text().split():
                control.write_text(f"+{_CONTROLLER}")
        group.mkdir(exist_ok=True)

    def _limit(self, group: Path, region: str, memory_bytes: int) -> None:
        (group / "dmem.max").write_text(f"{region} {memory_bytes}\n")
        found = _parse((group / "dmem.max").read_text()).get(region, "")
        if not found.isdigit() or not 0 <= memory_bytes - int(found) < _PAGE_BYTES:  # the kernel may count in pages
            raise HardwareUnavailable(f"dmem of {group} reads {found!r}, {memory_bytes} was written")

    def _limited(self, grant: Grant) -> str:
        """The grant's device as the kernel names it; after a restart of the daemon it is read from the group's limits."""
        limited = [region for region, value in self._lines(grant, "dmem.max").items() if value != "max"]
        region = self._regions.get(grant.id) or (limited[0] if len(limited) == 1 else None)
        if region is None:
            raise HardwareUnavailable(f"{grant.instance_id} has limits on {len(limited)} devices", hint="Restart the model.")
        return region

    def _lines(self, grant: Grant, name: str) -> dict[str, str]:
        try:
            return _parse((self.group_of(grant) / name).read_text())
        except OSError as error:
            raise HardwareUnavailable(f"cannot read {name} of {grant.instance_id}: {error.strerror}") from error

    def _missing(self) -> str | None:
        try:
            controllers = (self._root / "cgroup.controllers").read_text().split()
        except OSError:
            return "no cgroup v2 here"
        if _CONTROLLER not in controllers:
            return "the kernel has no dmem controller"
        nearest = next(folder for folder in (self._parent, *self._parent.parents) if folder.exists())
        return None if os.access(nearest, os.W_OK) else f"may not make control groups in {nearest}"

    def _region_of(self, device: Device, partition: Partition) -> str | None:
        """`drm/0000:05:00.0/vram` of this device, as the kernel lists it."""
        try:
            known = _parse((self._root / "dmem.capacity").read_text())
        except OSError:
            return None
        addresses = {*_BDF.findall(device.id.lower()), *self._behind(partition.render_node)}
        matches = [key for key in known if any(address in key.lower() for address in addresses) and key.endswith("/vram")]
        return matches[0] if len(matches) == 1 else None

    def _behind(self, render_node: str | None) -> list[str]:
        """The PCI address behind /dev/dri/renderD128."""
        with contextlib.suppress(OSError):
            link = self._sysfs / "class" / "drm" / Path(render_node or "none").name / "device"
            return _BDF.findall(link.readlink().name.lower())
        return []


def _between(root: Path, folder: Path) -> list[Path]:
    """`root`, and what lies between it and `folder`, and `folder`; that alone where it lies elsewhere."""
    if not folder.is_relative_to(root):
        return [folder]
    inner = folder.relative_to(root).parts
    return [root.joinpath(*inner[:count]) for count in range(len(inner) + 1)]


def _parse(text: str) -> dict[str, str]:
    lines = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}  # noqa: PLR2004 name and value
