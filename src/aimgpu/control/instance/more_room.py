"""A start that died at its memory limit is repeated with what it missed, where the GPU has it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.plan.prepared import Prepared
from aimgpu.domain import Auto, Instance
from aimgpu.engines.protocols import ShortfallReader
from aimgpu.errors import Conflict, EngineFailed
from aimgpu.sizing.startup import with_more_startup
from aimgpu.units import MIB, format_bytes

_LINES_WITH_CAUSE = 300
_MARGIN_BYTES = 128 * MIB  # what it missed is the first allocation that was refused, not the last that it needs


def read_missing_bytes(dependencies: Dependencies, instance: Instance) -> int | None:
    """By its log; None: it did not fail for want of GPU memory, or its engine does not say."""
    engine = dependencies.engines[instance.engine]
    if not isinstance(engine, ShortfallReader):
        return None
    lines = dependencies.launchers[instance.launcher].last_lines(dependencies.runs / instance.id, _LINES_WITH_CAUSE)
    return engine.missing_bytes(lines)


ChargeMore = Callable[[Instance, Mapping[str, int]], None]  # an instance with larger grants, and the size of each partition


def give_more_room(  # noqa: PLR0913, PLR0917 - what a start that died left
    dependencies: Dependencies,
    charge: ChargeMore,
    instance: Instance,
    prepared: Prepared,
    missing_bytes: int,
    failure: EngineFailed,
) -> tuple[Instance, Prepared, str]:
    """The instance and its footprint with more room for starting, and a sentence about it.

    What was sized by us gets a larger grant, where no operation needs that room. A share that the user chose stays, and its KV
    cache shrinks. Raises `failure` with the reason where neither is possible. What was missed is kept for later estimates.
    """
    dependencies.note_shortfall(instance, prepared.footprint, missing_bytes)
    added = missing_bytes + _MARGIN_BYTES
    larger = replace(prepared, footprint=with_more_startup(prepared.footprint, added))
    needed, held = larger.footprint.total_bytes, min(grant.memory_bytes for grant in instance.grants)
    name, missed = instance.deployment, format_bytes(missing_bytes)
    if needed <= held:
        return instance, larger, f"{name} missed {missed} at its limit while starting: again with a smaller KV cache"
    if not isinstance(prepared.deployment.present_ask.want, Auto):
        raise EngineFailed(
            f"{failure.message}; it needs about {format_bytes(needed)} to start, and {format_bytes(held)} were asked for",
            hint="Ask for more under `gpu`, or for a shorter context.",
        ) from failure
    grants = tuple(replace(grant, memory_bytes=max(grant.memory_bytes, needed)) for grant in instance.grants)
    grown = replace(instance, grants=grants)
    capacity = {
        part.id: part.memory_bytes for device in dependencies.hardware.read_devices() for part in device.layout.partitions
    }
    try:
        charge(grown, capacity)
    except Conflict as error:
        raise EngineFailed(
            f"{failure.message}; the GPU has no {format_bytes(needed - held)} more for it", hint=failure.hint
        ) from error
    return grown, larger, f"{name} missed {missed} at its limit while starting: again with {format_bytes(needed)}"
