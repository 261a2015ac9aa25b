"""A stack as a compose file: sized and placed as it would be here, and started by Docker instead of by us."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.instance.launch_environment import find_partition
from aimgpu.control.plan.steps import Register, Start
from aimgpu.domain import Deployment, Instance, InstanceState, Level
from aimgpu.engines.launchers.compose import ComposeService, render_compose
from aimgpu.engines.protocols import LaunchRequest, ServerEngine
from aimgpu.errors import InvalidInput, PlacementRefused
from aimgpu.hardware.visible_devices import join_environment
from aimgpu.sizing.surplus import spend_surplus

_LAUNCHER = "docker"
_KEY = "from the environment"
_SIMULATED = "AIM_SIMULATED"  # variables that stand in for a real GPU, and mean nothing in a container


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeOptions:
    """Where files may be prepared, and the port of the first model."""

    folder: Path
    first_port: int


def compose_stack(dependencies: Dependencies, deployments: Sequence[Deployment], options: ComposeOptions) -> str:
    """The text of the file. Raises PlacementRefused where the models do not fit at once."""
    controller = Controller(dependencies)
    plan = controller.apply([replace(one, launcher=_LAUNCHER) for one in deployments], dry_run=True).plan
    if plan.refusals:
        refusal = plan.refusals[0]
        raise PlacementRefused(refusal.summary, hint=" ".join(refusal.would_fit) or None)
    for step in plan.steps:
        if isinstance(step, Start) and isinstance(dependencies.engines[step.prepared.engine], ServerEngine):
            hint = "Write its service by hand, or serve it with `aimgpu up --launcher docker`."
            raise InvalidInput(f"{step.prepared.deployment.name}: `aimgpu compose` writes no server of your own", hint=hint)
        if isinstance(step, Register):  # without a daemon nothing would ever wake it
            hint = "A compose file holds what fits at once; `aimgpu up` lets models take turns."
            raise PlacementRefused(step.text, hint=hint)
    devices = controller.devices()
    partitions = {part.id: part.memory_bytes for device in devices for part in device.layout.partitions}
    starts = [step for step in plan.steps if isinstance(step, Start)]
    services = list(_services(dependencies, starts, options))
    text = render_compose(services, partitions, simulated=any(device.simulated for device in devices))
    return text.replace(str(options.folder), "/tmp")  # noqa: S108 - inside the containers


def _services(dependencies: Dependencies, starts: Sequence[Start], options: ComposeOptions) -> Iterator[ComposeService]:
    for number, step in enumerate(starts):
        instance = _make_instance(step)
        port = options.first_port + number
        request = _make_request(dependencies, step, instance, options.folder / str(number))
        yield ComposeService(
            name=instance.id,
            engine=instance.engine,
            command=dependencies.engines[instance.engine].command(replace(request, port=port)),
            port=port,
            memory_bytes={grant.partition_id: grant.memory_bytes for grant in instance.grants},
        )


def _make_request(dependencies: Dependencies, step: Start, instance: Instance, folder: Path) -> LaunchRequest:
    devices = dependencies.hardware.read_devices()
    found = [find_partition(devices, grant.device_id, grant.partition_id) for grant in instance.grants]
    identities = [dependencies.hardware.identify(device, partition) for device, partition in found]
    environment: dict[str, str] = {}
    for identity in identities:
        shown = {name: value for name, value in identity.environment.items() if not name.startswith(_SIMULATED)}
        join_environment(environment, shown)
    local = dependencies.models.find(instance.model)
    return LaunchRequest(
        instance=instance,
        model_path=local.path if local else None,
        overrides=step.prepared.deployment.overrides,
        footprint=spend_surplus(step.prepared.footprint, min((slot.memory_bytes for slot in step.slots), default=0)),
        environment=environment,
        device_nodes=tuple(dict.fromkeys(node for identity in identities for node in identity.device_nodes)),
        run_directory=folder,
        api_key=_KEY,
        partition_memory_bytes=min((partition.memory_bytes for _, partition in found), default=None),
    )


def _make_instance(step: Start) -> Instance:
    deployment = step.prepared.deployment
    name = deployment.name if deployment.replicas == 1 else f"{deployment.name}-{step.replica}"
    grants = tuple(
        slot.granted(f"{name}/{index}", name, deployment.name, deployment.ask.priority, Level.ADVISORY)
        for index, slot in enumerate(step.slots)
    )
    return Instance(
        id=name,
        deployment=deployment.name,
        replica=step.replica,
        model=deployment.model,
        engine=step.prepared.engine,
        launcher=_LAUNCHER,
        state=InstanceState.QUEUED,
        grants=grants,
    )
