"""The interposer as a mechanism: a region for each Partition, a tenant in it for each Grant, and the variables that load it."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.errors import HardwareUnavailable
from aimgpu.isolation.building import find_interposer
from aimgpu.isolation.protocols import Enforcement, Offer
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import MIB, PPM

# What a process holds on the device before its first allocation, unseen by the library; the sizing room counts the same.
CONTEXT_BYTES = {Vendor.NVIDIA: 512 * MIB, Vendor.AMD: 1100 * MIB}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def region_path(directory: Path, partition_id: str) -> Path:
    return directory / f"{_UNSAFE.sub('_', partition_id)}.region"


class Interposer:
    """Caps memory at the driver's interface and lets more important tenants go first.

    Cooperative: it holds programs that link or load the driver as everybody does, not one that makes system calls of its own,
    is linked statically, or drops `LD_PRELOAD`. The watchdog notices those.
    """

    name = "interposer"

    def __init__(
        self,
        directory: Path,
        *,
        find_library: Callable[[], Path] = find_interposer,
        context_bytes: Mapping[Vendor, int] = CONTEXT_BYTES,
    ) -> None:
        self._directory = directory
        self._find_library = find_library
        self._context_bytes = context_bytes
        self._regions: dict[Path, Region] = {}
        self._paths: dict[str, list[Path]] = {}  # instance -> its regions, in the order of its devices
        self._unavailable: str | None = None
        self._library: Path | None = None

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        del partition, exclusive
        if device.simulated:
            return Offer(level=None, reason=f"{device.id} is simulated: the engine runs on the CPU")
        try:
            self.library()
        except HardwareUnavailable as error:
            return Offer(level=None, reason=error.message)
        return Offer(level=Level.RUNTIME)

    def library(self) -> Path:
        """Built on first use; a machine that cannot build it is asked only once."""
        if self._unavailable is not None:
            raise HardwareUnavailable(self._unavailable)
        if self._library is None:
            try:
                self._library = self._find_library()
            except HardwareUnavailable as error:
                self._unavailable = error.message
                raise
        return self._library

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        library = self.library()
        path = region_path(self._directory, partition.id)
        region = self.region(partition.id, memory_bytes=partition.memory_bytes, uuid=partition.uuid or "")
        limits = TenantLimits(
            name=grant.instance_id,
            cap_bytes=grant.memory_bytes,
            priority=grant.priority,
            compute_ppm=grant.compute_ppm or PPM,
            context_bytes=self._context_bytes.get(device.vendor, 0),
        )
        region.reap()
        region.admit(limits)
        paths = self._paths.setdefault(grant.instance_id, [])
        if path not in paths:
            paths.append(path)
        demanded = grant.level.rank >= Level.RUNTIME.rank
        return Enforcement(
            level=Level.RUNTIME,
            mechanism=self.name,
            environment={
                "LD_PRELOAD": _preload(library),
                "AIMGPU_REGION": ":".join(map(str, paths)),
                "AIMGPU_TENANT": grant.instance_id,
                "AIMGPU_FAIL": "closed" if demanded else "open",
            },
        )

    def release(self, grant: Grant) -> None:
        self._paths.pop(grant.instance_id, None)
        path = region_path(self._directory, grant.partition_id)
        if path.exists():
            self._open(path).dismiss(grant.instance_id)

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        """Change the cap of a running instance. Raises ShareInUse below what it uses."""
        self._open(region_path(self._directory, grant.partition_id)).resize(grant.instance_id, memory_bytes)

    def region(self, partition_id: str, *, memory_bytes: int, uuid: str = "") -> Region:
        path = region_path(self._directory, partition_id)
        if path not in self._regions:
            self._regions[path] = Region.create(path, device_bytes=memory_bytes, device=uuid)
        return self._regions[path]

    def regions(self) -> tuple[Region, ...]:
        """Every region of this directory that can be read, for metrics and the watchdog."""
        return tuple(self._open(path) for path in sorted(self._directory.glob("*.region")))

    def _open(self, path: Path) -> Region:
        if path not in self._regions:
            self._regions[path] = Region.open(path)
        return self._regions[path]


def _preload(library: Path) -> str:
    """Ours before whatever the user preloads."""
    already = os.environ.get("LD_PRELOAD")
    return f"{library}:{already}" if already else str(library)
