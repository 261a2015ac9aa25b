"""The interposer as a mechanism: a region for each partition, a tenant in it for each grant, and the variables that load it."""

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.errors import InvalidInput, RegionUnusable
from aimgpu.isolation.building import find_interposer, why_unavailable
from aimgpu.isolation.protocols import Enforcement, Offer
from aimgpu.isolation.region import GateBounds, Region, TenantLimits, TenantUse
from aimgpu.sizing.overhead import CONTEXT_BYTES
from aimgpu.units import PPM

ALLOWANCE_VARIABLE = "AIMGPU_GATE_ALLOWANCE"
_LEAST_ALLOWANCE, _MOST_ALLOWANCE = 0.1, 100.0  # percent
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def regions_directory(home: Path) -> Path:
    """Where the regions of a daemon lie: in memory where there is such a place, else beside its other files.

    The folder above is private to the daemon's user. Containers get the inner one mounted, and may run as any user.
    Nothing is made here; who owns the folders is checked again when they are made.
    """
    memory = Path("/dev/shm")  # noqa: S108 checked for its owner before it is used
    if not os.access(memory, os.W_OK):
        return home / "regions"
    chosen = memory / f"aimgpu-{os.getuid()}-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]}"
    try:
        found = chosen.lstat()
    except OSError:
        return chosen / "regions"
    # Any user may make a folder there first; one that is not ours is not used.
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return chosen / "regions" if ours else home / "regions"


def read_gate_bounds(environment: Mapping[str, str]) -> GateBounds:
    """The gate's bounds, with what `AIMGPU_GATE_ALLOWANCE` sets; raises InvalidInput where that is not a percentage."""
    text = environment.get(ALLOWANCE_VARIABLE, "").strip().removesuffix("%")
    if not text:
        return GateBounds()
    try:
        percent = float(text)
    except ValueError:
        percent = -1.0
    if not _LEAST_ALLOWANCE <= percent <= _MOST_ALLOWANCE:
        raise InvalidInput(
            f"{ALLOWANCE_VARIABLE} is {text!r}, not a percentage from {_LEAST_ALLOWANCE} to {_MOST_ALLOWANCE}",
            hint="Set it to the part of a critical model's requests that long launches of others may delay, such as 5.",
        )
    return GateBounds(allowance_ppm=round(percent * PPM / 100))


def region_path(directory: Path, partition_id: str) -> Path:
    """The file of one partition's region."""
    return directory / f"{_UNSAFE.sub('_', partition_id)}.region"


