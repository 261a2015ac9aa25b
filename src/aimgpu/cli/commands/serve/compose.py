"""`aimgpu compose`: a stack as a compose file, for those who run Docker themselves."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.control.controller import Controller
from aimgpu.control.planning.plan import Step, StepKind
from aimgpu.control.runs.launch_environment import join_environment
from aimgpu.control.stack.stack_file import Stack, read_stack
from aimgpu.domain import Instance, InstanceState, Level
from aimgpu.engines.launchers.compose import ComposeService, render_compose
from aimgpu.engines.protocols import LaunchRequest
from aimgpu.errors import PlacementRefused
from aimgpu.home import Home, find_home
from aimgpu.wiring import choose_hardware, make_controller

_KEY = "from the environment"


@click.command(
    epilog=examples(
        "aimgpu compose -f stack.yaml > compose.yaml",
        "aimgpu compose -f stack.yaml --first-port 9000",
        "AIMGPU_ENGINE_KEY=$(openssl rand -hex 16) docker compose up   # then",
    )
)
@click.option("-f", "--file", "path", type=click.Path(path_type=Path), default=Path("stack.yaml"), show_default=True)
@click.option("--first-port", type=click.IntRange(1024, 65000), default=8001, show_default=True, help="Of the first model.")
@json_option
def compose(path: Path, first_port: int, as_json: bool) -> None:
    """Print a compose file for the stack: one service a model, with memory that adds up.

    Sized and placed as `aimgpu up` would, on the GPUs of this machine; nothing is started.
    """
    with TemporaryDirectory() as folder:
        text = _compose(read_stack(path), Path(folder), first_port)
    if as_json:
        print_json({"compose": text})
    else:
        click.echo(text, nl=False)


def _compose(stack: Stack, folder: Path, first_port: int) -> str:
    home = Home(folder)
    home.learn_from(find_home())
    controller = make_controller(home, choose_hardware(stack.gpus, home), lambda _: 0)
    try:
        outcome = controller.apply([replace(one, launcher="docker") for one in stack.deployments], dry_run=True)
        if outcome.plan.refusals:
            refusal = outcome.plan.refusals[0]
            raise PlacementRefused(refusal.summary, hint=" ".join(refusal.would_fit) or None)
        for step in outcome.plan.steps:
            if step.kind is StepKind.SLEEP:  # without a daemon nobody would ever wake it
                hint = "A compose file holds what fits at once; `aimgpu up` lets models take turns."
                raise PlacementRefused(step.text, hint=hint)
        devices = controller.devices()
        partitions = {part.id: part.memory_bytes for device in devices for part in device.layout.partitions}
        services = list(_services(controller, outcome.plan.steps, folder, first_port))
    finally:
        controller.close()
    text = render_compose(services, partitions, simulated=any(device.simulated for device in devices))
    return text.replace(str(folder), "/tmp")  # noqa: S108 - inside the containers


def _services(controller: Controller, steps: tuple[Step, ...], folder: Path, first_port: int) -> Iterator[ComposeService]:
    for number, step in enumerate(steps):
        if step.prepared is None or step.placement is None:
            continue
        instance = _instance(step)
        port = first_port + number
        command = controller.parts.engines[instance.engine].command(
            replace(_request(controller, step, instance, folder / str(number)), port=port)
        )
        yield ComposeService(
            name=instance.id,
            engine=instance.engine,
            command=command,
            port=port,
            memory_bytes={grant.partition_id: grant.memory_bytes for grant in instance.grants},
        )


def _request(controller: Controller, step: Step, instance: Instance, folder: Path) -> LaunchRequest:
    if step.prepared is None:
        raise ValueError(step)
    found = [
        (device, partition)
        for grant in instance.grants
        for device in controller.devices()
        if device.id == grant.device_id and (partition := device.partition(grant.partition_id)) is not None
    ]
    identities = [controller.parts.hardware.identify(device, partition) for device, partition in found]
    environment: dict[str, str] = {}
    for identity in identities:
        shown = {name: value for name, value in identity.environment.items() if not name.startswith("AIM_SIMULATED")}
        join_environment(environment, shown)
    local = controller.parts.models.find(instance.model)
    return LaunchRequest(
        instance=instance,
        model_path=local.path if local else None,
        footprint=step.prepared.footprint,
        environment=environment,
        device_nodes=tuple(dict.fromkeys(node for identity in identities for node in identity.device_nodes)),
        run_directory=folder,
        api_key=_KEY,
        partition_memory_bytes=min((partition.memory_bytes for _, partition in found), default=None),
    )


def _instance(step: Step) -> Instance:
    if step.prepared is None or step.placement is None:
        raise ValueError(step)
    deployment = step.prepared.deployment
    name = deployment.name if deployment.replicas == 1 else f"{deployment.name}-{step.replica}"
    grants = tuple(
        slot.granted(f"{name}/{index}", name, deployment.name, deployment.ask.priority, Level.ADVISORY)
        for index, slot in enumerate(step.placement.slots)
    )
    return Instance(
        id=name,
        deployment=deployment.name,
        replica=step.replica,
        model=deployment.model,
        engine=step.prepared.engine,
        launcher="docker",
        state=InstanceState.QUEUED,
        grants=grants,
    )
