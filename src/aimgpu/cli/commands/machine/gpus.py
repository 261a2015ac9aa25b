"""`aimgpu gpus`: every device and partition, with what is granted, measured and free. Needs no daemon."""

import sys
import time
from dataclasses import replace
from typing import Any

import click

from aimgpu.cli.machine_view import read_machine
from aimgpu.cli.options import INTERVAL, simulated_option
from aimgpu.cli.output import Column, clear_screen, examples, json_option, print_json, print_table
from aimgpu.cli.views.gpus import describe_machine, print_machine
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.errors import AimGpuError
from aimgpu.hardware.known_gpus import known_gpus
from aimgpu.home import find_home
from aimgpu.units import format_bytes


@click.command(
    epilog=examples(
        "aimgpu gpus",
        "aimgpu gpus --watch",
        "aimgpu gpus --json | jq '.gpus[].partitions[].free_bytes'",
        'aimgpu gpus --gpu "RTX 4090"    # what such a GPU would look like',
        "aimgpu gpus --known             # every GPU that can be sized for and simulated",
    )
)
@click.option("--watch", "-w", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--interval", type=INTERVAL, default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--known", is_flag=True, help="The GPUs that --gpu knows, instead of this machine's.")
@simulated_option
@json_option
def gpus(watch: bool, interval: float, known: bool, simulated: GpuChoice | None, as_json: bool) -> None:
    """The GPUs of this machine: layout, memory granted, measured and free, processes, and the isolation they can give."""
    if known:
        _show_known(as_json=as_json)
        return
    if not watch:
        _show(_look(simulated), as_json=as_json)
        return
    _show_again(before := _look(simulated), as_json=as_json)
    while True:
        time.sleep(interval)
        try:
            now = _look(simulated)
        except AimGpuError as error:  # a daemon that restarts, a driver that is reloaded: it may come back
            now = {"error": error.to_json()}
        if now != before:
            _show_again(before := now, as_json=as_json)


def _look(simulated: GpuChoice | None) -> dict[str, Any]:
    """A daemon that runs is one also beside GPUs that are asked for by name."""
    machine = read_machine(home := find_home(), simulated)
    return describe_machine(replace(machine, daemon=machine.daemon or home.read_daemon() is not None))


def _show_again(now: dict[str, Any], *, as_json: bool) -> None:
    """On a terminal the old picture is replaced; elsewhere a new one follows, one line of JSON each with --json."""
    if as_json:
        print_json(now, indent=None)
    else:
        clear_screen()
        if "error" in now:
            click.secho(f"{now['error']['message']} (still looking; Ctrl-C ends)", fg="red")
        else:
            print_machine(now)
    sys.stdout.flush()


def _show(now: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(now)
    else:
        print_machine(now)


def _show_known(*, as_json: bool) -> None:
    if as_json:
        print_json({"gpus": known_gpus()})
        return
    rows = [(gpu.product, gpu.market_name, format_bytes(gpu.memory_bytes), str(gpu.compute_units)) for gpu in known_gpus()]
    print_table(["PRODUCT", "NAME", Column("MEMORY", right=True), Column("UNITS", right=True)], rows)
    click.echo("UNITS: AMD's compute units or NVIDIA's SMs. Where the figures come from: docs/reference/gpus.md")
