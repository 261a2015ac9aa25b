"""What the commands of this section decide on: a snapshot (of this machine, of a file, or of GPUs by name) and sized Asks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path
from typing import Any, TypeVar

import click

from aimgpu.cli.home import find_home
from aimgpu.cli.machine import NODE, read_machine
from aimgpu.cli.wiring import devices_of_part, make_isolator
from aimgpu.control.bounded_files import read_bounded
from aimgpu.control.catalogue_file import CatalogueFile
from aimgpu.control.model_files import find_model_facts
from aimgpu.control.stackfile import Stack
from aimgpu.domain import Ask, Auto, Deployment, Device
from aimgpu.errors import InvalidInput, UnknownModel
from aimgpu.placement import DeviceState, NodeState, Snapshot, snapshot_from_json
from aimgpu.sizing import SizingRequest, estimate_footprint

_LARGEST_SNAPSHOT = 1 << 30  # 100,000 GPUs have some 640 MB
ENGINE = "vllm"  # where the stack names none and nothing is started
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedAsk:
    ask: Ask
    notes: tuple[str, ...] = ()


def file_option(function: Function) -> Function:
    option = click.option(
        "-f", "--file", "path", type=click.Path(path_type=Path), default=Path("stack.yaml"), show_default=True
    )
    return option(function)


def world_options(function: Function) -> Function:
    """Add `--snapshot`, `--gpu` and `--count`; without them this machine is looked at."""
    snapshot = click.option("--snapshot", "saved", type=click.Path(path_type=Path), help="A file of `aimgpu snapshot`.")
    gpu = click.option("--gpu", metavar="PART", help="Empty GPUs of this part, such as MI300X, instead of this machine's.")
    count = click.option("--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many of them.")
    return snapshot(gpu(count(function)))


def read_world(saved: Path | None, gpu: str | None, count: int, stack: Stack | None = None) -> Snapshot:
    """Raises InvalidInput where the file is no snapshot, or both a file and a part are named."""
    if saved is not None and gpu is not None:
        raise InvalidInput("--snapshot and --gpu were both given", hint="Keep one of them.")
    if saved is not None:
        return _read_snapshot(saved)
    if gpu is not None:
        return empty_machine(gpu, count)
    if stack is not None and stack.gpus.simulated is not None:
        return empty_machine(stack.gpus.simulated, stack.gpus.count)
    return read_machine(find_home()).snapshot


def empty_machine(part: str, count: int) -> Snapshot:
    return Snapshot(nodes=(NodeState(name=NODE, devices=tuple(map(state_of, devices_of_part(part, count)))),))


def state_of(device: Device) -> DeviceState:
    """With the Levels that this machine's mechanisms would give such a Device, under every Layout.

    It stands for a real one, so that isolation is judged as on real hardware.
    """
    levels, real = make_isolator(find_home()).available_levels, replace(device, simulated=False)
    parts = {part.id: part for layout in device.layouts for part in layout.partitions}
    split = {part.id for layout in device.layouts if len(layout.partitions) > 1 for part in layout.partitions}
    whole = next((layout for layout in device.layouts if len(layout.partitions) > 1), device.layout)
    return DeviceState(
        device=device,
        shared_levels={name: levels(real, part, exclusive=False) for name, part in parts.items()},
        exclusive_levels={
            name: levels(replace(real, layout=whole) if name in split else real, part, exclusive=True)
            for name, part in parts.items()
        },
    )


def size_asks(deployments: Iterable[Deployment], snapshot: Snapshot) -> tuple[SizedAsk, ...]:
    device = next((state.device for _, state in snapshot.devices()), None)
    found = []
    for deployment in deployments:
        sized = _size(deployment, device)
        names = [f"{deployment.name}-{replica}" for replica in range(deployment.replicas)]
        found += [replace(sized, ask=replace(sized.ask, name=name, deployment=deployment.name)) for name in names]
    return tuple(found)


def without_running(asks: Sequence[SizedAsk], snapshot: Snapshot) -> tuple[SizedAsk, ...]:
    """The replicas that are not there yet; which of them run does not matter, how many do."""
    running: dict[str, set[str]] = {}
    for _, state in snapshot.devices():
        for grant in state.grants:
            running.setdefault(grant.deployment, set()).add(grant.instance_id)
    left = {name: len(found) for name, found in running.items()}
    missing = []
    for each in asks:
        name = each.ask.deployment or each.ask.name
        if left.get(name, 0) > 0:
            left[name] -= 1
        else:
            missing.append(each)
    return tuple(missing)


def _size(deployment: Deployment, device: Device | None) -> SizedAsk:
    """A model that nobody knows may still ask for memory by the byte; only `auto` has to be sized."""
    try:
        catalogue = CatalogueFile(find_home().catalogue_file).catalogue()
        facts = find_model_facts(deployment.model, catalogue=catalogue)
    except UnknownModel as error:
        if isinstance(deployment.ask.want, Auto):
            raise
        return SizedAsk(ask=deployment.ask, notes=(f"{deployment.name} was not sized: {error.message}",))
    request = SizingRequest(
        model=facts,
        engine=deployment.engine or ENGINE,
        precision=deployment.precision,
        context_tokens=deployment.context_tokens,
        concurrency=deployment.concurrency,
        tensor_parallel=max(deployment.ask.device_count, 1),
    )
    if device is not None:
        request = replace(request, vendor=device.vendor, gpu=device.part, device_memory_bytes=device.memory_bytes)
    footprint = estimate_footprint(request)
    sized = replace(deployment.ask, footprint_bytes=footprint.total_bytes, least_bytes=footprint.least_bytes)
    doubts = () if request.can_divide(request.tensor_parallel) else footprint.notes
    return SizedAsk(ask=sized, notes=tuple(f"{deployment.name}: {note}" for note in doubts))


def _read_snapshot(path: Path) -> Snapshot:
    try:
        table = loads(read_bounded(path, _LARGEST_SNAPSHOT).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint="Write it with `aimgpu snapshot > FILE`.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}", hint="Write it with `aimgpu snapshot > FILE`.") from error
    return snapshot_from_json(table)
