"""What sleeps in place, as plans see it: who can wake where it is, and who must go for another to come. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from aimgpu.control.sleep.grants import asleep_grants, awake_grants
from aimgpu.domain import Grant, Instance, InstanceState
from aimgpu.placement import DeviceState, Snapshot
from aimgpu.placement.fit import free_bytes
from aimgpu.units import PPM


def can_wake_in_place(snapshot: Snapshot, instance: Instance, avoided: frozenset[str]) -> bool:
    """Whether everything that it held is free again where it sleeps, beside what was placed there meanwhile."""
    if not instance.sleeps_in_place or not instance.grants:
        return False
    without = snapshot.without_instance(instance.id)
    states = {state.device.id: state for _, state in without.devices()}
    return all(_has_room(states.get(grant.device_id), grant, avoided) for grant in awake_grants(instance))


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


def _has_room(state: DeviceState | None, grant: Grant, avoided: frozenset[str]) -> bool:
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
