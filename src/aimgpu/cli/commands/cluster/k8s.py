"""`aimgpu k8s`: one model or the web chat on a cluster, what is there, and taking it away."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import click

from aimgpu.cli.cluster_options import ClusterTarget, cluster_options, connection_options
from aimgpu.cli.commands.cluster.connection import in_cluster
from aimgpu.cli.commands.cluster.serving import (
    ClusterUp,
    manifest_text,
    print_change,
    print_models,
    up_in_cluster,
)
from aimgpu.cli.commands.machine.doctor import show_report
from aimgpu.cli.options import FiniteRange
from aimgpu.cli.output import examples, json_option, print_json, print_table
from aimgpu.cli.stack_source import name_of, parse_source
from aimgpu.cli.verify import VerifyReport
from aimgpu.errors import ClusterFailed, InvalidInput, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import DEPLOYMENTS
from aimgpu.kubernetes.cluster.node_trial import try_node
from aimgpu.kubernetes.cluster.placer.ungating import ungate_pods
from aimgpu.kubernetes.models.serving.applier import AppliedObject, StackApplier
from aimgpu.kubernetes.models.serving.cluster_view import GATEWAY_SELECTOR, ClusterView, find_installed_image
from aimgpu.kubernetes.models.serving.engine_container import require_own_image
from aimgpu.kubernetes.models.serving.key_secret import find_gateway_namespace
from aimgpu.kubernetes.models.serving.scheduling_notes import describe_missing_classes, describe_slow_scheduling
from aimgpu.kubernetes.models.serving.unshared_pods import describe_unshared_pods
from aimgpu.kubernetes.models.serving.web_chat import NAME as WEB_CHAT
from aimgpu.kubernetes.models.serving.web_chat import SELECTOR, ensure_key, forget_key, render_web_chat
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES
from aimgpu.sizing import ENGINES

_WEB = "web"
_FORBIDDEN = 403


@click.group(
    epilog=examples(
        "aimgpu k8s deploy Qwen/Qwen2.5-7B-Instruct --engine vllm",
        "aimgpu k8s deploy web",
        "aimgpu k8s status",
        "aimgpu k8s cleanup --dry-run",
    )
)
def k8s() -> None:
    """One model, or the web chat, on a Kubernetes cluster; for several models use `aimgpu up --on kubernetes`."""


@k8s.command(
    epilog=examples(
        "aimgpu k8s deploy Qwen/Qwen2.5-7B-Instruct --engine vllm --memory 24GiB",
        "aimgpu k8s deploy smollm2 --name chat --cache 5Gi",
        "aimgpu k8s deploy smollm2 --dry-run",
        "aimgpu k8s deploy web     # a page to chat with the models",
    )
)
@click.argument("what", metavar="MODEL|web")
@click.option("--name", help="What callers name it. [the end of the model's name]")
@click.option("--engine", type=click.Choice(ENGINES), help="[llamacpp]")
@click.option("--memory", help="Of a GPU, such as 24GiB. [sized by the model]")
@click.option("--fraction", help="Of a GPU, such as 0.5.")
@click.option("--context", "tokens", type=click.IntRange(1), help="Tokens of one request.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests at once.")
@click.option("--replicas", type=click.IntRange(1), help="Copies. [1]")
@click.option("--keep", help="Scale to zero when idle for so long, such as 10m. [always]")
@click.option("--cache", help="Keep downloaded models in a volume of this size, such as 50Gi. [they go with the pod]")
@click.option("--image", help="Of the engine, or of the web chat. [vLLM's or Ollama's own, else that of the chart]")
@click.option("--vendor", type=click.Choice(("amd", "nvidia")), help="Whose images. [that of the cluster's GPUs]")
@click.option("--pull-policy", type=click.Choice(("Always", "IfNotPresent", "Never")), help="Of images. [the cluster's]")
@click.option("--dry-run", is_flag=True, help="Show what would be applied, change nothing.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the model is ready.")
@cluster_options
@json_option
def deploy(what: str, cluster: ClusterTarget, as_json: bool, **options: Any) -> int:  # noqa: ANN401 - click's
    """Apply a Deployment and a Service for MODEL, or the web chat, and show them. Running it twice changes nothing."""
    asked = ClusterUp(
        dry_run=options["dry_run"],
        detach=not options["wait"],
        as_json=as_json,
        vendor=options["vendor"],
        pull_policy=options["pull_policy"],
        cache=options["cache"],
        show=True,
    )
    if what == _WEB:
        return in_cluster(cluster, lambda client, namespace: _deploy_web(client, namespace, asked, options["image"]))
    if options["memory"] and options["fraction"]:
        raise InvalidInput("--memory and --fraction are both given", hint="Give one of them.")
    return up_in_cluster(cluster, parse_source(_stack_text(what, options), "the command line", Path.cwd()).stack, asked)


def _stack_text(model: str, options: dict[str, Any]) -> str:
    fields: dict[str, Any] = {"model": model}
    if options["tokens"]:
        fields["context"] = options["tokens"]
    for key in ("engine", "concurrency", "replicas", "keep", "image"):
        if options[key]:
            fields[key] = options[key]
    gpu = {key: options[key] for key in ("memory", "fraction") if options[key]}
    if gpu:
        fields["gpu"] = gpu
    return dumps({"models": {options["name"] or name_of(model): fields}})


async def _deploy_web(client: Client, namespace: str, asked: ClusterUp, image: str | None) -> int:
    gateway_namespace = await find_gateway_namespace(client)
    gateway = f"http://aim-gpu-sharing-gateway.{gateway_namespace}.svc"
    own = require_own_image(image or await find_installed_image(client))
    manifests = render_web_chat(own, gateway, asked.pull_policy)
    if not asked.as_json:
        click.echo(manifest_text([one for one in manifests if one["kind"] != "ConfigMap"]))
    made = False if asked.dry_run else await ensure_key(client, namespace, gateway_namespace)
    changes = []
    async for one in StackApplier(client, namespace).apply(manifests, dry_run=asked.dry_run):
        changes.append(one)
        print_change(one, asked)
    if asked.as_json:
        print_json({"namespace": namespace, "changes": [asdict(one) for one in changes], "key_made": made})
    elif not asked.dry_run:
        click.echo(f"Open it: kubectl -n {namespace} port-forward service/{WEB_CHAT} 8000:80, then http://127.0.0.1:8000")
        click.echo("It asks for no password: give its Service a way in from outside only behind something that does.", err=True)
    return 0


@k8s.command(epilog=examples("aimgpu k8s status", "aimgpu k8s status --json --namespace models"))
@cluster_options
@json_option
def status(cluster: ClusterTarget, as_json: bool) -> None:
    """Nodes with GPUs, gateways, and the models of the namespace."""
    found = in_cluster(cluster, _read_status)
    if as_json:
        print_json(found)
        return
    for note in found["notes"]:
        click.secho(f"note: {note}", fg="yellow", err=True)
    if found["nodes"]:
        columns = ("name", "gpus", "layouts", "granted")
        print_table(["NODE", "GPUS", "LAYOUT", "GRANTED"], [[one[name] for name in columns] for one in found["nodes"]])
    ready = found["gateways"]
    click.echo(f"Gateways: {ready['ready']} of {ready['wanted']} ready" if ready["wanted"] else "Gateways: none is installed")
    print_models(found)


async def _read_status(client: Client, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = await ClusterView(client, namespace).read_status()
    notes = await describe_unshared_pods(client, namespace)
    notes += [*await describe_missing_classes(client), *await describe_slow_scheduling(client)]
    nodes: list[dict[str, str]] = []
    wanted = ready = 0
    try:
        nodes = [_describe_node(one) for one in (await client.list(GPU_NODES))[0]]
        if not nodes:
            notes.append("no node agent has reported a GPU yet")
    except NotFoundInCluster:
        notes.append("AIM GPU Sharing is not installed in this cluster: install the chart")
    except ClusterFailed as error:
        if error.status != _FORBIDDEN:
            raise
        notes.append("you may not list GpuNodes")
    try:
        for one in (await client.list(DEPLOYMENTS, labels=GATEWAY_SELECTOR))[0]:
            wanted += int(one["spec"].get("replicas") or 0)
            ready += int((one.get("status") or {}).get("readyReplicas") or 0)
    except ClusterFailed as error:
        if error.status != _FORBIDDEN:
            raise
        notes.append("you may not list Deployments of other namespaces")
    return {**found, "nodes": nodes, "gateways": {"ready": ready, "wanted": wanted}, "notes": notes}


def _describe_node(node: dict[str, Any]) -> dict[str, str]:
    status = node.get("status") or {}
    gpus = status.get("gpus") or ()
    products = [str(gpu.get("product")) + (" (simulated)" if gpu.get("simulated") else "") for gpu in gpus]
    counted = ", ".join(f"{products.count(one)} x {one}" for one in dict.fromkeys(products))
    layouts = ", ".join(dict.fromkeys(str(gpu.get("layout")) for gpu in gpus))
    granted = str(status.get("memoryGranted") or "-")
    return {"name": str(node["metadata"]["name"]), "gpus": counted or "-", "layouts": layouts or "-", "granted": granted}


@k8s.command("verify-node", epilog=examples("aimgpu k8s verify-node gpu-1", "aimgpu k8s verify-node gpu-1 --json"))
@click.argument("node", metavar="NODE")
@click.option("--timeout", "seconds", type=FiniteRange(1), default=300.0, show_default=True, help="For the pod, in seconds.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("aimgpu-verify.json"),
    show_default=True,
    help="The file to write, with a recording of the GPUs that names neither machine nor user.",
)
@connection_options
@json_option
def verify_node(cluster: ClusterTarget, node: str, seconds: float, report: Path, as_json: bool) -> int:
    """Try on NODE what the node agent needs: device nodes, /sys, dmem, NVML, the interposer, CU masks. Changes nothing.

    A pod with the image and the rights of the installed agent does it, and is removed. GPUs in use run no program.
    """
    found = in_cluster(cluster, lambda client, _: try_node(client, node, timeout_seconds=seconds))
    return show_report(VerifyReport.from_json(found), report, as_json=as_json)


@k8s.command(epilog=examples("aimgpu k8s cleanup --dry-run", "aimgpu k8s cleanup", "aimgpu k8s cleanup --caches"))
@click.option("--caches", is_flag=True, help="Also remove the volumes with downloaded models.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, change nothing.")
@cluster_options
@json_option
def cleanup(cluster: ClusterTarget, caches: bool, dry_run: bool, as_json: bool) -> None:
    """Remove every model and the web chat of the namespace. Volumes with downloaded models stay unless --caches is given."""

    async def work(client: Client, namespace: str) -> tuple[str, list[AppliedObject]]:
        applier, asked = StackApplier(client, namespace), ClusterUp(as_json=as_json, dry_run=dry_run)
        removed = []
        async for one in applier.remove_all(SELECTOR, caches=caches, dry_run=dry_run):
            removed.append(one)
            print_change(one, asked)
        if not dry_run and any(one.name == WEB_CHAT for one in removed):
            await forget_key(client, namespace, await find_gateway_namespace(client))
        return namespace, removed

    namespace, removed = in_cluster(cluster, work)
    if as_json:
        print_json({"namespace": namespace, "changes": [asdict(one) for one in removed]})
    elif not removed:
        click.echo(f"There is nothing of aimgpu in namespace {namespace}.")


@k8s.command(epilog=examples("aimgpu k8s ungate --namespace team-a", "aimgpu k8s ungate --all-namespaces"))
@click.option("--all-namespaces", is_flag=True, help="Pods of every namespace.")
@cluster_options
@json_option
def ungate(cluster: ClusterTarget, all_namespaces: bool, as_json: bool) -> None:
    """Let pods go that wait to be placed, for when no operator runs any more: kube-scheduler takes them."""

    async def work(client: Client, namespace: str) -> list[tuple[str, str]]:
        return await ungate_pods(client, None if all_namespaces else namespace)

    found = in_cluster(cluster, work)
    if as_json:
        print_json({"pods": [{"namespace": namespace, "name": name} for namespace, name in found]})
        return
    for namespace, name in found:
        click.echo(f"pod {namespace}/{name} is let go")
    if not found:
        click.echo("No pod waits to be placed.")
