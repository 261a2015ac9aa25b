"""While a critical model breaks its promise, low tenants of its device are given less of the compute, and it is said."""

import logging
from collections.abc import Callable, Iterable

from aimgpu.domain import Grant, Priority
from aimgpu.errors import AimGpuError
from aimgpu.isolation.cu_masks import CuMasks
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.isolation.region import Region
from aimgpu.units import PPM

SPACE_LIMITS = frozenset({CuMasks.name, MpsMechanism.name})  # beside these the gate keeps no ceiling on time

log = logging.getLogger(__name__)


class GateThrottle:
    """Steers the launch gate; a device without regions has no gate, and then nothing is done."""

    def __init__(self, grants: Callable[[], Iterable[Grant]], regions: Callable[[], Iterable[Region]]) -> None:
        self._grants = grants
        self._regions = regions

    def apply(self, device_id: str, low_share: float) -> tuple[str, ...]:
        """Low tenants get `low_share` of what they were granted; 1 gives it back. Returns whom it reached. Never raises."""
        try:
            reached = tuple(self._throttle(device_id, low_share))
        except (AimGpuError, OSError) as error:
            log.warning("gate.not_steered", extra={"data": {"device": device_id, "reason": str(error)}})
            return ()
        if reached:
            data = {"device": device_id, "low_share": low_share, "instances": list(reached)}
            log.info("gate.tightened" if low_share < 1 else "gate.released", extra={"data": data})
        return reached

    def _throttle(self, device_id: str, low_share: float) -> Iterable[str]:
        low = [grant for grant in self._grants() if grant.device_id == device_id and grant.priority is Priority.LOW]
        regions = tuple(self._regions()) if low else ()
        for grant in low:
            ceiling = PPM if SPACE_LIMITS & set(grant.mechanisms) else grant.compute_ppm or PPM
            ppm = max(1, round(ceiling * low_share))
            found = [region.throttle(grant.instance_id, ppm) for region in regions]  # all of them, not the first alone
            if any(found):
                yield grant.instance_id
