"""`snapshot`, `plan`, `explain` and `capacity` with `--on kubernetes`: decided on what the cluster's objects show now.

kube-scheduler decides in the end. It neither moves nor stops anything for a pod, so plans do not either.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import click

from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.cli.commands.cluster.connection import in_cluster
from aimgpu.cli.output import print_json, print_table
from aimgpu.cli.sizing_basis import own_basis
from aimgpu.control.observation import Observation
from aimgpu.control.plan.prepared import ask_for
from aimgpu.control.what_if import SizedAsk, World
from aimgpu.domain import Deployment
from aimgpu.errors import ClusterFailed, UnknownDeployment
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.models.page.cluster_resize import read_cluster
from aimgpu.kubernetes.models.page.cluster_sizing import size_in_cluster, snapshot_of
from aimgpu.kubernetes.models.page.observed import ClusterObjects, name_models, observe
from aimgpu.kubernetes.models.page.placement_reasons import explain_pods
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import plan_all
from aimgpu.sizing import ENGINES

STANDING = Limits(may_move=False, may_stop=False, may_change_layouts=False)
_MOST_COPIES = 256
_COLUMNS = ("device_id", "verdict", "text")


def read_cluster_world(target: ClusterTarget) -> tuple[World, Observation]:
    """Raises ClusterFailed where the GPUs are not the caller's to see."""
    _, seen = _look(target)
    return World(snapshot=snapshot_of(seen), basis=own_basis(ENGINES)), seen


def size_asks_in_cluster(deployments: Iterable[Deployment], seen: Observation) -> tuple[SizedAsk, ...]:
    """As admission sizes their pods."""
    return tuple(
        replace(sized, ask=replace(sized.ask, name=f"{deployment.name}-{replica}"))
        for deployment in deployments
        for sized in [_sized(deployment, seen)]
        for replica in range(deployment.replicas)
    )


def explain_in_cluster(target: ClusterTarget, name: str, *, as_json: bool) -> None:
    """Why each pod of the model is where it is, or waits: what every GPU offers or lacks."""
    objects, seen = _look(target)
    found = explain_pods(objects, seen, name)
    if not found:
        raise UnknownDeployment.of(name, known=dict(name_models(objects.models)), where=f" in namespace {seen.node}")
    if as_json:
        print_json(found)
        return
    for each in found:
        click.secho(f"{each['instance']}:", bold=True)
        for fact in each["facts"]:
            click.echo(f"  {fact}")
        if each["devices"]:
            print_table(["GPU", "VERDICT", "WHY"], [[str(one[key]) for key in _COLUMNS] for one in each["devices"]])
        if each["note"]:
            click.echo(each["note"])


def show_room_in_cluster(target: ClusterTarget, deployments: Sequence[Deployment], *, as_json: bool) -> None:
    """How many more of each model the cluster has room for, beside what runs and without the others of the stack."""
    world, seen = read_cluster_world(target)
    rows = [{"name": one.ask.deployment, "more": _count(one, world)} for one in (_sized(each, seen) for each in deployments)]
    if as_json:
        print_json({"namespace": seen.node, "models": rows})
    else:
        print_table(["NAME", "MORE"], [(str(row["name"]), _at_least(int(row["more"] or 0))) for row in rows])


def _look(target: ClusterTarget) -> tuple[ClusterObjects, Observation]:
    async def look(client: Client, namespace: str) -> tuple[str, ClusterObjects]:
        return namespace, await read_cluster(client, namespace)

    namespace, objects = in_cluster(target, look)
    if not objects.nodes:
        raise ClusterFailed(
            "no GPU of the cluster can be seen",
            hint="It takes the chart, and the right to list gpunodes and the gpushares of all namespaces.",
        )
    return objects, observe(objects, cluster=namespace, taken_at=time.monotonic())


def _sized(deployment: Deployment, seen: Observation) -> SizedAsk:
    prepared = size_in_cluster(deployment, seen)
    notes = tuple(f"{deployment.name}: {note}" for note in prepared.footprint.notes)
    return SizedAsk(ask=ask_for(prepared, 0), engine=prepared.engine, footprint=prepared.footprint, notes=notes)


def _count(sized: SizedAsk, world: World) -> int:
    """Copies that find a place, up to a bound."""
    asks = [replace(sized.ask, name=f"{sized.ask.name}-{number}") for number in range(_MOST_COPIES)]
    return len(plan_all(world.snapshot, asks, STANDING).plan.placements)


def _at_least(count: int) -> str:
    return f"{count} or more" if count == _MOST_COPIES else str(count)
