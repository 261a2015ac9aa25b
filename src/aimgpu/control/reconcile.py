"""After a crash: what the books say, what runs, and what to do about each difference. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain import Instance, InstanceState, ProcessIdentity


class RepairKind(StrEnum):
    ADOPT = "adopt"  # runs and is wanted: keep it, and wait for it where it was still loading
    RESTART = "restart"  # wanted, but gone
    UNLOAD = "unload"  # slept in place, and is gone: it sleeps on, and holds nothing
    RELEASE = "release"  # not wanted, or was being released
    STOP = "stop"  # runs, and the books do not know it
    SHOW = "show"  # failed earlier, or asleep; stays as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    kind: RepairKind
    instance_id: str
    instance: Instance | None = None
    process: ProcessIdentity | None = None


def decide_repairs(
    instances: Sequence[Instance],
    wanted: Collection[str],
    alive: Mapping[str, ProcessIdentity],
    partitions: Collection[str],
) -> tuple[Repair, ...]:
    """One Repair for each instance in the books and each process of ours that is not; `partitions` exist now."""
    repairs = [_repair(instance, wanted, alive.get(instance.id), partitions) for instance in instances]
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
    # Another process than the one in the books is a child that outlived its engine: nothing to adopt.
    itself = process is not None and instance.process in (None, process)
    if itself and granted:
        return of(RepairKind.ADOPT)
    return of(RepairKind.UNLOAD if instance.state is InstanceState.SLEEPING else RepairKind.RESTART)
