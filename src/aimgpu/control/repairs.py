"""After a crash: what the ledger holds, what runs, what to do about each difference, and doing it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.instance.run_folder import read_run_record
from aimgpu.control.plan.prepared import revision_of
from aimgpu.control.threads import Background, side_by_side
from aimgpu.domain import Deployment, Device, Instance, InstanceState, ProcessIdentity
from aimgpu.errors import AimGpuError, Conflict


class RepairKind(StrEnum):
    """What to do about one instance."""

    ADOPT = "adopt"  # runs and is wanted: keep it, and wait for it where it was still loading
    RESTART = "restart"  # wanted, but gone
    END = "end"  # a program that ended meanwhile
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
    partitions: Collection[str] | None,
    retried: Collection[str] = (),
) -> tuple[Repair, ...]:
    """One Repair per instance in the ledger and per process of ours that is not in it.

    `partitions` exist now, None: that could not be read, and what runs is kept. `retried` are deployments that are tried again
    by themselves, or have been often enough.
    """
    repairs = [_repair(instance, wanted, alive.get(instance.id), partitions) for instance in instances]
    repairs = [_restart_forgotten(repair, retried) for repair in _without_replaced(repairs, wanted)]
    known = {instance.id for instance in instances}
    orphans = sorted(set(alive) - known)
    repairs += [Repair(kind=RepairKind.STOP, instance_id=name, process=alive[name]) for name in orphans]
    return tuple(repairs)


def _repair(
    instance: Instance, wanted: Collection[str], process: ProcessIdentity | None, partitions: Collection[str] | None
) -> Repair:
    def of(kind: RepairKind) -> Repair:
        return Repair(kind=kind, instance_id=instance.id, instance=instance, process=process)

    if instance.deployment not in wanted or instance.state is InstanceState.DRAINING:
        return of(RepairKind.RELEASE)
    settled = (InstanceState.FAILED, InstanceState.SLEEPING, InstanceState.ENDED)
    if instance.state in settled and process is None and not instance.grants:
        return of(RepairKind.SHOW)
    granted = bool(instance.grants) and (
        partitions is None or all(grant.partition_id in partitions for grant in instance.grants)
    )
    # Another process than the one in the ledger is a child that outlived its engine: nothing to adopt.
    itself = process is not None and instance.process in (None, process)
    if itself and granted:
        return of(RepairKind.ADOPT)
    if instance.is_program and instance.process is not None and not itself:
        return of(RepairKind.END)
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


class Repairs:
    """Decided on the thread of the loop, carried out in another while nothing is placed."""

    def __init__(self, dependencies: Dependencies, lifecycle: Lifecycle) -> None:
        self._dependencies = dependencies
        self._ledger = dependencies.ledger
        self._lifecycle = lifecycle
        self._background = Background(dependencies.effects)

    def find_running(self) -> dict[str, ProcessIdentity]:
        """What runs of ours, by instance."""
        launchers = self._dependencies.launchers.values()
        return {name: process for launcher in launchers for name, process in launcher.find_started().items()}

    def decide(
        self, devices: Sequence[Device] | None, alive: Mapping[str, ProcessIdentity]
    ) -> tuple[tuple[Repair, ...], tuple[Repair, ...]]:
        """Everything to do, and of that the adoptions, which may take long. `devices`: None where they do not answer."""
        if self._ledger.set_aside is not None:
            self._rebuild(alive, devices or ())
        partitions = None if devices is None else {part.id for device in devices for part in device.layout.partitions}
        wanted = {deployment.name: deployment for deployment in self._ledger.deployments()}
        retries = self._ledger.retries()  # what gave up at its first request is tried once by each daemon
        retried = {one.deployment for one in retries if one.retry_at_ms is not None or (one.exhausted and one.failures)}
        repairs = decide_repairs(self._ledger.instances(), wanted, alive, partitions, retried)
        adoptions = tuple(repair for repair in repairs if repair.kind is RepairKind.ADOPT)
        for repair in adoptions:  # before any plan: a process without an owner would be in the way of its own deployment
            if repair.instance is not None and repair.instance.process is None:
                self._ledger.update(replace(repair.instance, process=repair.process))
        return repairs, adoptions

    def carry_out(self, repairs: Sequence[Repair], emit: Emit) -> set[str]:
        """What must end, ends before anything is placed again; returns the deployments to start again."""
        side_by_side([partial(self._repair, repair, emit) for repair in repairs], "repair", self._dependencies.effects)
        self._lifecycle.remove_left_folders()
        return {
            repair.instance.deployment
            for repair in repairs
            if repair.kind is RepairKind.RESTART and repair.instance is not None
        }

    def adopt(self, repairs: Sequence[Repair], emit: Emit, *, wait: bool, on_lost: Callable[[str], None]) -> set[str]:
        """Take over what runs; the deployments of those that could not be, later ones by `on_lost`."""

        def adopt(instance: Instance, process: ProcessIdentity) -> str | None:
            adopted = self._lifecycle.adopt(instance, process, emit)
            return instance.deployment if adopted.state is InstanceState.FAILED else None

        found = [(repair.instance, repair.process) for repair in repairs]
        pairs = [(instance, process) for instance, process in found if instance is not None and process is not None]
        if wait:
            lost = side_by_side([partial(adopt, *one) for one in pairs], "adopt", self._dependencies.effects)
            return {name for name in lost if name is not None}

        def adopt_later(instance: Instance, process: ProcessIdentity) -> None:
            try:
                name = adopt(instance, process)
            except AimGpuError as error:  # as where it does not end: what is abandoned is ended later
                emit(Event(kind=EventKind.ERROR, deployment=instance.deployment, text=error.message, data=error.to_json()))
            else:
                if name is not None:
                    on_lost(name)

        for one in pairs:
            self._background.run(partial(adopt_later, *one), "adopt")
        return set()

    @property
    def busy(self) -> bool:
        """Whether something is being adopted."""
        return self._background.busy

    def close(self, timeout_seconds: float) -> None:
        """What is being adopted is left to the next daemon."""
        self._background.close(timeout_seconds)

    def _repair(self, repair: Repair, emit: Emit) -> None:
        """One that cannot be carried out, as where a process does not end, holds up no other; later rounds try again."""
        try:
            self._carry_out(repair, emit)
        except AimGpuError as error:
            name = repair.instance.deployment if repair.instance is not None else None
            text = f"{repair.instance_id}: {repair.kind.value} failed: {error.message}"
            emit(Event(kind=EventKind.ERROR, deployment=name, text=text, data=error.to_json()))

    def _carry_out(self, repair: Repair, emit: Emit) -> None:
        match repair:
            case Repair(kind=RepairKind.STOP, process=process) if process is not None:
                for launcher in self._dependencies.launchers.values():
                    launcher.stop(process, grace_seconds=self._dependencies.timing.grace_seconds)
            case Repair(kind=RepairKind.UNLOAD, instance=instance) if instance:
                self._lifecycle.unload(instance, emit)
            case Repair(kind=RepairKind.END, instance=instance) if instance:
                self._lifecycle.end(instance, emit)
            case Repair(kind=RepairKind.RELEASE | RepairKind.RESTART, instance=instance) if instance:
                self._lifecycle.release(instance, emit, drain=False)

    def _rebuild(self, alive: Iterable[str], devices: Sequence[Device]) -> None:
        """The ledger was corrupt: take what runs as what is wanted and granted."""
        capacity = {part.id: part.memory_bytes for device in devices for part in device.layout.partitions}
        known = {instance.id for instance in self._ledger.instances()}
        for name in sorted(set(alive) - known):
            record = read_run_record(self._dependencies.runs, name)
            if record is None:
                continue
            try:
                asleep = record.instance.state is InstanceState.SLEEPING
                state = InstanceState.SLEEPING if asleep else InstanceState.LOADING
                self._ledger.charge(replace(record.instance, state=state), capacity=capacity)
                self._ledger.want(record.deployment)
            except Conflict:
                continue  # its partition is gone: reconcile stops it as one that the ledger does not know
