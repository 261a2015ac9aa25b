"""After a crash: what the ledger holds, what runs, and what to do about each difference. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from aimgpu.control.planning.prepared import revision_of
from aimgpu.domain import Deployment, Instance, InstanceState, ProcessIdentity


class RepairKind(StrEnum):
    """What to do about one instance."""

    ADOPT = "adopt"  # runs and is wanted: keep it, and wait for it where it was still loading
    RESTART = "restart"  # wanted, but gone
    UNLOAD = "unload"  # slept in place, and is gone: it stays asleep, and holds nothing
    RELEASE = "release"  # not wanted, or was being released
    STOP = "stop"  # runs, and the ledger does not know it
    SHOW = "show"  # asleep, or failed and tried again later or not at all; stays as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One difference, and what to do about it."""

    kind: RepairKind
    instance_id: str
    instance: Instance | None = None
    process: ProcessIdentity | None = None


def decide_repairs(
    instances: Sequence[Instance],
    wanted: Mapping[str, Deployment],
    alive: Mapping[str, ProcessIdentity],
    partitions: Collection[str],
    retried: Collection[str] = (),
) -> tuple[Repair, ...]:
    """One Repair per instance in the ledger and per process of ours that is not in it.

    `partitions` exist now; `retried` are deployments that are tried again by themselves, or have been often enough.
    """
    repairs = [_repair(instance, wanted, alive.get(instance.id), partitions) for instance in instances]
    repairs = [_restart_forgotten(repair, retried) for repair in _without_replaced(repairs, wanted)]
    known = {instance.id for instance in instances}
    orphans = sorted(set(alive) - known)
    repairs += [Repair(kind=RepairKind.STOP, instance_id=name, process=alive[name]) for name in orphans]
    return tuple(repairs)


def _repair(
    instance: Instance, wanted: Collection[str], process: ProcessIdentity | None, partitions: Collection[str]
) -> Repair:
    def of(kind: RepairKind) -> Repair:
        return Repair(kind=kind, instance_id=instance.id, instance=instance, process=process)

    if instance.deployment not in wanted or instance.state is InstanceState.DRAINING:
        return of(RepairKind.RELEASE)
    if instance.state in (InstanceState.FAILED, InstanceState.SLEEPING) and process is None and not instance.grants:
        return of(RepairKind.SHOW)
    granted = bool(instance.grants) and all(grant.partition_id in partitions for grant in instance.grants)
    # Another process than the one in the ledger is a child that outlived its engine: nothing to adopt.
    itself = process is not None and instance.process in (None, process)
    if itself and granted:
        return of(RepairKind.ADOPT)
    return of(RepairKind.UNLOAD if instance.state is InstanceState.SLEEPING else RepairKind.RESTART)


def _restart_forgotten(repair: Repair, retried: Collection[str]) -> Repair:
    """One that failed, and whose next try the daemon did not live to plan: what is wanted is tried."""
    instance = repair.instance
    if repair.kind is not RepairKind.SHOW or instance is None or instance.deployment in retried:
        return repair
    return replace(repair, kind=RepairKind.RESTART) if instance.state is InstanceState.FAILED else repair


def _without_replaced(repairs: Sequence[Repair], wanted: Mapping[str, Deployment]) -> list[Repair]:
    """An instance of an earlier revision is released where the one that replaces it runs already."""
    current: dict[tuple[str, int], str] = {}
    for repair in repairs:
        if repair.kind is RepairKind.ADOPT and repair.instance is not None and _is_current(repair.instance, wanted):
            current.setdefault((repair.instance.deployment, repair.instance.replica), repair.instance_id)

    def is_replaced(repair: Repair) -> bool:
        instance = repair.instance
        failed = repair.kind is RepairKind.SHOW and instance is not None and instance.state is InstanceState.FAILED
        if instance is None or not (failed or repair.kind is RepairKind.ADOPT):
            return False
        return current.get((instance.deployment, instance.replica), instance.id) != instance.id

    return [replace(one, kind=RepairKind.RELEASE) if is_replaced(one) else one for one in repairs]


def _is_current(instance: Instance, wanted: Mapping[str, Deployment]) -> bool:
    return instance.revision in (None, revision_of(wanted[instance.deployment]))