class Interposer:
    """Caps memory at the driver's interface and gates launches by priority.

    Cooperative: it holds programs that link or load the driver in the usual ways, not one that makes system calls of its own,
    is linked statically, or drops `LD_PRELOAD`. The watchdog detects those.
    """

    name = "interposer"

    def __init__(
        self,
        directory: Path,
        *,
        find_library: Callable[[], Path] = find_interposer,
        why_not: Callable[[], str | None] = why_unavailable,
        context_bytes: Mapping[Vendor, int] = CONTEXT_BYTES,
        bounds: GateBounds | None = None,
    ) -> None:
        self._bounds = bounds or GateBounds()
        self._directory = directory
        self._find_library = find_library
        self._why_not = why_not
        self._context_bytes = context_bytes
        self._regions: dict[Path, Region] = {}
        self._unlinked: list[Region] = []  # whose files were removed; they still hold processes that have them mapped
        self._making = threading.Lock()  # instances start side by side: the second must find the region of the first
        self._paths: dict[str, list[Path]] = {}  # instance -> its regions, in the order of its devices

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        """The level that it can give on this partition, or why it gives none."""
        del partition, exclusive
        if device.simulated and not device.software:
            return Offer(level=None, reason=f"{device.id} is simulated: the engine runs on the CPU")
        reason = self._why_not()
        return Offer(level=None if reason else Level.RUNTIME, reason=reason)

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """Prepare the grant's limits, and return how its process has to be started."""
        library = self._find_library()  # built now, if it was not before
        path = region_path(self._directory, partition.id)
        region = self.region(partition.id, memory_bytes=partition.memory_bytes, uuid=partition.uuid or "")
        limits = TenantLimits(
            name=grant.instance_id,
            cap_bytes=grant.memory_bytes,
            priority=grant.priority,
            compute_ppm=grant.compute_ppm or PPM,
            context_bytes=0 if device.software else self._context_bytes.get(device.vendor, 0),
            rounding_bytes=1 if device.software else 0,
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
        """Undo what `enforce` prepared. Safe to call twice."""
        self._paths.pop(grant.instance_id, None)
        for region in self._holding(grant):
            region.dismiss(grant.instance_id)

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        """Change the cap of a running instance; nothing where it is not held here. Raises ShareInUse below what it uses."""
        for region in self._holding(grant):
            region.resize(grant.instance_id, memory_bytes)

    def read_used_bytes(self, grant: Grant) -> int | None:
        """What the grant's processes use now; None where it is not known."""
        for region in self._holding(grant):
            region.reap()
            return next((use.used_bytes for use in region.read_use() if use.name == grant.instance_id), None)
        return None

    def read_peak_bytes(self, grant: Grant) -> int | None:
        """The most that they used at once since it was granted."""
        uses = (use for region in self._holding(grant) for use in region.read_use() if use.name == grant.instance_id)
        return next((use.peak_bytes for use in uses), None)

    def region(self, partition_id: str, *, memory_bytes: int, uuid: str = "") -> Region:
        """The region of a partition, made where there is none."""
        path = region_path(self._directory, partition_id)
        with self._making:
            if not self._is_usable(path):
                mode = self._prepare_directory()
                region = Region.create(path, device_bytes=memory_bytes, device=uuid, bounds=self._bounds, mode=mode)
                region.header.allowance_ppm = self._bounds.allowance_ppm  # also of one that is older than the setting
                self._regions[path] = region
            return self._regions[path]

    def _prepare_directory(self) -> int:
        """Make the folder; the mode that its regions get.

        Below a folder that only this user can enter, regions may be open to all: a container that gets them mounted can use
        them as whatever user it runs as, and no other user of this machine can reach them.
        """
        outer = self._directory.parent
        with contextlib.suppress(FileExistsError):  # a file or a link to nothing: opening it says so
            outer.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened_folder(outer, owners=frozenset({os.getuid(), 0})) as above:
            found = os.fstat(above)
            if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX and found.st_uid != os.getuid():
                raise RegionUnusable(f"{outer} can be changed by every user", hint="Use another folder.")
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._directory.name, mode=0o700, dir_fd=above)
            private = found.st_uid == os.getuid() and not found.st_mode & 0o077
            with _opened_folder(self._directory, owners=frozenset({os.getuid()}), above=above) as inner:
                os.fchmod(inner, 0o711 if private else 0o700)
        return 0o666 if private else 0o600

    def read_tenants(self, partition_id: str) -> Mapping[str, TenantUse]:
        """What each instance on this partition uses; empty where no instance is held there."""
        region = self.find_region(partition_id)
        return {use.name: use for use in region.read_use()} if region else {}

    def find_region(self, partition_id: str) -> Region | None:
        """The one of this partition, if there is one that can be read."""
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


@contextlib.contextmanager
def _opened_folder(path: Path, *, owners: frozenset[int], above: int | None = None) -> Iterator[int]:
    """The folder that is there now, not a link to another, and of one of these users: checked on what was opened.

    A check of the path before the folder is made, or after, could be about another folder than the one that is used.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        opened = os.open(path if above is None else path.name, flags, dir_fd=above)
    except OSError as error:
        why = "is a link" if path.is_symlink() else f"cannot be opened as a folder ({error.strerror})"
        raise RegionUnusable(f"{path} {why}", hint="Ask an administrator to delete it.") from error
    try:
        if os.fstat(opened).st_uid not in owners:
            raise RegionUnusable(f"{path} belongs to another user", hint="Ask an administrator to delete it.")
        yield opened
    finally:
        os.close(opened)


def _preload(library: Path) -> str:
    """Ours before whatever the user preloads."""
    already = os.environ.get("LD_PRELOAD")
    return f"{library}:{already}" if already else str(library)
