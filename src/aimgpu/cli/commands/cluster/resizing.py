"""`aimgpu resize --on kubernetes`."""

import asyncio
import time
from dataclasses import dataclass

import click

from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.cli.commands.cluster.connection import in_cluster
from aimgpu.cli.output import print_json
from aimgpu.errors import EngineFailed, UnknownDeployment
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DEPLOYMENTS
from aimgpu.kubernetes.models.page.cluster_resize import apply_rollout, finish_rollout, read_cluster
from aimgpu.kubernetes.models.page.observed import name_models, observe
from aimgpu.kubernetes.models.page.share_rollout import ShareRollout, plan_rollout
from aimgpu.kubernetes.models.serving.cluster_view import ClusterView
from aimgpu.kubernetes.models.serving.share_rewrite import is_rolled_out
from aimgpu.units import format_bytes

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResize:
    """What `resize --on kubernetes` was asked for."""

    model: str
    memory_bytes: int
    dry_run: bool = False
    detach: bool = False
    as_json: bool = False


def resize_in_cluster(target: ClusterTarget, asked: ClusterResize) -> int:
    """Roll the model out with its new share, and wait until its pods are ready unless they are to be left alone."""
    return in_cluster(target, lambda client, namespace: _resize(client, namespace, asked))


async def _resize(client: Client, namespace: str, asked: ClusterResize) -> int:
    objects = await read_cluster(client, namespace)
    models = dict(name_models(objects.models))
    if asked.model not in models:
        raise UnknownDeployment.of(asked.model, known=models, where=f" in namespace {namespace}")
    seen = observe(objects, cluster=namespace, taken_at=time.monotonic())
    rollout = plan_rollout(seen, models[asked.model], asked.model, asked.memory_bytes)
    if not asked.as_json:
        _print(rollout, dry_run=asked.dry_run)
    failed = False
    if rollout.changed and not asked.dry_run:
        before = await apply_rollout(client, models[asked.model], rollout)
        if rollout.held and not asked.detach:
            failed = await _wait(client, models[asked.model], rollout, asked, old={_name(pod) for pod in objects.pods})
        if not failed and not (rollout.held and asked.detach):
            await finish_rollout(client, models[asked.model], before)
        elif rollout.surge and not asked.as_json:
            click.echo("Its new pods start before old ones end (maxSurge 1) until its stack file is applied again.")
    if asked.as_json:
        print_json({**rollout.to_json(), "dry_run": asked.dry_run})
    return EngineFailed.exit_status if failed else 0


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _print(rollout: ShareRollout, *, dry_run: bool) -> None:
    verb = "would get" if dry_run else "gets"
    for one in rollout.held if rollout.changed else ():
        for grant in one.grants:
            before, after = (format_bytes(size, up=True) for size in (grant.memory_bytes, rollout.memory_bytes))
            click.echo(f"{one.id} has {before} of {grant.partition_id}; its successor {verb} {after}")
    for note in rollout.notes:
        click.echo(note)


async def _wait(client: Client, item: Object, rollout: ShareRollout, asked: ClusterResize, *, old: set[str]) -> bool:
    """Until every pod has the new share and answers; whether a new one failed. What they wait for is shown when it changes.

    That an `old` pod fails may be why the share is changed.
    """
    place, name = item["metadata"]["namespace"], item["metadata"]["name"]
    view, before = ClusterView(client, place), dict[str, tuple[str, str | None]]()
    while True:
        done = is_rolled_out(await client.get(DEPLOYMENTS, name, place), rollout.wanted)
        rows = [row for row in (await view.read_status())["instances"] if row["name"] == asked.model and row["id"]]
        states = {str(row["id"]): (str(row["state"]), row["reason"]) for row in rows}
        for one, (state, reason) in states.items():
            if before.get(one) != (state, reason) and not asked.as_json:
                click.echo(f"{one}: {state}" + (f": {reason}" if reason else ""))
        before = states
        if done or any(state == "failed" for one, (state, _) in states.items() if one not in old):
            return not done
        await asyncio.sleep(_LOOK_SECONDS)
