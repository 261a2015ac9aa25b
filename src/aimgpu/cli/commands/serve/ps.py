"""`aimgpu ps`: what runs."""

import sys
import time
from collections.abc import Mapping
from json import dumps
from typing import Any

import click

from aimgpu.cli.client import DaemonClient
from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.options import INTERVAL
from aimgpu.cli.output import clear_screen, examples, json_option, print_json
from aimgpu.cli.running_models import connect_or_name_left
from aimgpu.cli.views.status import print_instances, print_simulated
from aimgpu.errors import InvalidInput
from aimgpu.home import find_home


@click.command(
    epilog=examples(
        "aimgpu ps",
        "aimgpu ps --wide",
        "aimgpu ps --watch",
        "aimgpu ps --on kubernetes",
        "aimgpu ps --json | jq '.instances[].state'",
    )
)
@click.option("--watch", "-w", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--wide", is_flag=True, help="All columns: engine, requests at once, isolation, endpoint.")
@click.option("--interval", type=INTERVAL, default=1.0, show_default=True, help="Seconds between looks.")
@on_option
@json_option
def ps(watch: bool, wide: bool, interval: float, as_json: bool, cluster: ClusterTarget | None) -> None:
    """The models that run: where, with how much memory, in what state."""
    if cluster is not None:
        from aimgpu.cli.commands.cluster.serving import ps_in_cluster  # noqa: PLC0415 -- a third of a second to import

        if watch:
            raise InvalidInput("--watch is for this machine", hint="Use `watch aimgpu ps --on kubernetes`.")
        ps_in_cluster(cluster, as_json=as_json)
        return
    client = connect_or_name_left(find_home())
    if not watch:
        _show(client.read_status(), wide=wide, as_json=as_json)
        return
    _watch(client, interval, wide=wide, as_json=as_json)


def _watch(client: DaemonClient, interval_seconds: float, *, wide: bool, as_json: bool) -> None:
    """On a terminal the old picture is replaced; elsewhere a new one follows, one line of JSON each with --json."""
    before: Mapping[str, Any] | None = None
    while True:
        status = client.read_status()
        if status != before:
            before = status
            if as_json:
                click.echo(dumps(status))
            else:
                clear_screen()
                _show(status, wide=wide, as_json=False)
            sys.stdout.flush()
        time.sleep(interval_seconds)


def _show(status: Mapping[str, Any], *, wide: bool, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    print_simulated(status)
    print_instances(status, wide=wide)
    click.echo(f"\nOpenAI endpoint  {status.get('models_url')}")
