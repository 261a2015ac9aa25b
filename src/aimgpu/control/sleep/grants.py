"""What an instance holds while it sleeps in place, and what it needs again to wake. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from aimgpu.domain import Deployment, Footprint, Grant, Instance, SleepFootprint, Slot
from aimgpu.engines.protocols import Engine, Sleeper
from aimgpu.units import MIB

_LEAST_BYTES = MIB  # one that runs holds a place in the books, even where it holds nothing on the Device


def rest_of(engine: Engine, deployment: Deployment, footprint: Footprint) -> SleepFootprint | None:
    """What it will hold asleep, by its Footprint; None where it is to be stopped instead."""
    if deployment.keep_seconds is None or not deployment.sleeps_in_place or not isinstance(engine, Sleeper):
        return None
    kept = sum(term.memory_bytes for term in footprint.terms if term.name not in engine.gives_back)
    host = sum(term.memory_bytes for term in footprint.terms if term.name in engine.keeps_on_host)
    return SleepFootprint(device_bytes=max(kept, _LEAST_BYTES), host_bytes=host)


def asleep_grants(instance: Instance, measured: Mapping[str, int]) -> tuple[Grant, ...]:
    """What it holds while it sleeps: as estimated, or as measured by Device where that is more; never more than before.

    Nobody can use the rest of a Partition that it has for itself, so such a Grant stays whole.
    """
    least = instance.sleep_footprint.device_bytes if instance.sleep_footprint else 0
    return tuple(_asleep(grant, max(least, measured.get(grant.device_id, 0))) for grant in instance.grants)


def awake_grants(instance: Instance) -> tuple[Grant, ...]:
    """What it held before it fell asleep, enforced as it is now."""
    slots = {slot.partition_id: slot for slot in instance.awake_slots}
    return tuple(_awake(grant, slots.get(grant.partition_id)) for grant in instance.grants)


def _asleep(grant: Grant, memory_bytes: int) -> Grant:
    if grant.exclusive:
        return grant
    return replace(grant, memory_bytes=min(grant.memory_bytes, memory_bytes), compute_ppm=None)


def _awake(grant: Grant, slot: Slot | None) -> Grant:
    return grant if slot is None else replace(grant, memory_bytes=slot.memory_bytes, compute_ppm=slot.compute_ppm)
