"""What the commands of this section decide on: a snapshot (of this machine, of a file, or of GPUs by name) and sized Asks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path
from typing import Any, TypeVar

import click

from aimgpu.cli.machine_view import NODE, read_machine
from aimgpu.cli.sizing_basis import own_basis
from aimgpu.control.planning.preparation import suited_engines, vendor_for
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis, basis_from_json, basis_to_json, estimate_on
from aimgpu.control.stack.stack_file import Stack
from aimgpu.domain import Ask, Auto, Deployment, Device
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import LocalModel
from aimgpu.errors import InvalidInput, UnknownModel
from aimgpu.files import cache_directory, read_bounded
from aimgpu.home import find_home
from aimgpu.placement import DeviceState, NodeState, Snapshot, snapshot_from_json, snapshot_to_json
from aimgpu.sizing import ENGINES
from aimgpu.wiring import check_gpus, devices_of_product, has_gpu, make_engines, make_isolator

_LARGEST_SNAPSHOT = 1 << 30  # 100,000 GPUs have some 640 MB
_SIZING = "sizing"  # beside the snapshot's own keys
_BRINGING = ("docker",)  # launchers that bring the engine along
ENGINE = "vllm"  # where none is known to serve such files
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is decided on, and what models are sized by there."""

    snapshot: Snapshot
    basis: SizingBasis


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedAsk:
    ask: Ask
    engine: str | None = None  # that it was sized for
    notes: tuple[str, ...] = ()


def file_option(function: Function) -> Function:
    option = click.option(
        "-f", "--file", "path", type=click.Path(path_type=Path), default=Path("stack.yaml"), show_default=True
    )
    return option(function)


def world_options(function: Function) -> Function:
    """Add `--snapshot`, `--gpu` and `--count`; without them this machine is looked at."""
    snapshot = click.option("--snapshot", "saved", type=click.Path(path_type=Path), help="A file of `aimgpu snapshot`.")
    gpu = click.option(
        "--gpu", metavar="PRODUCT", help="Empty GPUs of this product, such as MI300X, instead of this machine's."
    )
    count = click.option("--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many of them.")
    return snapshot(gpu(count(function)))


def read_world(saved: Path | None, gpu: str | None, count: int, stack: Stack | None = None) -> World:
    """Raises InvalidInput where the file is no snapshot, or both a file and a part are named."""
    if saved is not None and gpu is not None:
        raise InvalidInput("--snapshot and --gpu were both given", hint="Keep one of them.")
    if saved is not None:
        return _read_saved(saved)
    if gpu is not None:
        return empty_machine(gpu, count)
    snapshot = _look_here(stack)
    engines = make_engines(LocalModelStore(), cache_directory(), has_gpu=has_gpu())
    runnable = tuple(name for name, engine in engines.items() if engine.availability().available)
    return World(snapshot=snapshot, basis=replace(_own_basis(snapshot), runnable=runnable))


def empty_machine(part: str, count: int) -> World:
    """GPUs that nobody has yet; what earlier runs on such a part took is known all the same."""
    snapshot = Snapshot(nodes=(NodeState(name=NODE, devices=tuple(map(state_of, devices_of_product(part, count)))),))
    return World(snapshot=snapshot, basis=_own_basis(snapshot))


def _look_here(stack: Stack | None) -> Snapshot:
    """As `aimgpu up` would find it: a daemon keeps the GPUs that it has, else the stack may want simulated ones."""
    home = find_home()
    wanted = stack.gpus if stack is not None and stack.gpus.simulated is not None else None
    if stack is None or home.read_daemon() is None:
        return read_machine(home, wanted).snapshot
    machine = read_machine(home)
    check_gpus(stack, machine.hardware)
    return machine.snapshot


def world_to_json(world: World) -> dict[str, Any]:
    return {**snapshot_to_json(world.snapshot), _SIZING: basis_to_json(world.basis)}


def _own_basis(snapshot: Snapshot) -> SizingBasis:
    return own_basis(ENGINES).about(state.device.product for _, state in snapshot.devices())


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


def size_asks(deployments: Iterable[Deployment], world: World) -> tuple[SizedAsk, ...]:
    """As `aimgpu up` would size them there."""
    found = []
    for deployment in deployments:
        sized = _size(deployment, world)
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


def _size(deployment: Deployment, world: World) -> SizedAsk:
    """A model that nobody knows may still ask for memory by the byte; only `auto` has to be sized."""
    local = LocalModelStore().find(deployment.model)
    engine, doubts = _engine_for(deployment, local, world)
    devices = [state.device for _, state in world.snapshot.devices()]
    vendor = vendor_for(deployment.ask, devices)
    device = next((each for each in devices if each.vendor is vendor), None)
    try:
        request = world.basis.request(deployment, engine, local, device)
    except UnknownModel as error:
        if isinstance(deployment.ask.want, Auto):
            raise
        return SizedAsk(ask=deployment.ask, notes=(f"{deployment.name} was not sized: {error.message}",))
    footprint = estimate_on(request, device)
    if not request.can_divide(request.tensor_parallel):
        doubts = (*doubts, *footprint.notes)
    sized = replace(
        deployment.ask,
        footprint_bytes=footprint.total_bytes,
        least_bytes=footprint.least_bytes,
        divided=footprint.divided,
    )
    return SizedAsk(
        ask=sized, engine=engine, notes=tuple(f"{deployment.name}: {note}" for note in (*doubts, *world.basis.notes))
    )


def _engine_for(deployment: Deployment, local: LocalModel | None, world: World) -> tuple[str, tuple[str, ...]]:
    """The engine that `aimgpu up` would choose there; on GPUs yet to be had the best that serves such files."""
    if deployment.engine is not None:
        return deployment.engine, ()
    engines = make_engines(LocalModelStore(), cache_directory(), has_gpu=False).values()
    runnable = world.basis.runnable
    anywhere = suited_engines(engines, local, simulated=False)
    best = anywhere[0] if anywhere else ENGINE
    if runnable is None or deployment.launcher in _BRINGING:
        return best, ()
    simulated = all(state.device.simulated for _, state in world.snapshot.devices())
    here = [name for name in suited_engines(engines, local, simulated=simulated) if name in runnable]
    return (here[0], ()) if here else (best, (f"no engine can run it here; it is sized as for {best}",))


def _read_saved(path: Path) -> World:
    """Without what models are sized by, as older versions wrote it, they are sized by what is here."""
    try:
        table = loads(read_bounded(path, _LARGEST_SNAPSHOT).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint="Write it with `aimgpu snapshot > FILE`.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}", hint="Write it with `aimgpu snapshot > FILE`.") from error
    sizing = table.pop(_SIZING, None) if isinstance(table, dict) else None
    snapshot = snapshot_from_json(table)
    return World(snapshot=snapshot, basis=_own_basis(snapshot) if sizing is None else basis_from_json(sizing))
