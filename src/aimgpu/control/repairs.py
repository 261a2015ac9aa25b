"""Carries out what `reconcile` decides after a crash or a restart: adopt, release, unload, stop."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit
from aimgpu.control.lifecycle.lifecycle import Lifecycle
from aimgpu.control.operations.threads import Background, side_by_side
from aimgpu.control.reconcile import Repair, RepairKind, decide_repairs
from aimgpu.control.runs.run_files import read_run_record
from aimgpu.domain import Device, Instance, InstanceState, ProcessIdentity
from aimgpu.errors import Conflict


class Repairs:
    """The caller holds the planning lock, except while instances are adopted."""

    def __init__(self, dependencies: Dependencies, lifecycle: Lifecycle) -> None:
        self._dependencies = dependencies
        self._ledger = dependencies.ledger
        self._lifecycle = lifecycle
        self._background = Background()

    def decide(self, devices: Sequence[Device]) -> tuple[tuple[Repair, ...], tuple[Repair, ...]]:
        """Everything to do, and of that the adoptions, which may take long."""
        alive = {
            name: process
            for launcher in self._dependencies.launchers.values()
            for name, process in launcher.find_started().items()
        }
        if self._ledger.set_aside is not None:
            self._rebuild(alive, devices)
        partitions = {part.id for device in devices for part in device.layout.partitions}
        wanted = {deployment.name: deployment for deployment in self._ledger.deployments()}
        retried = {one.deployment for one in self._ledger.retries() if one.retry_at_ms is not None or one.exhausted}
        repairs = decide_repairs(self._ledger.instances(), wanted, alive, partitions, retried)
        return repairs, tuple(repair for repair in repairs if repair.kind is RepairKind.ADOPT)

    def carry_out(self, repairs: Sequence[Repair], emit: Emit) -> set[str]:
        """What must end, ends before anything is placed again; returns the deployments to start again."""
        side_by_side([partial(self._repair, repair, emit) for repair in repairs], "repair")
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
            lost = side_by_side([partial(adopt, *one) for one in pairs], "adopt")
            return {name for name in lost if name is not None}

        def adopt_later(instance: Instance, process: ProcessIdentity) -> None:
            if (name := adopt(instance, process)) is not None:
                on_lost(name)

        for one in pairs:
            self._background.run(partial(adopt_later, *one), "adopt")
        return set()

    def close(self, timeout_seconds: float) -> None:
        """What is being adopted is left to the next daemon."""
        self._background.close(timeout_seconds)

    def _repair(self, repair: Repair, emit: Emit) -> None:
        match repair:
            case Repair(kind=RepairKind.STOP, process=process) if process is not None:
                for launcher in self._dependencies.launchers.values():
                    launcher.stop(process, grace_seconds=self._dependencies.timing.grace_seconds)
            case Repair(kind=RepairKind.UNLOAD, instance=instance) if instance:
                self._lifecycle.unload(instance, emit)
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
