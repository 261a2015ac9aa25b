"""Steers how much of the device lower-priority tenants may use while an instance works."""

import logging
from collections.abc import Callable, Iterable, Sequence

from aimgpu.errors import AimGpuError
from aimgpu.isolation.region import Region, TenantUse
from aimgpu.units import PPM

log = logging.getLogger(__name__)


class GateYield:
    """A device without regions has no gate, and then nothing is done."""

    def __init__(self, regions: Callable[[], Iterable[Region]]) -> None:
        self._regions = regions

    def apply(self, instance_id: str, share: float) -> bool:
        """`share` 0: the strict gate; 1: no gate. Whether there was one to steer. Never raises."""
        ppm = round(min(max(share, 0.0), 1.0) * PPM)
        try:
            found = [region.set_yield(instance_id, ppm) for region in self._regions()]  # all of them, not the first alone
        except (AimGpuError, OSError) as error:
            log.warning("gate.not_steered", extra={"data": {"instance": instance_id, "reason": str(error)}})
            return False
        return any(found)

    def read_lower(self, instance_id: str) -> float | None:
        """Seconds of device time counted so far for lower-priority tenants beside it; None: there are none. Never raises."""
        try:
            return _lower_seconds([region.read_use() for region in self._regions()], instance_id)
        except (AimGpuError, OSError):
            return None


def _lower_seconds(regions: Iterable[Sequence[TenantUse]], instance_id: str) -> float | None:
    found: list[float] = []
    for tenants in regions:
        own = next((use for use in tenants if use.name == instance_id), None)
        if own is not None:
            found += [use.gpu_seconds for use in tenants if use.priority.rank < own.priority.rank]
    return sum(found) if found else None
