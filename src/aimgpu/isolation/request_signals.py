"""The signals by which the gate learns which instances serve a request now: found here, used by the gateway."""

from collections.abc import Iterable
from pathlib import Path

from aimgpu.errors import AimGpuError
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.region import Region


class RegionRequestSignals:
    """Signals by instance id. Never raises: an instance without a region, or with a broken one, has no signal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._regions: dict[Path, Region] = {}
        self._ids: frozenset[str] = frozenset()
        self._found: dict[str, tuple[CriticalSignal, ...]] = {}

    def find(self, instance_ids: Iterable[str]) -> dict[str, tuple[CriticalSignal, ...]]:
        """Of those of these instances that a gate watches. Reads files: not for the event loop."""
        ids = frozenset(instance_ids)
        paths = tuple(sorted(self._directory.glob("*.region")))
        same = ids == self._ids and set(paths) == set(self._regions) and all(map(_is_current, self._regions.values()))
        if not same:
            self._ids, self._found = ids, self._look(ids, paths)
        return self._found

    def _look(self, ids: frozenset[str], paths: tuple[Path, ...]) -> dict[str, tuple[CriticalSignal, ...]]:
        found: dict[str, tuple[CriticalSignal, ...]] = {}
        self._regions = {path: region for path, region in self._regions.items() if path in paths and _is_current(region)}
        for path in paths:
            try:
                if path not in self._regions:
                    self._regions[path] = Region.open(path)
                region = self._regions[path]
                for name in ids & {use.name for use in region.read_use()}:
                    found[name] = (*found.get(name, ()), CriticalSignal(region, name))
            except (AimGpuError, OSError):
                continue
        return found


def _is_current(region: Region) -> bool:
    """Whether the file is still the one that was opened, and whole."""
    try:
        return region.is_linked and region.is_whole
    except OSError:
        return False
