from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import click
import yaml

from aimgpu.cli.cluster_options import ClusterTarget, connection_options
from aimgpu.cli.commands.cluster.connection import in_cluster
from aimgpu.cli.commands.cluster.slicing_sizes import size_models
from aimgpu.cli.options import FiniteRange
from aimgpu.cli.output import Cell, Column, Function, examples, is_terminal, json_option, print_json, print_table
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.timeslicing import ISOLATION
from aimgpu.kubernetes.cluster.timeslicing.diagnosis import SlicingHealth, diagnose
from aimgpu.kubernetes.cluster.timeslicing.installation import (
    Installation,
    find_installation,
    find_nodes,
    read_setup,
    read_undo,
    write_setup,
)
from aimgpu.kubernetes.cluster.timeslicing.plugin_setup import KINDS, NVIDIA, PluginSetup, show_difference, with_sharing
from aimgpu.kubernetes.cluster.timeslicing.recommendation import Recommendation, recommend
from aimgpu.kubernetes.cluster.timeslicing.sharing_manifest import SharingSettings, config_map, plugin_config
from aimgpu.kubernetes.cluster.timeslicing.verification import PodTrial, Verified, verify
from aimgpu.sizing import ENGINES
from aimgpu.units import format_bytes, parse_bytes

PAUSE_IMAGE = "registry.k8s.io/pause:3.10"  # runs on nearly every cluster already
_STYLES = {SlicingHealth.OK: "green", SlicingHealth.WARNING: "yellow", SlicingHealth.PROBLEM: "red"}


