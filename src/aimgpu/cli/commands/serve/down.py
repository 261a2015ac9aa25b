"""`aimgpu down`: give back what runs."""

from collections.abc import Mapping
from typing import Any

import click

from aimgpu.cli.client import connect
from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.daemon_process import DaemonOptions, start_daemon, wait_until_gone
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.running_models import complete_running, connect_or_name_left, deployed_names
from aimgpu.errors import AimGpuError, DaemonRunning, InvalidInput, LedgerOwned
from aimgpu.home import Home, find_home
from aimgpu.ledger import Owner, has_other_schema, move_aside
from aimgpu.wiring import make_launchers

_GRACE_SECONDS = 10.0


@click.command(
    epilog=examples(
        "aimgpu down            # everything, and the daemon",
        "aimgpu down chat code  # these two; the rest stays",
        "aimgpu down --on kubernetes",
    )
)
@click.argument("names", nargs=-1, shell_complete=complete_running)
@on_option
@json_option
def down(names: tuple[str, ...], as_json: bool, cluster: ClusterTarget | None) -> None:
    """Stop models and give back what they held. Without NAMES: all of them, and the daemon."""
    if cluster is not None:
        from aimgpu.cli.commands.cluster.serving import down_in_cluster  # noqa: PLC0415 -- a third of a second to import

        down_in_cluster(cluster, names, as_json=as_json)
        return
    home = find_home()
    if names:
        client = connect_or_name_left(home)
        if names == ("all",) and "all" not in deployed_names(client.read_status()):
            raise InvalidInput("no model is called 'all'", hint="`aimgpu down` stops everything.")
        client.release(list(names))
        if as_json:
            print_json({"released": list(names), "daemon_stopped": False})
        else:
            click.echo(f"Stopped {', '.join(names)}.")
        return
    stopped = _stop_everything(home)
    if as_json:
        print_json({"released": stopped or [], "daemon_stopped": stopped is not None})
    else:
        click.echo("Nothing runs." if stopped is None else "Stopped.")


def _stop_everything(home: Home) -> list[str] | None:
    """What was stopped; None where nothing ran. A daemon that was killed left its models: a new one takes them over first."""
    record = home.read_daemon()
    if record is not None:
        stopped = connect(home).stop()
        wait_until_gone(record)
        return _names(stopped)
    if has_other_schema(home.ledger_file):
        return _end_other_build(home)
    if not home.daemon_file.exists() and not any(launcher.find_started() for launcher in make_launchers(home).values()):
        return None
    try:
        answer = start_daemon(home, DaemonOptions(port=0)).stop()
    except (DaemonRunning, LedgerOwned):
        raise
    except AimGpuError as error:  # a damaged file, a full disk: running engines can still be ended
        ended = _stop_processes(home)
        if not ended:
            raise
        click.echo(f"The daemon does not start: {error.message}. The engines were stopped without it.", err=True)
        return ended
    home.daemon_file.unlink(missing_ok=True)
    return _names(answer)


def _end_other_build(home: Home) -> list[str]:
    """What a build with another ledger left: its engines are stopped, its ledger is kept under another name."""
    owner = Owner.acquire(home.path)
    try:
        ended = _stop_processes(home)
        kept = move_aside(home.ledger_file, "schema")
        home.daemon_file.unlink(missing_ok=True)
    finally:
        owner.release()
    click.echo(f"Another build of aimgpu wrote the ledger; it is kept as {kept}.", err=True)
    return ended


def _stop_processes(home: Home) -> list[str]:
    """Every engine that a daemon of this home started, found by its process or container and not in the ledger."""
    ended = []
    for launcher in make_launchers(home).values():
        for instance_id, process in launcher.find_started().items():
            launcher.stop(process, grace_seconds=_GRACE_SECONDS)
            ended.append(instance_id)
    return sorted(ended)


def _names(answer: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in answer.get("released", ())]
