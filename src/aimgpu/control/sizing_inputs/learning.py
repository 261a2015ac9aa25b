"""What a run that became ready was seen to take, kept for later estimates."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.domain import Exactness, Footprint, Instance, Term
from aimgpu.errors import AimGpuError
from aimgpu.hardware.protocols import UsageReader
from aimgpu.procfs import read_tree
from aimgpu.sizing.correction import Measurement
from aimgpu.sizing.listed import NAME as LISTED
from aimgpu.sizing.log_lines import read_log_lines
from aimgpu.sizing.startup import NAME as STARTUP

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLearner:
    """Compares a footprint with the engine's log and the device's own count. What fails here fails no instance."""

    measurements: MeasurementFile
    usage: UsageReader
    clock: Callable[[], float] = time.time

    def __call__(self, instance: Instance, footprint: Footprint, lines: tuple[str, ...]) -> None:
        if footprint.family is None or footprint.gpu is None:
            return  # too little is known of it to say what it is like
        try:
            found = read_log_lines(instance.engine, lines)
            found |= self._startup_bytes(instance, footprint, found)
            self.measurements.add(self._compare(instance, footprint, found))
        except (AimGpuError, OSError) as error:
            log.warning("measurement.failed", extra={"data": {"instance": instance.id, "error": str(error)}})

    def note_shortfall(self, instance: Instance, footprint: Footprint, missing_bytes: int) -> None:
        """An engine died at its cap while it started, this many bytes short: the next estimate of the model adds them."""
        if footprint.family is None or footprint.gpu is None:
            return
        try:
            needed = footprint.term_bytes(STARTUP) + missing_bytes
            self.measurements.add(self._compare(instance, footprint, {STARTUP: needed}))
        except (AimGpuError, OSError) as error:
            log.warning("measurement.failed", extra={"data": {"instance": instance.id, "error": str(error)}})

    def _compare(self, instance: Instance, footprint: Footprint, found: dict[str, int]) -> Iterator[Measurement]:
        for term in footprint.terms:
            if term.name in found and term.exactness is not Exactness.EXACT:
                yield Measurement(
                    model=instance.model,
                    engine=instance.engine,
                    engine_version=footprint.engine_version,
                    family=footprint.family or "",
                    gpu=footprint.gpu or "",
                    term=term.name,
                    estimated_bytes=_before_correction(term),
                    measured_bytes=found[term.name],
                    at=int(self.clock()),
                )

    def _startup_bytes(self, instance: Instance, footprint: Footprint, found: dict[str, int]) -> dict[str, int]:
        """What the device counts for the engine's processes beyond all other terms, where it counts by process.

        The context stays as estimated: the interposer counts that much of every grant for it.
        """
        counted = self._counted_bytes(instance)
        if counted is None:
            return {}
        others = sum(found.get(term.name, term.memory_bytes) for term in footprint.terms if term.name not in (STARTUP, LISTED))
        return {STARTUP: max(counted - others, 1)}

    def _counted_bytes(self, instance: Instance) -> int | None:
        if instance.process is None or len(instance.grants) != 1:
            return None
        pids = read_tree(instance.process.pid)
        usage = (one for one in self.usage.read_usage() if one.device_id == instance.grants[0].device_id)
        sizes = [seen.memory_bytes for one in usage for seen in one.processes if seen.pid in pids and seen.memory_bytes]
        return sum(sizes) or None


def _before_correction(term: Term) -> int:
    """Corrections are learned against the formula, not against themselves."""
    estimated = term.inputs.get("estimated_bytes")
    return estimated if term.exactness is Exactness.MEASURED and isinstance(estimated, int) else term.memory_bytes
