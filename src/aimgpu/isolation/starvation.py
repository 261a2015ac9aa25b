"""Reports which tenants starve at the gate because their launches are too long for the pauses of a critical tenant."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aimgpu.isolation.region import Region, TenantUse

log = logging.getLogger(__name__)

STARVING_PART = 0.5  # of the time between two looks spent waiting for a pause
_ADVICE = (
    "Use smaller batches or piecewise CUDA graphs, `sharing: promise` on the critical model, a partition of its own, "
    "or a larger AIMGPU_GATE_ALLOWANCE."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starvation:
    """A tenant whose long launches wait most of the time, and for which tenants."""

    tenant: str
    launch_milliseconds: float
    waited_part: float  # of the time since the last look
    higher: tuple[str, ...]

    @property
    def text(self) -> str:
        """For the log and for people."""
        others = ", ".join(self.higher) or "higher tenants"
        return (
            f"{self.tenant} waited {self.waited_part:.0%} of the time for a pause of {others}: its launches take up to "
            f"{self.launch_milliseconds:.0f} ms and cannot be interrupted. {_ADVICE}"
        )


class StarvationReporter:
    """Compares what was held since the last look. The caller has the clock; what was reported is logged once while it lasts."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: dict[str, tuple[float, float]] = {}  # tenant -> time, seconds held by then
        self._known: frozenset[str] = frozenset()

    def look(self, regions: Iterable[Region]) -> tuple[Starvation, ...]:
        """The tenants that starve now."""
        found: list[Starvation] = []
        for region in regions:
            uses = region.read_use()
            found += [starving for use in uses if (starving := self._judge(use, uses)) is not None]
        for starving in found:
            if starving.tenant not in self._known:
                log.warning("gate.starving: %s", starving.text)
        self._known = frozenset(starving.tenant for starving in found)
        return tuple(found)

    def _judge(self, use: TenantUse, uses: Iterable[TenantUse]) -> Starvation | None:
        now = self._now()
        before, held = self._last.get(use.name, (now, use.held_seconds))
        self._last[use.name] = (now, use.held_seconds)
        passed = now - before
        part = (use.held_seconds - held) / passed if passed > 0 else 0.0
        if part < STARVING_PART:
            return None
        higher = tuple(one.name for one in uses if one.priority.rank > use.priority.rank and one.requests)
        return Starvation(
            tenant=use.name, launch_milliseconds=use.longest_launch_ns / 1e6, waited_part=min(part, 1.0), higher=higher
        )
