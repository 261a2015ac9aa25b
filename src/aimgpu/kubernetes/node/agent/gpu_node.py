"""The node's GpuNode object: its status says what GPUs there are, its spec which layouts a PartitionPlan wants."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aimgpu.domain import Device, Grant
from aimgpu.errors import AimGpuError, ClusterConflict, ClusterFailed
from aimgpu.hardware.protocols import Hardware
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.node.device_plugin.pod_replicas import HeldReplica
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource
from aimgpu.kubernetes.node.layouts import NodeLayouts
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP, OFFERED_HERE_ONLY, RESOURCES_OFFERED
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig
from aimgpu.units import format_bytes

log = logging.getLogger(__name__)

_LAYOUTS_SHOWN = 64
_REPLICAS_SHOWN = 512  # about 100 kB; a kubelet runs 110 pods unless it is configured for more


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLayout:
    gpu: str
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What the status of a GpuNode is made of."""

    gpus: list[dict[str, Any]]
    failures: Mapping[str, str]  # of layouts that are wanted
    lacks: Sequence[str] = ()  # features of the server, with what is not done for want of them
    resources: Sequence[Mapping[str, Any]] = ()  # that the device plugin offers
    held: Sequence[Mapping[str, Any]] | None = None  # replicas, by pods; None: not known now
    fixed: Sequence[str] = ()  # why some layouts cannot be changed
    rivals: Sequence[str] = ()  # other programs that offer the same GPUs
    unoffered: Sequence[str] = ()  # why the device plugin does not offer some GPUs


def wanted_layouts(gpu_node: Mapping[str, Any]) -> tuple[WantedLayout, ...]:
    entries = (gpu_node.get("spec") or {}).get("layouts") or ()
    return tuple(WantedLayout(gpu=entry["gpu"], layout=entry["layout"]) for entry in entries)


def gpu_statuses(devices: Sequence[Device], unhealthy: Mapping[str, str], grants: Sequence[Grant]) -> list[dict[str, Any]]:
    granted: Counter[str] = Counter()
    for grant in grants:
        granted[grant.partition_id] += grant.memory_bytes
    found = []
    for device in devices:
        status: dict[str, Any] = {
            "id": device.id,
            "index": device.index,
            "product": device.product,
            "vendor": device.vendor.value,
            "memoryBytes": device.memory_bytes,
            "layout": device.layout.name,
            "layouts": [layout.name for layout in device.layouts[:_LAYOUTS_SHOWN]],
            "partitions": [
                {"id": part.id, "memoryBytes": part.memory_bytes, "grantedBytes": granted[part.id]}
                for part in device.layout.partitions
            ],
            "simulated": device.simulated,
        }
        modes = {"computeMode": device.layout.compute_mode, "memoryMode": device.layout.memory_mode}
        status |= {name: mode for name, mode in modes.items() if mode}
        if device.id in unhealthy:
            status["unhealthy"] = unhealthy[device.id]
        found.append(status)
    return found


def resource_statuses(
    resources: Sequence[NodeResource], devices: Sequence[Device], config: SharingConfig
) -> list[dict[str, Any]]:
    """What the device plugin offers, for admission: replicas that are alike are one entry."""
    partitions = {part.id: (device, part) for device in devices for part in device.layout.partitions}
    found: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for resource in resources:
        for replica in resource.replicas:
            device, partition = partitions[replica.partition_id]
            entry = {
                "name": resource.name,
                "memoryBytes": partition.memory_bytes if replica.memory_bytes is None else replica.memory_bytes,
                "partitionBytes": partition.memory_bytes,
                "shared": replica.memory_bytes is not None,
                "mostPerContainer": 1 if resource.shared and config.fail_requests_greater_than_one else None,
                "isolation": config.isolation.value,
                "computeMode": device.layout.compute_mode,
                "memoryMode": device.layout.memory_mode,
            }
            found[tuple((name, value) for name, value in entry.items() if value is not None)] += 1
    return [{**dict(entry), "replicas": count} for entry, count in found.items()]


def held_statuses(held: Sequence[HeldReplica]) -> list[dict[str, Any]]:
    """Which pod has which replica, for the operator: an entry per replica."""
    return [
        {
            "namespace": one.namespace,
            "pod": one.pod,
            "resource": one.resource,
            "partition": one.grant.partition_id,
            "memoryBytes": one.grant.memory_bytes,
            "level": one.grant.level.value,
        }
        for one in held[:_REPLICAS_SHOWN]
    ]


