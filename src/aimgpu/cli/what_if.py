"""The options of commands that decide on a snapshot, and what is read for them with the concrete backends."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.machine_view import NODE, read_machine
from aimgpu.cli.options import gpu_option
from aimgpu.cli.sizing_basis import own_basis
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis
from aimgpu.control.stack.stack_file import Stack
from aimgpu.control.what_if import (
    EngineChoices,
    SizedAsk,
    World,
    empty_node,
    read_saved_world,
    size_asks_in,
    without_running,
    world_to_json,
)
from aimgpu.domain import Deployment
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.errors import InvalidInput
from aimgpu.files import cache_directory
from aimgpu.home import find_home
from aimgpu.placement import Snapshot
from aimgpu.sizing import ENGINES
from aimgpu.wiring import check_gpus, devices_of_product, has_gpu, make_engines, make_isolator

__all__ = [
    "SizedAsk",
    "World",
    "empty_machine",
    "file_option",
    "read_world",
    "refuse_other_gpus",
    "size_asks",
    "without_running",
    "world_options",
    "world_to_json",
]
_BRINGING = frozenset({"docker"})  # launchers that bring the engine along
_DEFAULT_ENGINE = "vllm"
FILE_HELP = "The stack file; '-' reads stdin."
Function = TypeVar("Function", bound=Callable[..., Any])


def file_option(function: Function) -> Function:
    """Add `--file`."""
    default, kind = Path("stack.yaml"), click.Path(path_type=Path)
    option = click.option("-f", "--file", "path", type=kind, default=default, show_default=True, help=FILE_HELP)
    return option(function)


def world_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--snapshot`, `--gpu`, `--count` and `--on`; without them this machine is looked at."""
    snapshot = click.option("--snapshot", "saved", type=click.Path(path_type=Path), help="A file of `aimgpu snapshot`.")
    gpu = gpu_option("Empty GPUs of this product, such as MI300X, instead of this machine's.")
    count = click.option("--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many of them.")
    return on_option(snapshot(gpu(count(function))))


def refuse_other_gpus(saved: Path | None, gpu: str | None, cluster: ClusterTarget | None = None) -> None:
    """Raises InvalidInput where more than one place is named."""
    given = [name for name, value in (("--snapshot", saved), ("--gpu", gpu), ("--on kubernetes", cluster)) if value is not None]
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} were both given", hint="Keep one of them.")


def read_world(saved: Path | None, gpu: str | None, count: int, stack: Stack | None = None) -> World:
    """Raises InvalidInput where the file is not a snapshot."""
    if saved is not None:
        snapshot, basis = read_saved_world(saved)
        return World(snapshot=snapshot, basis=basis or _own_basis(snapshot))
    if gpu is not None:
        return empty_machine(gpu, count)
    snapshot = _look_here(stack)
    engines = make_engines(LocalModelStore(), cache_directory(), has_gpu=has_gpu())
    runnable = tuple(name for name, engine in engines.items() if engine.availability().available)
    return World(snapshot=snapshot, basis=replace(_own_basis(snapshot), runnable=runnable))


def empty_machine(product: str, count: int) -> World:
    """Empty GPUs of a product, with what earlier runs on such a product took."""
    snapshot = empty_node(NODE, devices_of_product(product, count), make_isolator(find_home()))
    return World(snapshot=snapshot, basis=_own_basis(snapshot))


def size_asks(deployments: Iterable[Deployment], world: World) -> tuple[SizedAsk, ...]:
    """As `aimgpu up` would size them there."""
    store = LocalModelStore()
    choices = EngineChoices(
        engines=make_engines(store, cache_directory(), has_gpu=False),
        models=store,
        bringing_launchers=_BRINGING,
        default=_DEFAULT_ENGINE,
    )
    return size_asks_in(deployments, world, choices)


def _look_here(stack: Stack | None) -> Snapshot:
    """As `aimgpu up` would find it: a daemon keeps the GPUs that it has, else the stack may want simulated ones."""
    home = find_home()
    wanted = stack.gpus if stack is not None and stack.gpus.simulated is not None else None
    if stack is None or home.read_daemon() is None:
        return read_machine(home, wanted).snapshot
    machine = read_machine(home)
    check_gpus(stack, machine.hardware)
    return machine.snapshot


def _own_basis(snapshot: Snapshot) -> SizingBasis:
    return own_basis(ENGINES).about(state.device.product for _, state in snapshot.devices())