def _options(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_sizing = _options(
    click.argument("models", nargs=-1),
    click.option("--gpu", help="A product such as H100-80 or MI300X. [the machine's own, else MI300X]"),
    click.option("--memory", help="Of one GPU instead, such as 80GiB."),
    click.option("--engine", type=click.Choice(ENGINES), default="ollama", show_default=True),
    click.option("--precision", help="Of the weights, such as q4_k_m or fp16. [q4_k_m for ollama, as published for others]"),
    click.option("--context", type=int, help="Tokens of one request. [8192, or what the model allows]"),
    click.option("--concurrency", type=int, default=1, show_default=True, help="Requests at once in one pod."),
)
_sharing = _options(
    click.option("--replicas", type=int, help="Of each GPU. [as recommended for MODELS]"),
    click.option(
        "--plugin", type=click.Choice(sorted(KINDS)), default="nvidia", show_default=True, help="Whose device plugin."
    ),
    click.option("--resource", help="To divide. [nvidia.com/gpu; amd.com/gpu for our plugin]"),
    click.option("--rename", is_flag=True, help="Advertise RESOURCE.shared."),
    click.option("--several", is_flag=True, help="Let a container ask for more than one replica, which gives it no more."),
    click.option("--enforced", is_flag=True, help="Hold each replica to its part (our plugin; NVIDIA's ignores it)."),
    click.option("--namespace", help="Of the plugin. [where its DaemonSet is]"),
    click.option("--key", default=None, help="Of the ConfigMap. [shareREPLICAS]"),
)
_target = _options(
    click.option(
        "--plugin", type=click.Choice(sorted(KINDS)), default="nvidia", show_default=True, help="Whose device plugin."
    ),
    click.option("--namespace", help="Of the plugin. [where its DaemonSet is]"),
    click.option("--node", "nodes", multiple=True, help="A node; may be repeated. [all with GPUs]"),
)


@click.group(
    epilog=examples(
        "aimgpu timeslicing recommend Qwen/Qwen2.5-7B-Instruct --gpu H100-80",
        "aimgpu timeslicing render --replicas 4 > time-slicing.yaml",
        "aimgpu timeslicing apply --replicas 4 --node gpu-node-1",
        "aimgpu timeslicing verify && aimgpu timeslicing doctor",
    )
)
def timeslicing() -> None:
    """Time-sliced GPUs of a Kubernetes cluster, with NVIDIA's device plugin or ours.

    Time-slicing alone isolates nothing: each pod can take all of the GPU. Our node agent as the plugin caps each replica.
    """


@timeslicing.command(
    "recommend",
    epilog=examples(
        "aimgpu timeslicing recommend Qwen/Qwen2.5-7B-Instruct --gpu H100-80",
        "aimgpu timeslicing recommend Qwen/Qwen2.5-0.5B-Instruct HuggingFaceTB/SmolLM2-135M-Instruct --memory 24GiB --json",
    ),
)
@_sizing
@json_option
def recommend_command(models: Sequence[str], *, as_json: bool, **sizing: Any) -> None:  # noqa: ANN401 - click
    """How many replicas of a GPU suit MODELS, and why."""
    found = _recommend(models, **sizing)
    if as_json:
        print_json({**asdict(found), "isolation": ISOLATION})
        return
    if found.replicas is None:
        click.echo(f"Do not time-slice a GPU of {format_bytes(found.gpu_memory_bytes)} for these models.")
    else:
        click.echo(f"{found.replicas} replicas of each GPU; OLLAMA_MAX_LOADED_MODELS={found.max_loaded_models} in each pod.")
    for reason in found.reasons:
        click.echo(f"- {reason}")
    click.echo(ISOLATION)


@timeslicing.command(
    epilog=examples(
        "aimgpu timeslicing render --replicas 4",
        "aimgpu timeslicing render Qwen/Qwen2.5-7B-Instruct --gpu H100-80 --plugin aim --resource nvidia.com/gpu --enforced",
    )
)
@_sizing
@_sharing
@json_option
def render(models: Sequence[str], *, as_json: bool, namespace: str | None, key: str | None, **options: Any) -> None:  # noqa: ANN401
    """Print the ConfigMap that the device plugin reads."""
    kind = KINDS[options["plugin"]]
    settings = _settings(models, options)
    name = key or f"share{settings.replicas}"
    made = config_map(kind.config_map, namespace or kind.namespace, {name: plugin_config(settings)})
    if as_json:
        print_json(made)
    else:
        click.echo(yaml.dump(made, Dumper=_BlockDumper, sort_keys=False), nl=False)


@timeslicing.command(
    epilog=examples(
        "aimgpu timeslicing apply --replicas 4 --node gpu-node-1 --dry-run",
        "aimgpu timeslicing apply Qwen/Qwen2.5-7B-Instruct --gpu H100-80 --yes",
        "aimgpu timeslicing apply --plugin aim --replicas 4 --enforced",
        "aimgpu timeslicing apply --undo",
    )
)
@_sizing
@_sharing
@click.option("--node", "nodes", multiple=True, help="A node to label; may be repeated. [all with GPUs]")
@click.option("--default", "as_default", is_flag=True, help="Also for nodes without a label (ClusterPolicy).")
@click.option("--undo", is_flag=True, help="Put everything back as it was before the last apply.")
@click.option("--dry-run", is_flag=True, help="Show the difference and change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@connection_options
@json_option
def apply(
    models: Sequence[str], *, as_json: bool, undo: bool, dry_run: bool, yes: bool, cluster: ClusterTarget, **options: Any,  # noqa: ANN401
) -> int:  # fmt: skip
    """Write the ConfigMap, label the nodes, patch the ClusterPolicy, and restart the plugin where its text changed."""
    settings = None if undo else _settings(models, options)

    async def change(client: Client, _namespace: str) -> int:
        where, before, after = await _find_change(client, settings, options)
        lines = show_difference(where.kind, where.namespace, before, after)
        ask = lines and not dry_run and not yes and not as_json and is_terminal()
        if lines and not as_json:
            click.echo("\n".join(lines))
        if ask and not click.confirm("Change this?"):
            return 1
        restarted = False
        if lines and not dry_run:
            restarted = await write_setup(client, where, before, after, undo=undo)
        _report_change(lines, restarted=restarted, dry_run=dry_run, as_json=as_json, follows=where.kind.follows)
        return 0

    return in_cluster(cluster, change)


@timeslicing.command(
    "verify",
    epilog=examples("aimgpu timeslicing verify", "aimgpu timeslicing verify --plugin aim --node gpu-node-1 --no-pod --json"),
)
@_target
@click.option("--image", default=PAUSE_IMAGE, show_default=True, help="Of the test pod.")
@click.option("--pod-namespace", default="default", show_default=True, help="Of the test pod.")
@click.option("--no-pod", is_flag=True, help="Look at the nodes only.")
@click.option("--timeout", type=FiniteRange(min=0, max=86_400.0), default=120.0, show_default=True, help="Seconds.")
@connection_options
@json_option
def verify_command(
    plugin: str, namespace: str | None, nodes: Sequence[str], *, image: str, pod_namespace: str, no_pod: bool, timeout: float,
    cluster: ClusterTarget, as_json: bool,
) -> int:  # fmt: skip
    """Whether the nodes advertise their replicas and a pod gets one. Exit status 1 where not."""

    async def look(client: Client, _namespace: str) -> list[Verified]:
        where, names = await _find_target(client, plugin, namespace, nodes)
        trial = None if no_pod else PodTrial(image=image, namespace=pod_namespace)
        return await verify(client, where, names, trial=trial, timeout_seconds=timeout)

    found = in_cluster(cluster, look)
    if as_json:
        print_json([{**asdict(each), "good": each.good} for each in found])
    else:
        for each in found:
            _print_verified(each)
    return 0 if all(each.good for each in found) else 1


@timeslicing.command(epilog=examples("aimgpu timeslicing doctor", "aimgpu timeslicing doctor --plugin aim --json"))
@_target
@connection_options
@json_option
def doctor(plugin: str, namespace: str | None, nodes: Sequence[str], *, cluster: ClusterTarget, as_json: bool) -> int:
    """Plugin and its log, ConfigMap, labels, allocatable, pending pods, sharers, isolation. Exit status 1 for a problem."""

    async def look(client: Client, _namespace: str) -> list[Any]:
        where, names = await _find_target(client, plugin, namespace, nodes)
        return list(await diagnose(client, where, names))

    found = in_cluster(cluster, look)
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        rows = [[each.check, Cell(each.health.value, _STYLES[each.health]), each.text] for each in found]
        print_table(["check", "", Column("found")], rows)
        for hint in dict.fromkeys(each.hint for each in found if each.hint):
            click.echo(f"hint: {hint}")
    return 1 if any(each.health is SlicingHealth.PROBLEM for each in found) else 0


def _recommend(models: Sequence[str], *, gpu: str | None, memory: str | None, **sizing: Any) -> Recommendation:  # noqa: ANN401
    sized, device_bytes = size_models(models, gpu=gpu, **sizing)
    return recommend(sized, parse_bytes(memory) if memory else device_bytes)


def _settings(models: Sequence[str], options: dict[str, Any]) -> SharingSettings:
    sizing = {name: options[name] for name in ("gpu", "memory", "engine", "precision", "context", "concurrency")}
    replicas = options["replicas"]
    if replicas is None and not models:
        hint = "Name the models to size it for, or how many: `aimgpu timeslicing render --replicas 4`."
        raise InvalidInput("neither --replicas nor a model is given", hint=hint)
    if replicas is None:
        found = _recommend(models, **sizing)
        if found.replicas is None:
            raise InvalidInput(
                f"time-slicing is not recommended for these models: {found.reasons[-1]}", hint="Or give --replicas."
            )
        replicas = found.replicas
    return SharingSettings(
        resource=options["resource"] or KINDS[options["plugin"]].resource,
        replicas=replicas,
        rename=options["rename"],
        several=options["several"],
        enforced=options["enforced"],
    )


async def _find_change(
    client: Client, settings: SharingSettings | None, options: dict[str, Any]
) -> tuple[Installation, PluginSetup, PluginSetup]:
    """Where, what is there, and what is wanted; without settings what was there before the last change."""
    kind = KINDS[options["plugin"]]
    where = await find_installation(client, kind, options["namespace"])
    if settings is None:
        after = await read_undo(client, where)
        return where, await read_setup(client, where, list(after.labels)), after
    nodes = [node["metadata"]["name"] for node in await find_nodes(client, kind, options["nodes"])]
    before = await read_setup(client, where, nodes)
    key = options["key"] or f"share{settings.replicas}"
    after = with_sharing(before, key, plugin_config(settings), kind.config_map, default=options["as_default"])
    return where, before, replace(after)


async def _find_target(
    client: Client, plugin: str, namespace: str | None, nodes: Sequence[str]
) -> tuple[Installation, list[str]]:
    kind = KINDS[plugin]
    where = await find_installation(client, kind, namespace)
    return where, [node["metadata"]["name"] for node in await find_nodes(client, kind, nodes)]


def _report_change(lines: Sequence[str], *, restarted: bool, dry_run: bool, as_json: bool, follows: bool) -> None:
    if as_json:
        print_json(
            {"changed": bool(lines) and not dry_run, "diff": list(lines), "restarted": restarted, "isolation": ISOLATION}
        )
        return
    if not lines:
        click.echo("Nothing to change.")
    elif dry_run:
        click.echo("Nothing was changed (--dry-run).")
    else:
        plugin = f"{NVIDIA.daemon_set} restarts" if restarted else "no plugin had to be restarted"
        option = " --plugin aim" if follows else ""
        click.echo(f"Changed; {'the node agent follows by itself' if follows else plugin}.")
        click.echo(f"Wait for it and run a pod: aimgpu timeslicing verify{option}")
    click.echo(ISOLATION)


def _print_verified(each: Verified) -> None:
    seen = each.replicas
    expected = seen.expected if seen.expected is not None else f"a multiple of {seen.replicas}"
    word = "ok" if seen.right else "wrong"
    click.echo(f"{seen.node}: {seen.allocatable} {seen.resource} allocatable, expected {expected}: {word}")
    if each.pod:
        click.echo(f"{seen.node}: {each.pod}")


class _BlockDumper(yaml.SafeDumper):
    """Texts of several lines as blocks, as people write them."""


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _block_text)
