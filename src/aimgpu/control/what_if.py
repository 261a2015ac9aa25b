"""What would happen elsewhere or later: sized asks on a snapshot of this machine, of a file, or of GPUs by name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path
from typing import Any

from aimgpu.control.plan.preparation import are_simulated, check_format, formats_of, suited_engines, vendor_for
from aimgpu.control.sizing_inputs.model_names import is_short_name, unfetchable, unreadable
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis, basis_from_json, basis_to_json, estimate_on
from aimgpu.domain import Ask, Auto, Deployment, Device, Footprint
from aimgpu.engines.protocols import Engine, LocalModel, ModelStore
from aimgpu.errors import InvalidInput, UnknownModel
from aimgpu.files import read_bounded
from aimgpu.isolation.protocols import Isolator
from aimgpu.placement import DeviceState, NodeState, Snapshot, snapshot_from_json, snapshot_to_json
from aimgpu.sizing.engines.table import ENGINE_SIZINGS

_LARGEST_SNAPSHOT = 1 << 30  # 100,000 GPUs have some 640 MB
_SIZING = "sizing"  # beside the snapshot's own keys


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is decided on, and what models are sized by there."""

    snapshot: Snapshot
    basis: SizingBasis


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedAsk:
    """An ask with its size."""

    ask: Ask
    engine: str | None = None  # that it was sized for
    footprint: Footprint | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoices:
    """What `aimgpu up` would choose an engine from."""

    engines: Mapping[str, Engine]  # best first
    models: ModelStore
    bringing_launchers: frozenset[str]  # launchers that bring the engine along
    default: str  # where none is known to serve such files


def world_to_json(world: World) -> dict[str, Any]:
    """As `aimgpu snapshot` prints it."""
    return {**snapshot_to_json(world.snapshot), _SIZING: basis_to_json(world.basis)}


def read_saved_world(path: Path) -> tuple[Snapshot, SizingBasis | None]:
    """A file of `aimgpu snapshot`. Without what models are sized by where it is the answer of the daemon's API."""
    try:
        table = loads(read_bounded(path, _LARGEST_SNAPSHOT).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint="Write it with `aimgpu snapshot > FILE`.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}", hint="Write it with `aimgpu snapshot > FILE`.") from error
    sizing = table.pop(_SIZING, None) if isinstance(table, dict) else None
    return snapshot_from_json(table), None if sizing is None else basis_from_json(sizing)


def empty_node(name: str, devices: Iterable[Device], isolator: Isolator) -> Snapshot:
    """GPUs on which nothing is granted yet, with the levels that this machine's mechanisms would give them."""
    return Snapshot(nodes=(NodeState(name=name, devices=tuple(_state_of(device, isolator) for device in devices)),))


def _state_of(device: Device, isolator: Isolator) -> DeviceState:
    """Under every layout. It stands for a real GPU, so that isolation is judged as on real hardware."""
    levels, real = isolator.available_levels, replace(device, simulated=False)
    partitions = {part.id: part for layout in device.layouts for part in layout.partitions}
    split = {part.id for layout in device.layouts if len(layout.partitions) > 1 for part in layout.partitions}
    whole = next((layout for layout in device.layouts if len(layout.partitions) > 1), device.layout)
    return DeviceState(
        device=device,
        shared_levels={name: levels(real, part, exclusive=False) for name, part in partitions.items()},
        exclusive_levels={
            name: levels(replace(real, layout=whole) if name in split else real, part, exclusive=True)
            for name, part in partitions.items()
        },
    )


def size_asks_in(deployments: Iterable[Deployment], world: World, choices: EngineChoices) -> tuple[SizedAsk, ...]:
    """As `aimgpu up` would size them there."""
    found = []
    for deployment in deployments:
        sized = _size(deployment, world, choices)
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


def _size(deployment: Deployment, world: World, choices: EngineChoices) -> SizedAsk:
    """A model that is not known may still ask for memory by the byte; only `auto` has to be sized."""
    here = world.basis.runnable is not None  # else it is planned as for real GPUs of the product
    local = choices.models.find(deployment.model)
    engine, doubts = _engine_for(deployment, local, world, choices)
    devices = [state.device for _, state in world.snapshot.devices()]
    vendor = vendor_for(deployment.ask, devices)
    device = next((each for each in devices if each.vendor is vendor), None)
    if engine not in ENGINE_SIZINGS:
        return SizedAsk(ask=deployment.ask, engine=engine)
    try:
        request = world.basis.request(deployment, engine, local, device)
    except UnknownModel as error:
        if not isinstance(deployment.ask.want, Auto):
            return SizedAsk(ask=deployment.ask, notes=(f"{deployment.name} was not sized: {error.message}",))
        if here and error.near and is_short_name(deployment.model) and engine in choices.engines:
            raise unfetchable(deployment.model, {engine: choices.engines[engine].formats}) from error
        raise
    footprint = replace(estimate_on(request, device), in_host_memory=here and are_simulated(devices))
    if not request.can_divide(request.tensor_parallel):
        doubts = (*doubts, *footprint.notes)
    sized = replace(
        deployment.ask,
        footprint_bytes=footprint.total_bytes,
        least_bytes=footprint.least_bytes,
        divided=footprint.divided,
    )
    notes = tuple(f"{deployment.name}: {note}" for note in (*doubts, *world.basis.notes))
    return SizedAsk(ask=sized, engine=engine, footprint=footprint, notes=notes)


def _engine_for(
    deployment: Deployment, local: LocalModel | None, world: World, choices: EngineChoices
) -> tuple[str, tuple[str, ...]]:
    """The engine that `aimgpu up` would choose there; on GPUs not bought yet the best that serves such files."""
    model = deployment.model
    if deployment.engine is not None:
        if deployment.engine in choices.engines:
            check_format(choices.engines[deployment.engine], model, local)
        return deployment.engine, ()
    engines = choices.engines.values()
    runnable = world.basis.runnable
    anywhere = suited_engines(engines, model, local, simulated=False)
    best = anywhere[0] if anywhere else choices.default
    if runnable is None or deployment.launcher in choices.bringing_launchers:
        return best, ()
    simulated = all(state.device.simulated for _, state in world.snapshot.devices())
    here = [name for name in suited_engines(engines, model, local, simulated=simulated) if name in runnable]
    if here:
        return here[0], ()
    if runnable:  # what runs there is of no use for these files
        raise unreadable(model, formats_of(model, local), f"which no engine that runs here reads ({', '.join(runnable)})")
    return best, (f"no engine can run it here; it is sized as for {best}",)
