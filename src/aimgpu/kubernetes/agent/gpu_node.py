"""The node's GpuNode object: its status says what GPUs there are, its spec which layouts a PartitionPlan wants."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aimgpu.domain import Device
from aimgpu.errors import AimGpuError, ClusterConflict, ClusterFailed
from aimgpu.hardware.protocols import Hardware
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.custom_resources import GPU_NODES, VERSION
from aimgpu.kubernetes.names import GROUP
from aimgpu.kubernetes.node.layouts import NodeLayouts

log = logging.getLogger(__name__)

_LAYOUTS_SHOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLayout:
    gpu: str
    layout: str


def wanted_layouts(gpu_node: Mapping[str, Any]) -> tuple[WantedLayout, ...]:
    entries = (gpu_node.get("spec") or {}).get("layouts") or ()
    return tuple(WantedLayout(gpu=entry["gpu"], layout=entry["layout"]) for entry in entries)


def gpu_statuses(devices: Sequence[Device], unhealthy: Mapping[str, str]) -> list[dict[str, Any]]:
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
            "simulated": device.simulated,
        }
        if device.id in unhealthy:
            status["unhealthy"] = unhealthy[device.id]
        found.append(status)
    return found


def summaries(gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For columns of `kubectl get gpunodes`, which show the first of a list only."""
    products = Counter(f"{gpu['product']}{' (simulated)' if gpu['simulated'] else ''}" for gpu in gpus)
    layouts = Counter(str(gpu["layout"]) for gpu in gpus)
    return {"products": _counted(products), "layoutNames": _counted(layouts)}


def _counted(words: Counter[str]) -> str:
    return ", ".join(f"{count} x {word}" if count > 1 else word for word, count in words.items())


def apply_wanted(wanted: Sequence[WantedLayout], hardware: Hardware, layouts: NodeLayouts) -> dict[str, str]:
    """Change GPUs that are idle to what is wanted; returns what could not be done, with the reason. Blocking."""
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


async def read_gpu_node(client: Client, node: str, node_uid: str | None) -> Object | None:
    """The object, made if it is not there; None where the cluster does not have this kind."""
    if not await client.serves(f"{GROUP}/{VERSION}"):
        return None
    found = await client.find(GPU_NODES, node)
    if found is not None:
        return found
    metadata: dict[str, Any] = {"name": node}
    if node_uid:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}]
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "GpuNode", "metadata": metadata, "spec": {}}
    try:
        return await client.create(GPU_NODES, body)
    except ClusterConflict:
        return await client.get(GPU_NODES, node)


async def write_gpu_node(client: Client, gpu_node: Object, gpus: list[dict[str, Any]], failures: Mapping[str, str]) -> None:
    """Only where it says something new."""
    old = gpu_node.get("status") or {}
    generation = gpu_node["metadata"].get("generation")
    text = "; ".join(f"{gpu}: {reason}" for gpu, reason in sorted(failures.items()))
    status = "False" if failures else "True"
    before: dict[str, Any] = next((one for one in old.get("conditions") or () if one["type"] == "LayoutsApplied"), {})
    same = before.get("status") == status and before.get("message") == text
    found = {"gpus": gpus, "observedGeneration": generation, **summaries(gpus)}
    if same and all(old.get(name) == value for name, value in found.items()):
        return
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "LayoutsApplied",
        "status": status,
        "reason": "NotApplied" if failures else "Applied",
        "message": text,
        "lastTransitionTime": before.get("lastTransitionTime", now) if before.get("status") == status else now,
    }
    body = {"status": {**found, "conditions": [condition]}}
    try:
        await client.patch(GPU_NODES, gpu_node["metadata"]["name"], body, subresource="status")
    except ClusterFailed as error:
        log.warning("gpu_node.not_written", extra={"data": {"reason": error.message}})
