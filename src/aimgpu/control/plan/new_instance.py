"""The instance that a step of a plan comes to."""

from aimgpu.control.plan.asleep import sleep_footprint_of
from aimgpu.control.plan.prepared import revision_of
from aimgpu.control.plan.steps import Register, Start
from aimgpu.domain import LEAST_LEVEL, Deployment, Instance, InstanceState, Level, Slot
from aimgpu.engines.protocols import Engine
from aimgpu.errors import HardwareUnavailable, PlacementRefused
from aimgpu.placement import DeviceState, Snapshot

GONE_HINT = "`aimgpu gpus` shows what is there, `aimgpu doctor` what is wrong. Then try again."
GONE_PAGE_HINT = "The GPUs on the page of models are those that answer. Then try again."


def make_instance(
    step: Start | Register, snapshot: Snapshot | None, engine: Engine, token: str, *, grouped: bool = True
) -> Instance:
    """The instance that a step makes; one that is only registered holds nothing. `token` makes its id unique.

    `grouped`: its launcher puts it into a control group where that is asked for.
    """
    prepared = step.prepared
    deployment = prepared.deployment
    instance_id = f"{deployment.name}-{step.replica}-{token}"
    slots = step.slots if isinstance(step, Start) else ()
    levels = {state.device.id: state for _, state in snapshot.devices()} if snapshot else {}
    grants = tuple(
        slot.granted(
            f"{instance_id}/{index}",
            instance_id,
            deployment.name,
            deployment.ask.priority,
            _promised(levels.get(slot.device_id), slot, deployment, grouped=grouped),
        )
        for index, slot in enumerate(slots)
    )
    return Instance(
        id=instance_id,
        deployment=deployment.name,
        replica=step.replica,
        model=deployment.model,
        engine=prepared.engine,
        launcher=deployment.launcher,
        state=InstanceState.QUEUED if isinstance(step, Start) else InstanceState.SLEEPING,
        revision=revision_of(deployment),
        grants=grants,
        sleep_footprint=sleep_footprint_of(engine, deployment, prepared.footprint) if prepared.can_sleep else None,
    )


def _promised(state: DeviceState | None, slot: Slot, deployment: Deployment, *, grouped: bool) -> Level:
    """The best level that is available. A launcher that joins no control groups is promised nothing that may need one.

    What it then gets may be more, and is noted when it starts. Raises PlacementRefused where less is left than was demanded.
    """
    if state is None:
        raise HardwareUnavailable(
            f"{slot.device_id} went away before {deployment.name} could start there", hint=GONE_HINT, page_hint=GONE_PAGE_HINT
        )
    best = state.best_level(slot.partition_id, exclusive=slot.exclusive)
    if grouped or best is not Level.DRIVER:
        return best
    levels = (state.exclusive_levels if slot.exclusive else state.shared_levels).get(slot.partition_id, frozenset())
    level = max(levels - {Level.DRIVER}, key=lambda one: one.rank, default=Level.NONE)
    if level.rank < LEAST_LEVEL[deployment.ask.isolation].rank:
        raise PlacementRefused(
            f"{deployment.name} demands isolation {deployment.ask.isolation}, and launcher {deployment.launcher} can have"
            f" {level} at most on {slot.partition_id}: it does not join the control groups that the driver's limits may need",
            hint="Use launcher process, let Docker keep its groups itself (cgroupfs, cgroup v2), or install a C compiler.",
        )
    return level
