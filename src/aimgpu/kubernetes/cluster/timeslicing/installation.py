"""The device plugin of a cluster: found, read, changed as a whole, and put back as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from aimgpu.errors import InvalidInput, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import CLUSTER_POLICIES, CONFIG_MAPS, DAEMON_SETS, NODES
from aimgpu.kubernetes.cluster.timeslicing.plugin_setup import PluginKind, PluginSetup, needs_restart
from aimgpu.kubernetes.cluster.timeslicing.sharing_manifest import config_map
from aimgpu.kubernetes.vocabulary.names import GROUP

UNDO = f"{GROUP}/time-slicing-undo"  # annotation of the ConfigMap: the setup before the last change
_MANAGER = "aimgpu-timeslicing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Where the plugin of a cluster is."""

    kind: PluginKind
    namespace: str
    daemon_set: Object | None  # None: it was not found, and the namespace was given
    policy: str | None  # name of the ClusterPolicy

    @property
    def selector(self) -> str:
        labels = ((self.daemon_set or {}).get("spec") or {}).get("selector", {}).get("matchLabels") or {}
        return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


async def find_installation(client: Client, kind: PluginKind, namespace: str | None = None) -> Installation:
    """Raises InvalidInput where the plugin is not found and no namespace is given."""
    found, _ = await client.list(DAEMON_SETS, namespace, fields=f"metadata.name={kind.daemon_set}")
    if not found and namespace is None:
        raise InvalidInput(
            f"no DaemonSet {kind.daemon_set} runs in this cluster",
            hint="Install the device plugin first, choose the other with --plugin, or name its namespace with --namespace.",
        )
    policy = None
    if kind.name == "nvidia" and await client.serves("nvidia.com/v1"):
        policies, _ = await client.list(CLUSTER_POLICIES)
        policy = policies[0]["metadata"]["name"] if policies else None
    return Installation(
        kind=kind,
        namespace=namespace or found[0]["metadata"]["namespace"],
        daemon_set=found[0] if found else None,
        policy=policy,
    )


async def find_nodes(client: Client, kind: PluginKind, given: Sequence[str]) -> list[Object]:
    """These nodes, or all that have GPUs for this plugin. Raises InvalidInput where there is none."""
    items, _ = await client.list(NODES)
    by_name = {item["metadata"]["name"]: item for item in items}
    unknown = [name for name in given if name not in by_name]
    if unknown:
        raise InvalidInput(f"the cluster has no node {unknown[0]}", hint=f"It has {', '.join(sorted(by_name)[:10])}.")
    found = [by_name[name] for name in given] or [item for item in items if has_gpus(item, kind)]
    if not found:
        raise InvalidInput("no node of this cluster has GPUs for this plugin", hint="Name the nodes with --node.")
    return found


def has_gpus(node: Object, kind: PluginKind) -> bool:
    """For this plugin, by its labels or by what the node has."""
    labels = node["metadata"].get("labels") or {}
    marks = {"nvidia.com/gpu.present", "nvidia.com/gpu.count"} if kind.name == "nvidia" else {f"{GROUP}/gpu.count"}
    capacity = (node.get("status") or {}).get("capacity") or {}
    return bool(marks & set(labels)) or any(name.startswith(kind.resource) for name in capacity)


async def read_setup(client: Client, where: Installation, nodes: Sequence[str]) -> PluginSetup:
    """As it is now."""
    found = await client.find(CONFIG_MAPS, where.kind.config_map, where.namespace)
    labels = {name: await _read_label(client, where.kind.label, name) for name in nodes}
    policy = None
    if where.policy is not None:
        policy = await _read_policy(client, where.policy)
    return PluginSetup(config=None if found is None else found.get("data") or {}, labels=labels, policy=policy)


async def read_undo(client: Client, where: Installation) -> PluginSetup:
    """As it was before the last change. Raises InvalidInput where there was none."""
    found = await client.find(CONFIG_MAPS, where.kind.config_map, where.namespace)
    text = ((found or {}).get("metadata", {}).get("annotations") or {}).get(UNDO)
    if text is None:
        raise InvalidInput(
            f"there is nothing to undo: configmap {where.kind.config_map} in {where.namespace} was not written by this command",
            hint="`aimgpu timeslicing doctor` shows what is set up.",
        )
    return PluginSetup.from_text(text)


async def write_setup(client: Client, where: Installation, before: PluginSetup, after: PluginSetup, *, undo: bool) -> bool:
    """Change what differs; whether the plugin was restarted. `undo`: forget what was before instead of recording it."""
    for node, value in after.labels.items():
        if before.labels.get(node) != value:
            await client.patch(NODES, node, {"metadata": {"labels": {where.kind.label: value}}}, manager=_MANAGER)
    if before.policy != after.policy and where.policy is not None and after.policy is not None:
        removed: dict[str, str | None] = dict.fromkeys(before.policy or {}, None)
        body = {"spec": {"devicePlugin": {"config": removed | dict(after.policy)}}}
        await client.patch(CLUSTER_POLICIES, where.policy, body, manager=_MANAGER)
    await _write_config(client, where, before, after, undo=undo)
    if not needs_restart(where.kind, before, after) or where.daemon_set is None:
        return False
    await _restart(client, where)
    return True


async def _write_config(client: Client, where: Installation, before: PluginSetup, after: PluginSetup, *, undo: bool) -> None:
    name = where.kind.config_map
    if after.config is None:
        await client.delete(CONFIG_MAPS, name, where.namespace)
        return
    record = None if undo else before.to_text()
    if before.config is None:
        body = config_map(name, where.namespace, dict(after.config))
        body["metadata"]["annotations"] = {UNDO: record}
        await client.create(CONFIG_MAPS, body, where.namespace)
        return
    gone: dict[str, str | None] = dict.fromkeys(set(before.config) - set(after.config), None)
    body = {"metadata": {"annotations": {UNDO: record}}, "data": gone | dict(after.config)}
    await client.patch(CONFIG_MAPS, name, body, where.namespace, manager=_MANAGER)


async def _read_label(client: Client, label: str, node: str) -> str | None:
    try:
        found = await client.get(NODES, node)
    except NotFoundInCluster as error:
        raise InvalidInput(f"the cluster has no node {node}") from error
    value = (found["metadata"].get("labels") or {}).get(label)
    return None if value is None else str(value)


async def _read_policy(client: Client, name: str) -> dict[str, str]:
    found = await client.get(CLUSTER_POLICIES, name)
    return dict(((found.get("spec") or {}).get("devicePlugin") or {}).get("config") or {})


async def _restart(client: Client, where: Installation) -> None:
    """As `kubectl rollout restart` does."""
    stamp = {"kubectl.kubernetes.io/restartedAt": datetime.now(UTC).isoformat(timespec="seconds")}
    body = {"spec": {"template": {"metadata": {"annotations": stamp}}}}
    await client.patch(DAEMON_SETS, where.kind.daemon_set, body, where.namespace, manager=_MANAGER)
