"""Change a layout where no daemon runs: planned, recorded and undone as a daemon would."""

from dataclasses import replace

from aimgpu.control.apply import Applier
from aimgpu.control.changes import ChangeCounter
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, ignore
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.loop import Loop
from aimgpu.control.plan.layout import (
    Occupants,
    PlannedLayoutChange,
    check_layout_change,
    find_layout_change,
    plan_layout,
)
from aimgpu.control.plan.steps import ControlState
from aimgpu.control.reservations import Reservations
from aimgpu.control.snapshots import read_gpus, take_snapshot
from aimgpu.control.statistics import Statistics


def change_layout_offline(
    dependencies: Dependencies, device_id: str, layout: str, *, reload_driver: bool, emit: Emit = ignore
) -> PlannedLayoutChange:
    """The caller holds the Owner lock. What a daemon left in the ledger stays wanted; the next daemon starts it."""
    ledger = dependencies.ledger
    state = ControlState(
        wanted={deployment.name: deployment for deployment in ledger.deployments()},
        running=ledger.instances(),
        snapshot=take_snapshot(dependencies),
    )
    occupants = Occupants(usage=tuple(dependencies.hardware.read_usage()), helpers=frozenset(dependencies.helpers.pids()))
    change = find_layout_change(state.snapshot, device_id, layout, occupants)
    if change.changes_nothing:
        return change
    check_layout_change(change, occupants, reload_driver=reload_driver)
    effects = dependencies.effects
    lifecycle = Lifecycle(dependencies, ChangeCounter(effects), lambda instance, size: ledger.rebook(instance, capacity=size))
    loop = Loop(effects, lambda: read_gpus(dependencies))
    applier = Applier(dependencies, lifecycle, Reservations(loop), Statistics(), loop)
    plan = replace(plan_layout(change, state, reload_driver=reload_driver), restarts=())
    try:
        outcome = applier.run(loop.decide(lambda: applier.commit(plan, state.snapshot)), emit)
    finally:
        loop.close()
    if outcome.error is not None:
        raise outcome.error
    return change
