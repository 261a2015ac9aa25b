"""The interposer as a mechanism: a region for each Partition, a tenant in it for each Grant, and the variables that load it."""

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.errors import RegionUnusable
from aimgpu.isolation.building import find_interposer, why_unavailable
from aimgpu.isolation.protocols import Enforcement, Offer
from aimgpu.isolation.region import Region, TenantLimits, TenantUse
from aimgpu.sizing.overhead import CONTEXT_BYTES
from aimgpu.units import PPM

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def regions_directory(home: Path) -> Path:
    """Where the regions of a daemon lie: in memory where there is such a place, else beside its other files."""
    memory = Path("/dev/shm")  # noqa: S108 checked for its owner before it is used
    if not os.access(memory, os.W_OK):
        return home / "regions"
    chosen = memory / f"aimgpu-{os.getuid()}-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]}"
    try:
        found = chosen.lstat()
    except OSError:
        return chosen
    # Anybody may make a folder there first; one that is not ours is left to whoever made it.
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return chosen if ours else home / "regions"


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
        why_not: Callable[[], str | None] = why_unavailable,
        context_bytes: Mapping[Vendor, int] = CONTEXT_BYTES,
    ) -> None:
        self._directory = directory
        self._find_library = find_library
        self._why_not = why_not
        self._context_bytes = context_bytes
        self._regions: dict[Path, Region] = {}
        self._unlinked: list[Region] = []  # whose files somebody removed; they still hold who has them mapped
        self._making = threading.Lock()  # instances start side by side: the second must find the region of the first
        self._paths: dict[str, list[Path]] = {}  # instance -> its regions, in the order of its devices

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        del partition, exclusive
        if device.simulated:
            return Offer(level=None, reason=f"{device.id} is simulated: the engine runs on the CPU")
        reason = self._why_not()
        return Offer(level=None if reason else Level.RUNTIME, reason=reason)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        library = self._find_library()  # built now, where it was not before
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
        for region in self._holding(grant):
            region.dismiss(grant.instance_id)

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        """Change the cap of a running instance; nothing where it is not held here. Raises ShareInUse below what it uses."""
        for region in self._holding(grant):
            region.resize(grant.instance_id, memory_bytes)

    def read_used_bytes(self, grant: Grant) -> int | None:
        for region in self._holding(grant):
            region.reap()
            return next((use.used_bytes for use in region.read_use() if use.name == grant.instance_id), None)
        return None

    def region(self, partition_id: str, *, memory_bytes: int, uuid: str = "") -> Region:
        path = region_path(self._directory, partition_id)
        with self._making:
            if not self._is_usable(path):
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if self._directory.is_symlink() or self._directory.stat().st_uid != os.getuid():
                    raise RegionUnusable(f"{self._directory} is not ours", hint="Somebody else made it; have it removed.")
                self._regions[path] = Region.create(path, device_bytes=memory_bytes, device=uuid)
            return self._regions[path]

    def read_tenants(self, partition_id: str) -> Mapping[str, TenantUse]:
        """What each instance on this Partition uses; empty where nobody of ours is held there."""
        region = self.find_region(partition_id)
        return {use.name: use for use in region.read_use()} if region else {}

    def find_region(self, partition_id: str) -> Region | None:
        """The one of this Partition, where there is one that can be read."""
        with contextlib.suppress(RegionUnusable, FileNotFoundError):
            return self._open(region_path(self._directory, partition_id))
        return None

    def regions(self) -> tuple[Region, ...]:
        """Every region of this directory that can be read, for metrics and the watchdog."""
        found = []
        for path in sorted({*self._directory.glob("*.region"), *self._regions}):
            with contextlib.suppress(RegionUnusable, FileNotFoundError):
                found.append(self._open(path))
        return (*found, *(region for region in self._unlinked if region.is_whole and region.read_use()))

    def _holding(self, grant: Grant) -> list[Region]:
        """The region that this tenant is in, if any."""
        path = region_path(self._directory, grant.partition_id)
        there = self.find_region(grant.partition_id)
        known = [there, *(region for region in (*self._regions.values(), *self._unlinked) if region.path == path)]
        return [
            region
            for region in dict.fromkeys(known)
            if region and region.is_whole and any(use.name == grant.instance_id for use in region.read_use())
        ]

    def _open(self, path: Path) -> Region:
        with self._making:
            if not self._is_usable(path):
                self._regions[path] = Region.open(path)
            return self._regions[path]

    def _is_usable(self, path: Path) -> bool:
        """Whether the one that was opened is still that of this path; one whose file was removed is kept for its tenants."""
        region = self._regions.get(path)
        if region is None or (region.is_linked and region.is_whole):
            return region is not None
        self._unlinked.append(self._regions.pop(path))
        return False


def _preload(library: Path) -> str:
    """Ours before whatever the user preloads."""
    already = os.environ.get("LD_PRELOAD")
    return f"{library}:{already}" if already else str(library)
