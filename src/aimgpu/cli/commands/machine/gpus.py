"""`aimgpu gpus`: every device and partition, with what is granted, measured and free. Needs no daemon."""

import sys
import time
from typing import Any

import click

from aimgpu.cli.machine_view import read_machine
from aimgpu.cli.options import INTERVAL, simulated_option
from aimgpu.cli.output import clear_screen, examples, json_option, print_json
from aimgpu.cli.views.gpus import describe_machine, print_machine
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.errors import AimGpuError
from aimgpu.home import find_home


@click.command(
    epilog=examples(
        "aimgpu gpus",
        "aimgpu gpus --watch",
        "aimgpu gpus --json | jq '.gpus[].partitions[].free_bytes'",
        "aimgpu gpus --simulated MI355X    # what such a GPU would look like",
    )
)
@click.option("--watch", "-w", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--interval", type=INTERVAL, default=1.0, show_default=True, help="Seconds between looks.")
@simulated_option
@json_option
def gpus(watch: bool, interval: float, simulated: GpuChoice | None, as_json: bool) -> None:
    """The GPUs of this machine: layout, memory granted, measured and free, processes, and the isolation they can give."""
    if not watch:
        _show(describe_machine(read_machine(find_home(), simulated)), as_json=as_json)
        return
    _show_again(before := describe_machine(read_machine(find_home(), simulated)), as_json=as_json)
    while True:
        time.sleep(interval)
        try:
            now = describe_machine(read_machine(find_home(), simulated))
        except AimGpuError as error:  # a daemon that restarts, a driver that is reloaded: it may come back
            now = {"error": error.to_json()}
        if now != before:
            _show_again(before := now, as_json=as_json)


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
