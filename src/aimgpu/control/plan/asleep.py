"""What sleeps in place: what it holds meanwhile, who can wake where it is, and who must go for another. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from aimgpu.domain import Deployment, Footprint, Grant, Instance, InstanceState, SleepFootprint, Slot
from aimgpu.engines.protocols import Engine, Sleeper
from aimgpu.placement import DeviceState, Snapshot
from aimgpu.placement.fit import free_bytes
from aimgpu.units import MIB, PPM

_LEAST_BYTES = MIB  # one that runs has a grant, even where it holds nothing on the GPU


def sleep_footprint_of(engine: Engine, deployment: Deployment, footprint: Footprint) -> SleepFootprint | None:
    """What it will hold asleep, by its footprint; None where it is to be stopped instead."""
    if not is_to_sleep(deployment) or not isinstance(engine, Sleeper):
        return None
    kept = sum(term.memory_bytes for term in footprint.terms if term.name not in engine.gives_back)
    host = sum(term.memory_bytes for term in footprint.terms if term.name in engine.keeps_on_host)
    return SleepFootprint(device_bytes=max(kept, _LEAST_BYTES), host_bytes=host)


def is_to_sleep(deployment: Deployment) -> bool:
    """Whether it is to sleep in place when it is idle, where its engine can."""
    return deployment.keep_seconds is not None and deployment.sleeps_in_place


def asleep_grants(instance: Instance, measured: Mapping[str, int]) -> tuple[Grant, ...]:
    """What it holds while it sleeps: the estimate, or what is measured on a device if that is more, but never more than before.

    No other model can use the rest of a partition that it has for itself, so such a grant stays whole.
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


def can_wake_in_place(snapshot: Snapshot, instance: Instance, avoided: frozenset[str]) -> bool:
    """Whether everything that it held is free again where it sleeps, beside what was placed there meanwhile."""
    if not instance.sleeps_in_place or not instance.grants:
        return False
    without = snapshot.without_instance(instance.id)
    states = {state.device.id: state for _, state in without.devices()}
    return all(has_room(states.get(grant.device_id), grant, avoided) for grant in awake_grants(instance))


def with_grants(snapshot: Snapshot, instance_id: str, grants: Sequence[Grant]) -> Snapshot:
    """The Snapshot in which this instance holds these."""
    cleared = snapshot.without_instance(instance_id)
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(state, grants=(*state.grants, *(grant for grant in grants if grant.device_id == state.device.id)))
                for state in node.devices
            ),
        )
        for node in cleared.nodes
    )
    return replace(cleared, nodes=nodes)


def as_if_asleep(snapshot: Snapshot, running: Sequence[Instance], names: Collection[str]) -> tuple[Snapshot, list[Instance]]:
    """The world once these deployments sleep: in place where they can, else gone."""
    after = []
    for instance in running:
        if instance.deployment not in names or instance.state is not InstanceState.READY:
            after.append(instance)
        elif instance.sleep_footprint is None:
            snapshot = snapshot.without_instance(instance.id)
            after.append(replace(instance, state=InstanceState.SLEEPING, process=None, grants=()))
        else:
            grants = asleep_grants(instance, {})
            snapshot = with_grants(snapshot, instance.id, grants)
            after.append(replace(instance, state=InstanceState.SLEEPING, grants=grants))
    return snapshot, after


def least_unloading(sleepers: Iterable[Instance], is_enough: Callable[[Sequence[Instance]], bool]) -> list[Instance] | None:
    """The fewest found that must be unloaded, those of low priority first; None where all of them are not enough."""
    chosen: list[Instance] = []
    for sleeper in sorted(sleepers, key=lambda one: (one.grants[0].priority.rank, one.id)):
        chosen.append(sleeper)
        if is_enough(chosen):
            break
    else:
        return None
    for sleeper in list(reversed(chosen)):
        without = [other for other in chosen if other is not sleeper]
        if is_enough(without):
            chosen = without
    return chosen


def has_room(state: DeviceState | None, grant: Grant | Slot, avoided: frozenset[str]) -> bool:
    partition = state.device.partition(grant.partition_id) if state else None
    if state is None or partition is None:
        return False
    if avoided & {other.deployment for other in state.grants}:
        return False
    others = [other for other in state.grants if other.partition_id == partition.id]
    if grant.exclusive:
        return not others and state.foreign_on(partition) == 0
    compute = sum(other.compute_ppm or 0 for other in others) + (grant.compute_ppm or 0)
    return free_bytes(state, partition) >= grant.memory_bytes and compute <= PPM
