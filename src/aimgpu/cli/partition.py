"""`aimgpu partition`: the layouts a GPU can have, what a change would do, and the change."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from aimgpu.cli.client import connect, error_from_json
from aimgpu.cli.home import Home, find_home
from aimgpu.cli.machine import Machine, read_machine
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.partition_view import describe_layouts, print_change, print_layouts
from aimgpu.cli.simulated_option import simulated_option
from aimgpu.control.partitioning import plan_layout
from aimgpu.control.stackfile import GpuChoice
from aimgpu.domain import Device
from aimgpu.errors import UnknownDevice
from aimgpu.ledger import Owner

_reload = click.option("--reload-driver", is_flag=True, help="Let a memory mode reload the driver; stops all GPU work.")
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would happen, as `plan` does, and change nothing.")


@click.group(epilog=examples("aimgpu partition list", "aimgpu partition plan 0 CPX", "aimgpu partition apply 0 CPX"))
def partition() -> None:
    """Divide a GPU into partitions that the hardware enforces."""


@partition.command("list", epilog=examples("aimgpu partition list", "aimgpu partition list --simulated MI300X"))
@click.argument("gpu", required=False)
@click.option("--all", "every", is_flag=True, help="Also layouts that differ only in where a partition begins.")
@simulated_option
@json_option
def list_(gpu: str | None, every: bool, simulated: GpuChoice | None, as_json: bool) -> None:
    """The layouts that each GPU can have, as the device tells; the one it has is marked."""
    machine = read_machine(find_home(), simulated)
    devices = [_find(machine, gpu)] if gpu else [state.device for state in machine.states]
    described = [describe_layouts(device) for device in devices]
    if as_json:
        print_json({"simulated": machine.simulated, "gpus": described})
    else:
        print_layouts(described, every=every)


@partition.command(epilog=examples("aimgpu partition plan 0 CPX", "aimgpu partition plan 0 CPX/NPS4 --json"))
@click.argument("gpu")
@click.argument("layout")
@json_option
def plan(gpu: str, layout: str, as_json: bool) -> None:
    """What would stop, what would come back and what would change if GPU had LAYOUT."""
    _show_plan(find_home(), gpu, layout, as_json=as_json)


@partition.command(
    epilog=examples(
        "aimgpu partition apply 0 CPX",
        "aimgpu partition apply 0 CPX/NPS4 --reload-driver",
        "aimgpu partition apply 0 QPX --dry-run",
    )
)
@click.argument("gpu")
@click.argument("layout")
@_reload
@_dry_run
@json_option
def apply(gpu: str, layout: str, reload_driver: bool, dry_run: bool, as_json: bool) -> None:
    """Drain our models on GPU, change its LAYOUT, verify it, and bring back what fits."""
    home = find_home()
    if dry_run:
        _show_plan(home, gpu, layout, as_json=as_json)
    else:
        _apply(home, gpu, layout, reload_driver=reload_driver, as_json=as_json)


@partition.command(epilog=examples("aimgpu partition reset 0", "aimgpu partition reset 0 --dry-run"))
@click.argument("gpu")
@_reload
@_dry_run
@json_option
def reset(gpu: str, reload_driver: bool, dry_run: bool, as_json: bool) -> None:
    """Make GPU one whole again."""
    home = find_home()
    device = _find(read_machine(home), gpu)
    whole = max((layout for layout in device.layouts if len(layout.partitions) == 1), key=lambda layout: layout.memory_bytes)
    if dry_run:
        _show_plan(home, gpu, whole.name, as_json=as_json)
    else:
        _apply(home, gpu, whole.name, reload_driver=reload_driver, as_json=as_json)


def _show_plan(home: Home, gpu: str, layout: str, *, as_json: bool) -> None:
    machine = read_machine(home)
    device = _find(machine, gpu)
    if machine.daemon:
        change = connect(home).plan_partition(device.id, layout)
    else:
        change = plan_layout(machine.snapshot, device.id, layout).to_json()
    change["in_the_way"] = [
        {"pid": process.pid, "name": process.name}
        for touched in change["devices"]
        for process in (machine.usage[touched].processes if touched in machine.usage else ())
        if process.pid not in machine.owners
    ]
    if as_json:
        print_json(change)
    else:
        print_change(change)


def _apply(home: Home, gpu: str, layout: str, *, reload_driver: bool, as_json: bool) -> None:
    machine = read_machine(home)
    device = _find(machine, gpu)
    if machine.daemon:
        _follow(connect(home).partition(device.id, layout, reload_driver=reload_driver), quiet=as_json)
    else:
        home.create()
        owner = Owner.acquire(home.path)  # no daemon may start while the layout changes under it
        try:
            machine.hardware.apply_layout(device.id, layout, reload_driver=reload_driver)
        finally:
            owner.release()
    after = _find(read_machine(home), device.id)
    if as_json:
        print_json({"device": after.id, "before": device.layout.name, "after": after.layout.name})
    else:
        click.echo(f"gpu{after.index} ({after.part}): {device.layout.name} -> {after.layout.name}, as read back.")


def _follow(events: Iterable[Mapping[str, Any]], *, quiet: bool) -> None:
    for event in events:
        if event.get("event") == "error" and not event.get("deployment"):
            raise error_from_json(event)
        if not quiet and event.get("text") and event.get("event") in ("step", "state", "refused", "error"):
            name = f"{event['deployment']}: " if event.get("deployment") else ""
            click.echo(f"{name}{event['text']}")


def _find(machine: Machine, wanted: str) -> Device:
    """By number ("0", "gpu0") or id."""
    for state in machine.states:
        if wanted in (state.device.id, str(state.device.index), f"gpu{state.device.index}"):
            return state.device
    known = ", ".join(f"{state.device.index} ({state.device.id})" for state in machine.states) or "none"
    raise UnknownDevice(f"no GPU {wanted!r}", hint=f"GPUs here: {known}.")
