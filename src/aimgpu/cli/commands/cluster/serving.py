"""`up`, `ps`, `logs`, `slo` and `down` with `--on kubernetes`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from typing import Any, TypeVar

import click
import yaml

from aimgpu.cli.cluster_options import ClusterTarget
from aimgpu.cli.commands.cluster.connection import in_cluster
from aimgpu.cli.output import Cell, Column, print_json, print_table
from aimgpu.cli.views.status import STATE_STYLES, shown_state
from aimgpu.control.stack.stack_file import Stack
from aimgpu.errors import ClusterFailed, EngineFailed
from aimgpu.keyfile import KeyStore
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import DEPLOYMENTS
from aimgpu.kubernetes.cluster.placeable import refuse_unplaceable
from aimgpu.kubernetes.models.serving.applier import AppliedObject, ObjectChange, StackApplier
from aimgpu.kubernetes.models.serving.cluster_view import (
    GATEWAY_SELECTOR,
    ClusterView,
    find_installed_image,
    find_media_domains,
)
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.key_secret import KeySecret, find_gateway_namespace, gateway_namespace_or
from aimgpu.kubernetes.models.serving.manifests import USUAL_NAMESPACE, Manifest, RenderOptions, render_stack
from aimgpu.kubernetes.models.serving.queue_bounds import QueueBounds
from aimgpu.units import format_bytes

_LOOK_SECONDS = 1.0
_Answer = TypeVar("_Answer")
_SETTLED = ("ready", "running", "sleeping", "ended")
_STYLES = {
    ObjectChange.CREATED: "green",
    ObjectChange.CONFIGURED: "yellow",
    ObjectChange.DELETED: "red",
    ObjectChange.UNCHANGED: "",
}
_COLUMNS = (
    Column("NAME", fold=False),
    Column("MODEL"),
    Column("ENGINE", fold=False, drop=3),
    Column("POD", fold=False, drop=2),
    Column("NODE", fold=False, drop=1),
    Column("GPU/PARTITION"),
    Column("MEMORY", right=True, fold=False),
    Column("LEVEL", fold=False),
    Column("STATE", fold=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUp:
    """What `up --on kubernetes` was asked for."""

    dry_run: bool = False
    prune: bool = False
    detach: bool = False
    as_json: bool = False
    as_inference_services: bool = False
    stack_name: str = "default"
    image: str | None = None
    vendor: str | None = None
    pull_policy: str | None = None
    show: bool = False  # print the objects, also where they are applied
    cache: str | None = None
    folder: str | None = None  # of the stack file


def up_in_cluster(target: ClusterTarget, stack: Stack, asked: ClusterUp) -> int:
    """Apply the stack, and wait until its models are ready unless they are to be left alone."""
    return in_cluster(target, lambda client, namespace: _up(client, namespace, stack, asked))


async def _up(client: Client, namespace: str, stack: Stack, asked: ClusterUp) -> int:
    applier = StackApplier(client, namespace)
    await applier.check_cluster(inference_services=asked.as_inference_services)
    images = ServingImages(
        own=asked.image or await find_installed_image(client),
        vendor=asked.vendor or await applier.find_vendor(),
        pull_policy=asked.pull_policy,
        media_domains=await find_media_domains(client),
    )
    options = RenderOptions(
        images=images,
        stack=asked.stack_name,
        as_inference_services=asked.as_inference_services,
        cache=asked.cache,
        gateway_namespace=await gateway_namespace_or(client, USUAL_NAMESPACE),
        folder=asked.folder,
    )
    manifests = render_stack(stack.deployments, options)
    await refuse_unplaceable(client, manifests, namespace)
    if (asked.dry_run or asked.show) and not asked.as_json:
        click.echo(manifest_text([_hidden(one) for one in manifests]))
    changes = [one async for one in _shown(applier.apply(manifests, dry_run=asked.dry_run), asked)]
    if asked.prune:
        names = [one.name for one in stack.deployments]
        pruned = applier.prune(names, stack=asked.stack_name, dry_run=asked.dry_run)
        changes += [one async for one in _shown(pruned, asked)]
    await _change_queue(client, stack, f"{namespace}/{asked.stack_name}", asked)
    failed = False
    if not (asked.dry_run or asked.detach):
        failed = await _wait(ClusterView(client, namespace), {one.name for one in stack.deployments}, asked)
        if failed and not asked.as_json:
            click.echo(f"Its log: aimgpu logs NAME --on kubernetes --namespace {namespace}", err=True)
    if asked.as_json:
        shown = [_hidden(one) for one in manifests] if asked.dry_run else None
        print_json({"namespace": namespace, "changes": [asdict(one) for one in changes], "manifests": shown})
    return EngineFailed.exit_status if failed else 0


async def _change_queue(client: Client, stack: Stack, set_by: str, asked: ClusterUp) -> None:
    """The gateway of the cluster takes the bounds of the last stack that gives some."""
    if stack.queue is None and not asked.prune:
        return
    try:
        bounds = QueueBounds(client, await find_gateway_namespace(client), set_by)
        changed = await (
            bounds.reset(dry_run=asked.dry_run) if stack.queue is None else bounds.change(stack.queue, dry_run=asked.dry_run)
        )
    except ClusterFailed as error:
        if stack.queue is not None:
            click.echo(f"note: the bounds under `queue:` are not set: {error.message}.", err=True)
        return
    if changed and not asked.as_json:
        click.echo("would change the bounds of the queue" if asked.dry_run else "changed the bounds of the gateway's queue")


def manifest_text(manifests: Sequence[Manifest]) -> str:
    """As one would write them by hand: a part that occurs twice is written twice."""
    return yaml.safe_dump_all(loads(dumps(manifests)), sort_keys=False, width=120)


def _hidden(manifest: Manifest) -> Manifest:
    """Without the values of Secrets."""
    if manifest["kind"] != "Secret":
        return manifest
    return {**manifest, "data": dict.fromkeys(manifest["data"], "<hidden>")}


async def _shown(changes: AsyncIterator[AppliedObject], asked: ClusterUp) -> AsyncIterator[AppliedObject]:
    async for one in changes:
        print_change(one, asked)
        yield one


def print_change(one: AppliedObject, asked: ClusterUp) -> None:
    """One line, as kubectl has it."""
    if not asked.as_json:
        mode = " (dry run)" if asked.dry_run else ""
        click.secho(f"{one.kind.lower()}/{one.name} {one.change.value}{mode}", fg=_STYLES[one.change] or None)


async def _wait(view: ClusterView, names: set[str], asked: ClusterUp) -> bool:
    """Until every model is ready, sleeps, or failed; whether one failed. What they wait for is shown when it changes."""
    before: dict[str, tuple[str, str | None]] = {}
    while True:
        rows = [row for row in (await view.read_status())["instances"] if row["name"] in names]
        states = {str(row["id"] or row["name"]): (shown_state(row), row["reason"]) for row in rows}
        for one, (state, reason) in states.items():
            if before.get(one) != (state, reason) and not asked.as_json:
                click.secho(f"{one}: {state}" + (f": {reason}" if reason else ""), fg=_color(state))
        before = states
        found = {state for state, _ in states.values()}
        if "failed" in found:
            return True
        if states and found <= set(_SETTLED) and {row["name"] for row in rows} == names:
            return False
        await asyncio.sleep(_LOOK_SECONDS)


def _color(state: str) -> str | None:
    return STATE_STYLES.get(state, "").rsplit(" ", 1)[-1] or None


def down_in_cluster(target: ClusterTarget, names: Sequence[str], *, as_json: bool) -> None:
    """Remove these models, or all of the namespace; what they downloaded into claims stays."""

    async def work(client: Client, namespace: str) -> tuple[str, list[AppliedObject]]:
        asked = ClusterUp(as_json=as_json)
        removed = [one async for one in _shown(StackApplier(client, namespace).remove(names), asked)]
        if not names:
            with contextlib.suppress(ClusterFailed):  # no gateway, or not ours to see
                await QueueBounds(client, await find_gateway_namespace(client), f"{namespace}/{asked.stack_name}").reset()
        return namespace, removed

    namespace, removed = in_cluster(target, work)
    if as_json:
        models = sorted({one.model for one in removed if one.model})
        print_json({"namespace": namespace, "released": models, "changes": [asdict(one) for one in removed]})
    elif not removed:
        click.echo(f"Nothing runs in namespace {namespace}.")


def ps_in_cluster(target: ClusterTarget, *, as_json: bool) -> None:
    status = in_cluster(target, lambda client, namespace: ClusterView(client, namespace).read_status())
    if as_json:
        print_json(status)
    else:
        print_models(status)


def print_models(status: Mapping[str, Any]) -> None:
    """A table of pods, and why some do not run."""
    rows = status["instances"]
    if not rows:
        click.echo(f"Nothing runs in namespace {status['namespace']}.")
        return
    print_table(_COLUMNS, [_row(row) for row in rows])
    for row in rows:
        if row["reason"] and row["state"] not in ("ready", "ended"):
            click.secho(f"{row['id'] or row['name']}: {row['reason']}", fg="yellow", err=True)


def _row(row: Mapping[str, Any]) -> list[str | Cell]:
    place = str(row.get("partition") or row.get("gpu") or "")
    memory = row.get("memory_bytes")
    return [
        str(row["name"]),
        str(row["model"] or "-").rsplit("/", 1)[-1],
        str(row["engine"] or "-"),
        str(row["id"] or "-"),
        str(row.get("node") or "-"),
        place or "-",
        format_bytes(memory, up=True) if memory else "-",
        str(row.get("level") or "-"),
        Cell(shown_state(row), STATE_STYLES.get(shown_state(row), "")),
    ]


def logs_in_cluster(target: ClusterTarget, name: str, *, lines: int, follow: bool, as_json: bool) -> None:
    async def work(client: Client, namespace: str) -> None:
        last = None
        async for pod, line in ClusterView(client, namespace).read_logs(name, lines=lines, follow=follow):
            if pod != last and last is not None and not as_json:
                click.secho(f"==> {pod}", bold=True)
            last = pod
            click.echo(dumps({"instance": pod, "line": line}) if as_json else line)

    in_cluster(target, work)


def change_cluster_keys(target: ClusterTarget, act: Callable[[KeyStore], _Answer]) -> _Answer:
    """On the Secret of the gateway, in its own namespace unless another is named."""

    async def work(client: Client, _: str) -> _Answer:
        namespace = target.namespace or await find_gateway_namespace(client)
        return await KeySecret(client, namespace).change(act)

    return in_cluster(target, work)


def describe_divided_concurrency(target: ClusterTarget, most: int) -> str | None:
    """What a key with this limit may do where there are more gateways than that; None: the limit holds."""

    async def count(client: Client, _: str) -> int:
        try:
            found = (await client.list(DEPLOYMENTS, target.namespace or None, labels=GATEWAY_SELECTOR))[0]
        except ClusterFailed:  # not ours to see
            return 0
        return sum(int(one["spec"].get("replicas") or 0) for one in found)

    gateways = in_cluster(target, count)
    if gateways <= most:
        return None
    return f"{gateways} gateways run, and each answers at least one of its requests at a time: it may have {gateways} at once."


def read_cluster_scores(target: ClusterTarget) -> dict[str, Any]:
    """As `aimgpu slo` shows them."""
    return dict(in_cluster(target, lambda client, namespace: ClusterView(client, namespace).read_scores()))


def read_cluster_names(target: ClusterTarget) -> set[str]:
    """The models of the namespace, also those without a pod."""
    status = in_cluster(target, lambda client, namespace: ClusterView(client, namespace).read_status())
    return {str(row["name"]) for row in status["instances"]}
