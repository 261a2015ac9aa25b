"""`plan --arrivals`: more models than fit on one GPU, awake in turns."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import click

from aimgpu.cli.output import print_json
from aimgpu.cli.views.plan import print_notes
from aimgpu.cli.what_if import SizedAsk, World
from aimgpu.domain import Deployment, Device, Priority
from aimgpu.errors import InvalidInput
from aimgpu.files import read_bounded
from aimgpu.placement.oversubscription import Oversubscription, assess, shape_of, to_json
from aimgpu.placement.residency import MemoryRoom
from aimgpu.placement.residency_replay import ModelShape
from aimgpu.units import format_bytes

_FIRST_TOKEN_SECONDS = 2.0
_MOST_REQUESTS = 200_000
_LARGEST_BYTES = 16 << 20


def show_oversubscription(
    deployments: Sequence[Deployment], sized: Sequence[SizedAsk], world: World, arrivals: Path, *, as_json: bool
) -> None:
    """On the largest GPU of the world, alone on it; half of the host's free memory is for weights of sleepers."""
    shapes = _shapes(deployments, sized)
    node, state = max(world.snapshot.devices(), key=lambda each: _bytes_of(each[1].device), default=(None, None))
    if node is None or state is None:
        message = "there is no GPU to plan for"
        raise InvalidInput(message, hint="Name one: --gpu H200.")
    gpu_bytes = _bytes_of(state.device)
    weights = sum(shape.host_bytes for shape in shapes)
    host = None if node.host_memory_bytes is None else (node.host_memory_bytes - node.used_host_memory_bytes) // 2
    room = MemoryRoom(gpu_bytes=gpu_bytes, host_bytes=weights if host is None else host)
    found = assess(shapes, room, _read_arrivals(arrivals, {shape.name for shape in shapes}))
    if as_json:
        print_json({"gpu": state.device.product, "host_bytes": host, **to_json(found)})
        return
    print_notes(sized, world)
    _print(found, f"one {state.device.product} ({format_bytes(gpu_bytes)})", host)


def _shapes(deployments: Sequence[Deployment], sized: Sequence[SizedAsk]) -> list[ModelShape]:
    footprints = {each.ask.deployment: each.footprint for each in sized}
    shapes = []
    for deployment in deployments:
        footprint = footprints.get(deployment.name)
        if footprint is None:
            message = f"'{deployment.name}' has no estimate of its size"
            raise InvalidInput(message, hint="--arrivals is for models; leave programs out of the file.")
        shapes.append(shape_of(deployment.name, footprint, deployment.ask.priority, _promised(deployment)))
    return shapes


def _promised(deployment: Deployment) -> float:
    objective = deployment.objective
    promised = objective.of_class(Priority.HIGH).percentiles_ms("ttft").values() if objective is not None else ()
    return min(promised, default=_FIRST_TOKEN_SECONDS * 1000) / 1000


def _bytes_of(device: Device) -> int:
    return max((partition.memory_bytes for partition in device.layout.partitions), default=0)


def _read_arrivals(path: Path, names: set[str]) -> list[tuple[float, str]]:
    found = []
    try:
        text = read_bounded(path, _LARGEST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {path}: {error}"
        raise InvalidInput(message, hint="Give a CSV file with the columns seconds and model.") from None
    with StringIO(text, newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                found.append((float(row["seconds"]), row["model"]))
            except (KeyError, TypeError, ValueError):
                message = f"{path}, line {number}: expected the columns seconds and model"
                raise InvalidInput(message, hint="For example: seconds,model and below it 12.5,chat.") from None
            if found[-1][1] not in names:
                message = f"{path}, line {number}: the stack has no model '{found[-1][1]}'"
                raise InvalidInput(message, hint=f"It has {', '.join(sorted(names))}.")
            if len(found) > _MOST_REQUESTS:
                message = f"{path} has more than {_MOST_REQUESTS:,} requests"
                raise InvalidInput(message, hint="Replay a part of it.")
    return found


def _print(found: Oversubscription, where: str, host: int | None) -> None:
    sleepers = "the host memory for sleepers is not known, and taken to be enough"
    if host is not None:
        sleepers = f"{format_bytes(host)} of host memory are for weights of sleepers"
    click.echo(
        f"On {where}: any {found.awake_together} of {found.models} models fit awake together. All hold "
        f"{format_bytes(found.asleep_bytes, up=True)} asleep; {sleepers}. A swap takes up to {found.swap_seconds:.1f} s."
    )
    part = 100 * found.late / found.requests if found.requests else 0.0
    click.echo(
        f"{found.late} of {found.requests} requests ({part:.1f} %) would be late for their first token, because their model "
        "was not awake. Estimated by the sizes of weights; see docs/explanation/residency.md."
    )
