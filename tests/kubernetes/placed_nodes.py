"""Nodes without a kubelet and GPUs on them, as kube-scheduler sees them: for tests and measurements of placement."""

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.api.resources import LEASES, NODES, RESOURCE_SLICES
from aimgpu.kubernetes.node.dra_driver.candidates import list_candidates
from aimgpu.kubernetes.node.dra_driver.resource_slices import SliceSettings, build_slices
from aimgpu.kubernetes.vocabulary.names import SHARED_CLASS, WHOLE_CLASS

Object = dict[str, Any]
NODE_LEASES = "kube-node-lease"
_MEMORY_MIB: dict[str, int] = {}


def node_body(name: str, amounts: Mapping[str, str], **labels: str) -> Object:
    """A Node that reports to be ready."""
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now, "lastTransitionTime": now}
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
    status = {"capacity": dict(amounts), "allocatable": dict(amounts), "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


async def add_node(client: Client, body: Object, gpus: int = 0, product: str = "MI300X", taints: Sequence[Object] = ()) -> None:
    """Admission gives a new node the taint of one that is not ready: taken away as the controller would."""
    name = body["metadata"]["name"]
    await client.create(NODES, body)
    await client.patch(NODES, name, {"spec": {"taints": list(taints)}})
    await renew(client, [name])
    for item in slice_bodies(name, gpus, product) if gpus else ():
        await client.create(RESOURCE_SLICES, item)


async def renew(client: Client, nodes: Iterable[str]) -> None:
    """The nodes are alive: without it, the node controller closes them after some time."""
    for name in nodes:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        await client.patch(LEASES, name, body, NODE_LEASES, kind="apply")


def slice_bodies(node: str, gpus: int, product: str = "MI300X") -> list[Object]:
    devices = SimulatedHardware([(product, gpus)]).read_devices()
    settings = SliceSettings(node=node, single_device=True)
    specs = build_slices([list_candidates(device, repartition=False) for device in devices], {}, settings)
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(specs)}
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{node}-{number}"},
            "spec": {**spec, "nodeName": node, "pool": pool},
        }
        for number, spec in enumerate(specs)
    ]


def memory_mib(product: str = "MI300X") -> int:
    """That can be shared of one GPU."""
    if product not in _MEMORY_MIB:
        (body,) = slice_bodies("any", 1, product)
        _MEMORY_MIB[product] = parse_quantity(body["spec"]["devices"][0]["capacity"]["memory"]["value"]) >> 20
    return _MEMORY_MIB[product]


def claim_body(name: str, milli: int, count: int = 1, product: str = "MI300X") -> Object:
    """So many thousandths of a GPU, or so many whole ones."""
    exactly: Object = {"deviceClassName": WHOLE_CLASS, "count": count}
    if milli < 1000:
        requests = {"memory": f"{memory_mib(product) * milli // 1000}Mi"}
        exactly = {"deviceClassName": SHARED_CLASS, "capacity": {"requests": requests}}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def pod_body(name: str, amounts: Mapping[str, str], claim: str = "", **spec: Any) -> Object:
    """It is never run: there is no kubelet."""
    container: Object = {"name": "main", "image": "none", "resources": {"requests": dict(amounts)}}
    if claim:
        container["resources"]["claims"] = [{"name": "gpu"}]
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
    body = {"containers": [container], "terminationGracePeriodSeconds": 0, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}
