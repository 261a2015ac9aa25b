"""Tells the gate which instances serve a request now. The gateway calls it; instances without a region cost a lookup."""

from pathlib import Path

from aimgpu.errors import AimGpuError
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.region import Region


class RegionRequestSignals:
    """`begin` and `end` by instance id. Never raises and never blocks a request: a broken region means no signal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._regions: dict[Path, Region] = {}
        self._signals: dict[str, tuple[CriticalSignal, ...]] = {}

    def begin(self, instance_id: str) -> None:
        signals = self._signals.get(instance_id)
        if signals is None:
            signals = self._signals[instance_id] = self._find(instance_id)
        for signal in signals:
            signal.begin()

    def end(self, instance_id: str) -> None:
        for signal in self._signals.get(instance_id, ()):
            signal.end()

    def forget(self, instance_id: str) -> None:
        """The instance is gone; a later one of the same name is looked for anew."""
        self._signals.pop(instance_id, None)

    def _find(self, instance_id: str) -> tuple[CriticalSignal, ...]:
        found = []
        for path in sorted(self._directory.glob("*.region")):
            try:
                known = self._regions.get(path)
                if known is None or not (known.is_linked and known.is_whole):  # removed and made anew since
                    self._regions[path] = Region.open(path)
                found.append(CriticalSignal(self._regions[path], instance_id))
            except (AimGpuError, OSError):
                continue
        return tuple(found)
