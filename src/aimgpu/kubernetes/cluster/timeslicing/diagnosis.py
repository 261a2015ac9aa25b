"""What is wrong with time-slicing in a cluster: the checks that one would do by hand, in that order."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from aimgpu.errors import ClusterFailed, InvalidInput
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import CONFIG_MAPS, NODES, PODS
from aimgpu.kubernetes.cluster.operator.pod_gpus import limits_of
from aimgpu.kubernetes.cluster.timeslicing.installation import Installation, has_gpus, read_setup
from aimgpu.kubernetes.cluster.timeslicing.node_replicas import NodeReplicas, node_replicas
from aimgpu.kubernetes.cluster.timeslicing.plugin_setup import AIM, PluginSetup
from aimgpu.kubernetes.cluster.timeslicing.recommendation import MOST_REPLICAS
from aimgpu.kubernetes.cluster.timeslicing.verification import why_not_running
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES
from aimgpu.kubernetes.vocabulary.names import LABEL_MANAGED, OFFERED_HERE_ONLY, RESOURCES_OFFERED
from aimgpu.kubernetes.vocabulary.sharing_config import parse_config, unread_fields

_LOG_LINES = 200
_MOST_QUOTED = 3
_COMPLAINT = re.compile(r"\b(error|failed|fatal|panic|unable|cannot|refused|warning)\b", re.IGNORECASE)
_GPU_NODE_HINTS = {
    OFFERED_HERE_ONLY: "Remove the other plugin or driver from this node.",
    RESOURCES_OFFERED: "Give all its GPUs one layout, or choose the strategy `mixed` in the configuration.",
}


class SlicingHealth(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingFinding:
    """One check, what it found and what to do about it."""

    check: str
    health: SlicingHealth
    text: str
    hint: str | None = None


async def diagnose(client: Client, where: Installation, nodes: Sequence[str]) -> list[SlicingFinding]:
    """Every check, also those that found nothing wrong."""
    setup = await read_setup(client, where, nodes)
    objects = list(await asyncio.gather(*(client.get(NODES, name) for name in nodes)))
    pods, _ = await client.list(PODS)
    found = [*_check_daemon_set(where), *await _check_logs(client, where)]
    found += [*_check_config(setup, where), *await _check_elsewhere(client, setup, where)]
    found += [*_check_policy(setup, where), *_check_labels(setup, where), *await _check_idle_labels(client, where, nodes)]
    found += await _check_gpu_nodes(client, where, nodes)
    replicas = list(_readable_replicas(objects, setup, where))
    for each in replicas:
        found += [*_check_replicas(each), *_check_sharers(each, pods)]
    found += [*_check_pending(pods, {each.resource for each in replicas} or {where.kind.resource}), *_check_isolation(objects)]
    return found


def _check_daemon_set(where: Installation) -> Iterator[SlicingFinding]:
    name = f"{where.kind.daemon_set} ({where.namespace})"
    if where.daemon_set is None:
        yield SlicingFinding(
            check="plugin", health=SlicingHealth.WARNING, text=f"no DaemonSet {name}: the plugin's pods are not checked"
        )
        return
    status = where.daemon_set.get("status") or {}
    ready, wanted = int(status.get("numberReady") or 0), int(status.get("desiredNumberScheduled") or 0)
    if wanted and ready == wanted:
        yield SlicingFinding(check="plugin", health=SlicingHealth.OK, text=f"{name}: {ready} of {wanted} pods are ready")
    else:
        hint = f"kubectl describe daemonset {where.kind.daemon_set} --namespace {where.namespace}"
        yield SlicingFinding(
            check="plugin", health=SlicingHealth.PROBLEM, text=f"{name}: {ready} of {wanted} pods are ready", hint=hint
        )


async def _check_logs(client: Client, where: Installation) -> list[SlicingFinding]:
    if not where.selector:
        return []
    pods, _ = await client.list(PODS, where.namespace, labels=where.selector)
    found = []
    for pod in pods:
        name = pod["metadata"]["name"]
        complaints = [line for line in await _read_log(client, pod) if _COMPLAINT.search(line)]
        if complaints:
            quoted = "; ".join(line.strip()[:200] for line in complaints[-_MOST_QUOTED:])
            hint = f"kubectl logs {name} --namespace {where.namespace}"
            found.append(SlicingFinding(check="plugin logs", health=SlicingHealth.WARNING, text=f"{name}: {quoted}", hint=hint))
        else:
            found.append(
                SlicingFinding(check="plugin logs", health=SlicingHealth.OK, text=f"{name}: no complaint in its last lines")
            )
    return found


async def _read_log(client: Client, pod: Object) -> list[str]:
    containers = [each["name"] for each in pod["spec"]["containers"]]
    path = PODS.path(pod["metadata"]["namespace"], pod["metadata"]["name"], "log")
    lines: list[str] = []
    for container in containers:
        try:
            query = {"container": container, "tailLines": str(_LOG_LINES)}
            lines += [line async for line in client.read_lines(path, query)]
        except ClusterFailed as error:
            lines.append(f"error: its log cannot be read: {error.message}")
    return lines


def _check_config(setup: PluginSetup, where: Installation) -> Iterator[SlicingFinding]:
    name = f"configmap {where.kind.config_map} ({where.namespace})"
    if setup.config is None:
        hint = "`aimgpu timeslicing apply` makes it."
        yield SlicingFinding(check="configmap", health=SlicingHealth.PROBLEM, text=f"there is no {name}", hint=hint)
        return
    for key, text in sorted(setup.config.items()):
        try:
            shared = parse_config(text).replicated
        except InvalidInput as error:
            yield SlicingFinding(
                check="configmap", health=SlicingHealth.PROBLEM, text=f"{name}, key {key}: {error.message}", hint=error.hint
            )
            continue
        what = ", ".join(f"{each.replicas} replicas of {each.name}" for each in shared) or "nothing is shared"
        yield SlicingFinding(check="configmap", health=SlicingHealth.OK, text=f"{name}, key {key}: {what}")
        for trouble in unread_fields(text):
            yield SlicingFinding(
                check="configmap",
                health=SlicingHealth.PROBLEM,
                text=f"{name}, key {key}: {trouble}",
                hint="The plugin ignores it without a message: remove it, or put it where it belongs.",
            )


async def _check_elsewhere(client: Client, setup: PluginSetup, where: Installation) -> list[SlicingFinding]:
    """A ConfigMap of this name where the plugin does not look."""
    if setup.config is not None:
        return []
    found, _ = await client.list(CONFIG_MAPS, fields=f"metadata.name={where.kind.config_map}")
    return [
        SlicingFinding(
            check="configmap",
            health=SlicingHealth.PROBLEM,
            text=f"configmap {where.kind.config_map} is in namespace {item['metadata']['namespace']}, "
            f"and the plugin reads that of namespace {where.namespace}",
            hint=f"Make it in {where.namespace}: `aimgpu timeslicing apply`.",
        )
        for item in found
    ]


async def _check_idle_labels(client: Client, where: Installation, nodes: Sequence[str]) -> list[SlicingFinding]:
    """Nodes that choose a configuration and have no GPU for it."""
    found, _ = await client.list(NODES, labels=where.kind.label)
    return [
        SlicingFinding(
            check="node label",
            health=SlicingHealth.WARNING,
            text=f"{item['metadata']['name']} has the label {where.kind.label} and no GPU for this plugin",
            hint=f"kubectl label node {item['metadata']['name']} {where.kind.label}-",
        )
        for item in found
        if item["metadata"]["name"] not in nodes and not has_gpus(item, where.kind)
    ]


async def _check_gpu_nodes(client: Client, where: Installation, nodes: Sequence[str]) -> list[SlicingFinding]:
    """What our own plugin reports itself, such as why it offers nothing."""
    if where.kind is not AIM:
        return []
    try:
        found, _ = await client.list(GPU_NODES)
    except ClusterFailed:  # not made, or not ours to see
        return []
    return [
        SlicingFinding(
            check="gpu node",
            health=SlicingHealth.PROBLEM,
            text=f"{item['metadata']['name']}: {one['message']}",
            hint=_GPU_NODE_HINTS[one["type"]],
        )
        for item in found
        if item["metadata"]["name"] in nodes
        for one in (item.get("status") or {}).get("conditions") or ()
        if one["type"] in _GPU_NODE_HINTS and one["status"] == "False"
    ]


def _check_policy(setup: PluginSetup, where: Installation) -> Iterator[SlicingFinding]:
    if setup.policy is None:
        return
    named = setup.policy.get("name")
    default = setup.policy.get("default")
    if default and default not in (setup.config or {}):
        yield SlicingFinding(
            check="clusterpolicy",
            health=SlicingHealth.PROBLEM,
            text=f"{where.policy} has the default {default}, which is not a key of the ConfigMap",
            hint=f"`aimgpu timeslicing apply` corrects it; keys: {', '.join(sorted(setup.config or {})) or 'none'}.",
        )
    if named == where.kind.config_map:
        yield SlicingFinding(check="clusterpolicy", health=SlicingHealth.OK, text=f"{where.policy} names configmap {named}")
    else:
        yield SlicingFinding(
            check="clusterpolicy",
            health=SlicingHealth.PROBLEM,
            text=f"{where.policy} names configmap {named or 'none'}, not {where.kind.config_map}",
            hint="`aimgpu timeslicing apply` patches spec.devicePlugin.config.",
        )


def _check_labels(setup: PluginSetup, where: Installation) -> Iterator[SlicingFinding]:
    keys = sorted(setup.config or {})
    for node, value in setup.labels.items():
        if value is None:
            chosen = (setup.policy or {}).get("default")
            health, text = SlicingHealth.PROBLEM, f"{node} has no label {where.kind.label}"
            if chosen in keys:
                health, text = SlicingHealth.OK, f"{node} has no label {where.kind.label}: the default {chosen} holds"
        elif value in keys:
            health, text = SlicingHealth.OK, f"{node}: {where.kind.label}={value}"
        else:
            health, text = SlicingHealth.PROBLEM, f"{node}: {where.kind.label}={value} is not a key of the ConfigMap"
        hint = (
            None
            if health is SlicingHealth.OK
            else f"kubectl label node {node} --overwrite {where.kind.label}=KEY; keys: {', '.join(keys) or 'none'}"
        )
        yield SlicingFinding(check="node label", health=health, text=text, hint=hint)


def _readable_replicas(objects: Sequence[Object], setup: PluginSetup, where: Installation) -> Iterator[NodeReplicas]:
    for node in objects:
        key = setup.labels.get(node["metadata"]["name"]) or (setup.policy or {}).get("default") or ""
        text = (setup.config or {}).get(key)
        if text is None:
            continue
        try:
            yield node_replicas(node, text, where.kind)
        except InvalidInput:
            continue  # reported with the ConfigMap


def _check_replicas(each: NodeReplicas) -> Iterator[SlicingFinding]:
    expected = f"{each.expected}" if each.expected is not None else f"a multiple of {each.replicas}"
    text = f"{each.node} advertises {each.allocatable} {each.resource}, expected {expected}"
    if each.right:
        yield SlicingFinding(check="allocatable", health=SlicingHealth.OK, text=text)
    else:
        hint = "A plugin that has read an older text of the key must be restarted: `aimgpu timeslicing apply`, or see its log."
        yield SlicingFinding(check="allocatable", health=SlicingHealth.PROBLEM, text=text, hint=hint)


def _check_sharers(each: NodeReplicas, pods: Sequence[Object]) -> Iterator[SlicingFinding]:
    here = [pod for pod in pods if pod["spec"].get("nodeName") == each.node and _wants(pod, {each.resource}) and _active(pod)]
    held = sum(limits_of(pod)[each.resource] for pod in here)
    gpus = each.gpus or max(each.allocatable // each.replicas, 1)
    text = f"{each.node}: {len(here)} pods on {gpus} {'GPU' if gpus == 1 else 'GPUs'}, {each.replicas} replicas of each"
    if held > gpus * each.replicas:
        text += f"; they hold {held} replicas, as they started under another configuration"
        hint = f"Delete {held - gpus * each.replicas} of them: until then the others have less than they were promised."
        yield SlicingFinding(check="sharers", health=SlicingHealth.WARNING, text=text, hint=hint)
    elif each.replicas <= MOST_REPLICAS:
        yield SlicingFinding(check="sharers", health=SlicingHealth.OK, text=text)
    else:
        hint = f"More than {MOST_REPLICAS} wait too long for their turn: `aimgpu timeslicing recommend MODEL...`."
        yield SlicingFinding(check="sharers", health=SlicingHealth.WARNING, text=text, hint=hint)


def _check_pending(pods: Sequence[Object], resources: set[str]) -> Iterator[SlicingFinding]:
    pending = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Pending" and _wants(pod, resources)]
    for pod in pending:
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        text = f"{name} is pending: {why_not_running(pod.get('status') or {})}"
        hint = "Delete pods that hold replicas, raise the replicas, or add a node."
        yield SlicingFinding(check="pending pods", health=SlicingHealth.PROBLEM, text=text, hint=hint)
    if not pending:
        yield SlicingFinding(
            check="pending pods", health=SlicingHealth.OK, text=f"no pod waits for {', '.join(sorted(resources))}"
        )


def _check_isolation(objects: Sequence[Object]) -> Iterator[SlicingFinding]:
    for node in objects:
        name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
        if labels.get(LABEL_MANAGED) == "true":
            text = f"{name}: the node agent caps the memory of each replica where it can; AIMGPU_LEVEL in a pod reports how"
            yield SlicingFinding(check="isolation", health=SlicingHealth.OK, text=text)
        else:
            yield SlicingFinding(
                check="isolation",
                health=SlicingHealth.WARNING,
                text=f"{name}: nothing isolates the pods of a GPU: any of them can take all of its memory and compute",
                hint="Run the node agent of AIM GPU Sharing as the device plugin there, or use claims.",
            )


def _wants(pod: Object, resources: set[str]) -> bool:
    return bool(resources & set(limits_of(pod)))


def _active(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
