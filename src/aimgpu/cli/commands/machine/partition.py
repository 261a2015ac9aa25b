"""`aimgpu partition`: the layouts a GPU can have, what a change would do, and the change."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import click

from aimgpu.cli.client import connect, error_from_json
from aimgpu.cli.machine_view import Machine, read_machine
from aimgpu.cli.options import simulated_option
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.signals import signals_answered
from aimgpu.cli.views.gpu_names import Rename, names_of
from aimgpu.cli.views.partition import describe_layouts, describe_step, print_change, print_changed, print_layouts
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.domain import Device
from aimgpu.errors import Conflict, PartitionBusy, UnknownDevice, UnknownLayout
from aimgpu.hardware.busy import processes_in_the_way
from aimgpu.hardware.protocols import Finding
from aimgpu.home import Home, find_home
from aimgpu.ledger import Owner
from aimgpu.wiring import make_dependencies

_reload = click.option("--reload-driver", is_flag=True, help="Let a memory mode reload the driver; stops all GPU work.")
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would happen, as `plan` does, and change nothing.")
_yes = click.option("--yes", "-y", is_flag=True, help="Stop running models without asking.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """What may be stopped for a change."""

    reload_driver: bool
    yes: bool
    as_json: bool


@click.group(epilog=examples("aimgpu partition list", "aimgpu partition plan 0 CPX", "aimgpu partition apply 0 CPX"))
def partition() -> None:
    """Divide a GPU into partitions that the hardware enforces."""


@partition.command("list", epilog=examples("aimgpu partition list", "aimgpu partition list --gpu MI300X"))
@click.argument("gpu", required=False)
@click.option("--all", "every", is_flag=True, help="Also layouts that differ only in where a partition begins.")
@simulated_option
@json_option
def list_(gpu: str | None, every: bool, simulated: GpuChoice | None, as_json: bool) -> None:
    """The layouts that each GPU can have, as the device reports them; the present one is marked."""
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
@simulated_option
@json_option
def plan(gpu: str, layout: str, simulated: GpuChoice | None, as_json: bool) -> None:
    """What would stop, what would come back and what would change if GPU had LAYOUT."""
    home = find_home()
    machine = read_machine(home, simulated)
    _show_plan(_plan(home, machine, _find(machine, gpu), layout), _names(machine), as_json=as_json)


@partition.command(
    epilog=examples(
        "aimgpu partition apply 0 CPX",
        "aimgpu partition apply 0 CPX --yes    # in a script: stop running models without asking",
        "aimgpu partition apply 0 CPX/NPS4 --reload-driver",
        "aimgpu partition apply 0 QPX --dry-run",
    )
)
@click.argument("gpu")
@click.argument("layout")
@_reload
@_yes
@_dry_run
@simulated_option
@json_option
def apply(gpu: str, layout: str, dry_run: bool, simulated: GpuChoice | None, **consent: bool) -> int:
    """Drain our models on GPU, change its LAYOUT, verify it, and bring back what fits; confirm before models stop."""
    home = find_home()
    machine = read_machine(home, simulated)
    return _change(home, machine, (_find(machine, gpu), layout), Consent(**consent), dry_run=dry_run)


@partition.command(epilog=examples("aimgpu partition reset 0", "aimgpu partition reset 0 --dry-run"))
@click.argument("gpu")
@_reload
@_yes
@_dry_run
@simulated_option
@json_option
def reset(gpu: str, dry_run: bool, simulated: GpuChoice | None, **consent: bool) -> int:
    """Make GPU one whole again."""
    home = find_home()
    machine = read_machine(home, simulated)
    device = _find(machine, gpu)
    return _change(home, machine, (device, _whole(device)), Consent(**consent), dry_run=dry_run)


def _whole(device: Device) -> str:
    single = [layout for layout in device.layouts if len(layout.partitions) == 1]
    if not single:
        raise UnknownLayout(
            f"gpu{device.index} ({device.product}) offers no layout of one partition", hint="`aimgpu partition list`."
        )
    # One MIG instance over everything may report more bytes than the GPU without MIG, and is still not the whole GPU.
    return max(single, key=lambda layout: (layout.partitions[0].start is None, layout.memory_bytes)).name


def _plan(home: Home, machine: Machine, device: Device, layout: str) -> dict[str, Any]:
    try:
        if machine.daemon:
            change = connect(home).plan_partition(device.id, layout)
        else:
            from aimgpu.control.plan.layout import find_layout_change  # noqa: PLC0415 - it decides, with numpy

            change = find_layout_change(machine.snapshot, device.id, layout).to_json()
            change |= {"stops": [], "returns": [], "does_not_fit": []}  # there is no daemon that could stop a model
    except UnknownLayout as error:
        findings = [finding for finding in machine.findings if finding.subject == device.id]
        raise _with_reasons(error, findings, _names(machine)) from error
    change |= describe_step(device, change["before"], change["after"]) | {"simulated": device.simulated}
    change["in_the_way"] = _strangers(machine, set(change["idle"]))
    return change


def _with_reasons(error: UnknownLayout, findings: Iterable[Finding], rename: Rename) -> UnknownLayout:
    """A GPU may offer less than its like for a reason: a virtual function, a reset."""
    message = "; ".join([error.message, *(finding.text for finding in findings)])
    hints = [error.hint, *(finding.hint for finding in findings)]
    return UnknownLayout(rename(message), hint=rename(" ".join(hint for hint in hints if hint)))


def _strangers(machine: Machine, idle: set[str]) -> list[dict[str, Any]]:
    """Processes on partitions that must be idle meanwhile: not ours, or ours with no daemon that could stop them."""
    ours = machine.helpers | (machine.owners.keys() if machine.daemon else set())
    halted = {state.device.id for state in machine.states if any(part.id in idle for part in state.device.layout.partitions)}
    found = {
        process.pid: process.name
        for usage in machine.usage.values()
        if usage.device_id in halted
        for process in usage.processes
        if process.pid not in ours and (process.partition_id is None or process.partition_id in idle)
    }
    return [{"pid": pid, "name": name, "instance": machine.owners.get(pid)} for pid, name in found.items()]


def _names(machine: Machine) -> Rename:
    return names_of(state.device for state in machine.states)


def _show_plan(change: Mapping[str, Any], rename: Rename, *, as_json: bool) -> None:
    if as_json:
        print_json(change)
    else:
        print_change(change, rename)


def _change(home: Home, machine: Machine, wanted: tuple[Device, str], consent: Consent, *, dry_run: bool) -> int:
    """Exit status: 0, or 1 where the user said no."""
    device, layout = wanted
    change, rename = _plan(home, machine, device, layout), _names(machine)
    if dry_run:
        _show_plan(change, rename, as_json=consent.as_json)
        return 0
    _refuse_stranded(change, rename)
    refused = change["needs_reload"] and not consent.reload_driver  # nothing will be stopped
    if change["stops"] and not refused and not consent.yes and not _confirm(change, rename, as_json=consent.as_json):
        click.echo("Nothing was changed.", err=True)
        return 1
    _apply(home, machine, device, change, consent)
    after = _find(read_machine(home, None if machine.daemon else machine.choice), device.id)
    if consent.as_json:
        before = device.layout.name
        print_json({"device": after.id, "before": before, "after": after.layout.name, "simulated": after.simulated})
    else:
        print_changed(device, after)
    return 0


def _refuse_stranded(change: Mapping[str, Any], rename: Rename) -> None:
    left = sorted({process["instance"] for process in change["in_the_way"] if process["instance"]})
    if left:
        raise PartitionBusy(
            f"cannot set {change['after']} on {rename(change['device'])}: {', '.join(left)} still run, and no daemon does",
            hint="`aimgpu up` takes them over, `aimgpu down` ends them; then try again. Nothing was changed.",
        )


def _confirm(change: Mapping[str, Any], rename: Rename, *, as_json: bool) -> bool:
    """Asked of a person only; a script has to say it beforehand. Nothing is asked for a change that would be refused."""
    if change["in_the_way"]:
        processes = {process["pid"]: process["name"] for process in change["in_the_way"]}
        raise processes_in_the_way(rename(change["device"]), change["after"], processes)
    count = len(change["stops"])
    what = f"{count} running model{'' if count == 1 else 's'} ({', '.join(change['stops'])})"
    if as_json or not sys.stdin.isatty():
        gpu, line = rename(change["device"]), f"aimgpu partition apply {rename(change['device'])} {change['after']}"
        raise Conflict(
            f"{change['before']} -> {change['after']} on {gpu} stops {what}",
            hint=f"`{line} --yes` allows it, `{line} --dry-run` shows what comes back. Nothing was changed.",
        )
    print_change(change, rename)
    return click.confirm(f"Stop {what} for this?", err=True)


def _apply(home: Home, machine: Machine, device: Device, change: Mapping[str, Any], consent: Consent) -> None:
    layout = change["after"]
    if machine.daemon:
        events = connect(home).partition(device.id, layout, reload_driver=consent.reload_driver)
        try:
            _follow(events, _names(machine), quiet=consent.as_json)
        except KeyboardInterrupt:
            click.echo("The daemon goes on with the change; `aimgpu gpus` shows it.", err=True)
            raise
        return
    home.create()
    owner = Owner.acquire(home.path)  # no daemon may start while the layout changes under it
    try:
        with _finishing():
            _apply_offline(home, machine, device.id, layout, consent)
    finally:
        owner.release()


def _apply_offline(home: Home, machine: Machine, device_id: str, layout: str, consent: Consent) -> None:
    from aimgpu.control.offline_layout import change_layout_offline  # noqa: PLC0415 - it decides, with numpy; `list` need not wait

    dependencies = make_dependencies(home, machine.hardware, lambda _: 0)
    try:
        change_layout_offline(dependencies, device_id, layout, reload_driver=consent.reload_driver)
    finally:
        dependencies.ledger.close()


@contextmanager
def _finishing() -> Iterator[None]:
    """Signals are only answered: partitions half made, or a driver unloaded and not loaded again, are worse than a wait."""
    text = "The change is under way and will be finished: half of it would be worse."

    def answer() -> None:
        with suppress(OSError):  # the terminal may be gone
            click.echo(text, err=True)

    with signals_answered(answer):
        yield


def _follow(events: Iterable[Mapping[str, Any]], rename: Rename, *, quiet: bool) -> None:
    for event in events:
        if event.get("event") == "error" and not event.get("deployment"):
            raise error_from_json(event)
        if not quiet and event.get("text") and event.get("event") in ("step", "state", "refused", "error"):
            name = f"{event['deployment']}: " if event.get("deployment") else ""
            click.echo(rename(f"{name}{event['text']}"))


def _find(machine: Machine, wanted: str) -> Device:
    """By number ("0", "gpu0") or id."""
    for state in machine.states:
        if wanted in (state.device.id, str(state.device.index), f"gpu{state.device.index}"):
            return state.device
    known = ", ".join(f"{state.device.index} ({state.device.id})" for state in machine.states) or "none"
    raise UnknownDevice(f"there is no GPU {wanted!r}", hint=f"GPUs here: {known}.")
