"""`--on kubernetes` and where the cluster is: the same command on a machine or a cluster."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from aimgpu.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTarget:
    """A cluster and a namespace of it, as the command line names them."""

    kubeconfig: Path | None = None
    context: str = ""
    namespace: str | None = None


def on_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--on` and where the cluster is; the command gets a ClusterTarget as `cluster`, None for this machine."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, on: str, cluster: ClusterTarget, **options: Any) -> Any:  # noqa: ANN401 - click's
        if on == "machine" and cluster != ClusterTarget():
            raise InvalidInput("--kubeconfig, --kube-context and --namespace name a cluster", hint="Add --on kubernetes.")
        return function(*arguments, cluster=cluster if on == "kubernetes" else None, **options)

    choice = click.option(
        "--on", type=click.Choice(("machine", "kubernetes")), default="machine", show_default=True, help="Where the models run."
    )
    return choice(cluster_options(wrapped))


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add where the cluster is and a namespace; the command gets a ClusterTarget as `cluster`."""

    @functools.wraps(function)
    def wrapped(*arguments: object, cluster: ClusterTarget, namespace: str | None, **options: Any) -> object:  # noqa: ANN401 - click's
        return function(*arguments, cluster=replace(cluster, namespace=namespace), **options)

    namespace = "Of the models in the cluster. [that of the context, or default]"
    return connection_options(click.option("--namespace", metavar="NAME", help=namespace)(wrapped))


def connection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add where the cluster is, for a command whose `--namespace` means another; it gets a ClusterTarget as `cluster`."""

    @functools.wraps(function)
    def wrapped(*arguments: object, kubeconfig: Path | None, kube_context: str | None, **options: Any) -> object:  # noqa: ANN401 - click's
        return function(*arguments, cluster=ClusterTarget(kubeconfig=kubeconfig, context=kube_context or ""), **options)

    wrapped = click.option("--kube-context", metavar="NAME", help="Of the kubeconfig. [its current one]")(wrapped)
    return click.option("--kubeconfig", type=click.Path(path_type=Path), help="[$KUBECONFIG, or ~/.kube/config]")(wrapped)