def summaries(gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For columns of `kubectl get gpunodes`, which show the first of a list only."""
    products = Counter(f"{gpu['product']}{' (simulated)' if gpu['simulated'] else ''}" for gpu in gpus)
    layouts = Counter(str(gpu["layout"]) for gpu in gpus)
    parts = [part for gpu in gpus for part in gpu["partitions"]]
    granted, size = (sum(part[name] for part in parts) for name in ("grantedBytes", "memoryBytes"))
    return {
        "products": _counted(products),
        "layoutNames": _counted(layouts),
        "memoryGranted": f"{format_bytes(granted)} of {format_bytes(size)}",
    }


def _counted(words: Counter[str]) -> str:
    return ", ".join(f"{count} x {word}" if count > 1 else word for word, count in words.items())


def apply_wanted(wanted: Sequence[WantedLayout], hardware: Hardware, layouts: NodeLayouts) -> dict[str, str]:
    """Change GPUs that are idle to what is wanted; what could not be done, with the reason, by GPU. Blocking."""
    devices = {device.id: device for device in hardware.read_devices()}
    held = layouts.held_devices()
    failures: dict[str, str] = {}
    for one in wanted:
        device = devices.get(one.gpu)
        if device is None:
            failures[one.gpu] = "there is no such GPU on this node"
        elif device.layout.name.lower() == one.layout.lower():
            layouts.accept(device.id)
        elif one.gpu in held:
            failures[one.gpu] = f"it is in use as {device.layout.name}; drain its pods first"
        else:
            try:
                # A memory mode takes a driver reload, which no process on the node may block.
                hardware.apply_layout(device.id, one.layout, reload_driver=not held)
                layouts.accept(device.id)
                log.info("layout.applied", extra={"data": {"device": device.id, "layout": one.layout}})
            except AimGpuError as error:
                failures[one.gpu] = error.message
    return failures


async def make_gpu_node(client: Client, node: str, node_uid: str | None) -> Object:
    """As it is where it was made meanwhile."""
    metadata: dict[str, Any] = {"name": node}
    if node_uid:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}]
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "GpuNode", "metadata": metadata, "spec": {}}
    try:
        return await client.create(GPU_NODES, body)
    except ClusterConflict:
        return await client.get(GPU_NODES, node)


async def write_gpu_node(client: Client, gpu_node: Object, report: NodeReport) -> Object:
    """Only where it says something new; what is not known now stays as it was. The object as it is then."""
    old = gpu_node.get("status") or {}
    lists = {"resources": report.resources, "heldReplicas": old.get("heldReplicas") if report.held is None else report.held}
    found = {
        "gpus": report.gpus,
        "observedGeneration": gpu_node["metadata"].get("generation"),
        **summaries(report.gpus),
        **{name: list(value or ()) for name, value in lists.items() if value or old.get(name)},
        "conditions": _conditions(report, old.get("conditions") or ()),
    }
    if all(old.get(name) == value for name, value in found.items()):
        return gpu_node
    try:
        after = await client.patch(GPU_NODES, gpu_node["metadata"]["name"], {"status": found}, subresource="status")
    except ClusterFailed as error:
        log.warning("gpu_node.not_written", extra={"data": {"reason": error.message}})
        return gpu_node
    # With what an older definition does not keep: else that would be written again in every round.
    return {**after, "status": {**(after.get("status") or {}), **found}}


def _conditions(report: NodeReport, before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    failures = "; ".join(f"{gpu}: {reason}" for gpu, reason in sorted(report.failures.items()))
    found = [
        _condition("LayoutsApplied", ("Applied", "NotApplied"), failures),
        _condition("ServerComplete", ("Complete", "FeaturesMissing"), "; ".join(report.lacks)),
        _condition("LayoutsChangeable", ("Changeable", "RightsMissing"), "; ".join(report.fixed)),
        _condition(OFFERED_HERE_ONLY, ("Exclusive", "OfferedByOthers"), "; ".join(report.rivals)),
        _condition(RESOURCES_OFFERED, ("Offered", "LayoutsMixed"), "; ".join(report.unoffered)),
    ]
    known = {(one["type"], one["status"]): one for one in before}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [
        {**one, "lastTransitionTime": known.get((one["type"], one["status"]), {}).get("lastTransitionTime", now)}
        for one in found
    ]


def _condition(name: str, reasons: tuple[str, str], trouble: str) -> dict[str, Any]:
    status, reason = ("False", reasons[1]) if trouble else ("True", reasons[0])
    return {"type": name, "status": status, "reason": reason, "message": trouble}
