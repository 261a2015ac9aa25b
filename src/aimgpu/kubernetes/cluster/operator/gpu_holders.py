"""Pods that hold something of a node's GPUs, whichever way they asked: these are in the way of another layout."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.operator.pod_gpus import is_finished, limits_of, node_of, results_of
from aimgpu.kubernetes.vocabulary.names import DRIVER, LABEL_SHARE

Holders = dict[str, frozenset[str] | None]  # GPUs by ``namespace/name`` of a pod; None: which is not known


async def find_holders(client: Client, gpu_nodes: Sequence[Object]) -> dict[str, Holders]:
    """By node: pods of admission, those with a claim of their own, those with plain limits."""
    found: dict[str, Holders] = {}
    with contextlib.suppress(NotFoundInCluster):  # a server without claims
        claims = (await client.list(RESOURCE_CLAIMS))[0]
        published = _published((await client.list(RESOURCE_SLICES, fields=f"spec.driver={DRIVER}"))[0])
        for claim in claims:
            for node, gpus in _gpus_of(claim, published).items():  # the driver's pools are nodes
                held = found.setdefault(node, {})
                held.update({pod: _joined(held.get(pod, frozenset()), gpus) for pod in _reserved_for(claim)})
    for pod in (await client.list(PODS, labels=f"{LABEL_SHARE}=true"))[0]:
        if not is_finished(pod):
            found.setdefault(node_of(pod), {}).setdefault(_place(pod), None)
    for gpu_node in gpu_nodes:
        status = gpu_node.get("status") or {}
        offered = {entry["name"] for entry in status.get("resources") or ()}
        if offered:
            name = str(gpu_node["metadata"]["name"])
            replicas = _replicas(status)
            pods, _ = await client.list(PODS, fields=f"spec.nodeName={name}")
            for pod in pods:
                if not is_finished(pod) and offered & set(limits_of(pod)):
                    found.setdefault(name, {})[_place(pod)] = replicas.get(_place(pod))
    return found


def _published(slices: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """GPUs by pool and device."""
    return {
        (str(item["spec"]["pool"]["name"]), str(device["name"])): str(device["attributes"]["gpu"]["string"])
        for item in slices
        for device in item["spec"].get("devices") or ()
        if "gpu" in (device.get("attributes") or {})
    }


def _gpus_of(claim: Mapping[str, Any], published: Mapping[tuple[str, str], str]) -> dict[str, frozenset[str] | None]:
    """By node."""
    found: dict[str, frozenset[str] | None] = {}
    for result in results_of(claim, admin=True):
        node = str(result["pool"])
        gpu = published.get((node, str(result["device"])))
        found[node] = _joined(found.get(node, frozenset()), None if gpu is None else frozenset({gpu}))
    return found


def _replicas(status: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """GPUs of which the device plugin gave replicas, by pod."""
    gpus = {part["id"]: str(gpu["id"]) for gpu in status.get("gpus") or () for part in gpu.get("partitions") or ()}
    found: dict[str, frozenset[str]] = {}
    for one in status.get("heldReplicas") or ():
        if one.get("partition") in gpus:
            pod = f"{one['namespace']}/{one['pod']}"
            found[pod] = found.get(pod, frozenset()) | {gpus[one["partition"]]}
    return found


def _joined(some: frozenset[str] | None, more: frozenset[str] | None) -> frozenset[str] | None:
    return None if some is None or more is None else some | more


def _reserved_for(claim: Mapping[str, Any]) -> Iterable[str]:
    namespace = claim["metadata"]["namespace"]
    users = (claim.get("status") or {}).get("reservedFor") or ()
    return (f"{namespace}/{user['name']}" for user in users if user.get("resource") == "pods")


def _place(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
