"""`aimgpu logs`: what an engine printed."""

from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import click

from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.output import examples, json_option
from aimgpu.cli.running_models import complete_running, connect_or_name_left, deployed_names
from aimgpu.errors import DaemonUnreachable, InvalidInput, UnknownDeployment
from aimgpu.home import find_home


@click.command(
    epilog=examples(
        "aimgpu logs chat", "aimgpu logs chat -f", "aimgpu logs chat -n 20 --json", "aimgpu logs chat --on kubernetes"
    )
)
@click.argument("name", shell_complete=complete_running)
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0), default=100, show_default=True, help="How many of the last lines.")
@on_option
@json_option
def logs(name: str, follow: bool, lines: int, as_json: bool, cluster: ClusterTarget | None) -> None:
    """The log of the model NAME, or of one instance by its id."""
    if cluster is not None:
        from aimgpu.cli.commands.cluster.serving import logs_in_cluster  # noqa: PLC0415 -- a third of a second to import

        logs_in_cluster(cluster, name, lines=lines, follow=follow, as_json=as_json)
        return
    home = find_home()
    try:
        client = connect_or_name_left(home)
        chosen = choose_instances(name, client.read_status())
    except (DaemonUnreachable, UnknownDeployment):
        if not print_failed_log(home.failed_log(name), name, lines, as_json=as_json):
            raise
        return
    if follow and len(chosen) > 1:
        ids = ", ".join(str(instance["id"]) for instance in chosen)
        raise InvalidInput(f"{name} has {len(chosen)} instances", hint=f"Follow one of them: {ids}")
    for instance in chosen:
        if len(chosen) > 1 and not as_json:
            click.secho(f"==> {instance['id']}", bold=True)
        silent = True
        for line in client.read_log(str(instance["id"]), follow=follow, lines=lines):
            silent = False
            click.echo(dumps({"instance": instance["id"], "line": line}) if as_json else line)
        if silent and not follow:
            click.echo(f"{instance['id']} printed nothing.", err=True)


def print_failed_log(path: Path, name: str, lines: int, *, as_json: bool) -> bool:
    """The log of the last failed start of a model that does not run; False: there is none."""
    if not path.is_file():
        return False
    click.secho(f"{name} does not run. Its last failed start, from {path}:", fg="yellow", err=True)
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in text[-lines:] if lines else ():
        click.echo(dumps({"instance": name, "line": line}) if as_json else line)
    return True


def choose_instances(name: str, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The instance with this id, or all of the model with this name."""
    instances: Sequence[Mapping[str, Any]] = status.get("instances", [])
    found = [item for item in instances if item.get("id") == name] or [item for item in instances if item.get("name") == name]
    if not found:
        known = deployed_names(status)
        if name in known:
            raise UnknownDeployment(f"no instance of {name!r} runs", hint="`aimgpu ps` shows what it waits for.")
        raise UnknownDeployment.of(name, known=known)
    return found
