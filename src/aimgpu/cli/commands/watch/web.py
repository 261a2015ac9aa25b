"""`aimgpu web`: a link to the page, and the page of a cluster."""

import os
import sys

import click

from aimgpu.cli.client import connect
from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.home import find_home

_PROGRAM = (sys.executable, "-m", "aimgpu.kubernetes.page", "--own-rights")


@click.command(
    epilog=examples(
        "aimgpu web", "aimgpu web --on kubernetes", "aimgpu web --on kubernetes --kube-context production --namespace models"
    )
)
@click.option("--port", type=click.IntRange(0, 65535), default=8081, show_default=True, help="With --on kubernetes; 0: any.")
@on_option
@json_option
def web(port: int, as_json: bool, cluster: ClusterTarget | None) -> None:
    """Print a link that opens the daemon's page; with --on kubernetes, serve the page of a cluster until it is stopped.

    The link works once, within an hour. The browser that opens it may change things until the daemon ends.

    The page of a cluster shows GPUs, models and promises, deploys, stops and chats, on this machine only and with the rights
    of your kubeconfig.
    """
    if cluster is not None:
        os.execv(sys.executable, [*_PROGRAM, "--port", str(port), *_where(cluster)])  # noqa: S606 -- it takes this command's place
    url = connect(find_home()).make_link()
    if as_json:
        print_json({"url": url})
    else:
        click.echo(url)


def _where(cluster: ClusterTarget) -> list[str]:
    given = {"--kubeconfig": cluster.kubeconfig, "--kube-context": cluster.context, "--namespace": cluster.namespace}
    return [word for name, value in given.items() if value for word in (name, str(value))]
