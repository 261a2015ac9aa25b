"""The instance that a step of a plan comes to."""

import secrets

from aimgpu.control.plan import Prepared, Step, StepKind
from aimgpu.control.rest import rest_of
from aimgpu.domain import Instance, InstanceState
from aimgpu.engines.protocols import Engine
from aimgpu.placement import Snapshot


def make_instance(step: Step, prepared: Prepared, snapshot: Snapshot | None, engine: Engine) -> Instance:
    """The instance that a step makes; one that sleeps has no placement and holds nothing."""
    deployment = prepared.deployment
    instance_id = f"{deployment.name}-{step.replica}-{secrets.token_hex(3)}"
    slots = step.placement.slots if step.placement else ()
    levels = {state.device.id: state for _, state in snapshot.devices()} if snapshot else {}
    grants = tuple(
        slot.granted(
            f"{instance_id}/{index}",
            instance_id,
            deployment.name,
            deployment.ask.priority,
            levels[slot.device_id].best_level(slot.partition_id, exclusive=slot.exclusive),
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
        state=InstanceState.SLEEPING if step.kind is StepKind.SLEEP else InstanceState.QUEUED,
        grants=grants,
        rest=rest_of(engine, deployment, prepared.footprint),
    )
