"""Pods that hold something of a node's GPUs, whichever way they asked: these are in the way of another layout."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.names import DRIVER, LABEL_SHARE
from aimgpu.kubernetes.standard_resources import PODS, RESOURCE_CLAIMS

_FINISHED = ("Succeeded", "Failed")


async def find_holders(client: Client, gpu_nodes: Sequence[Object]) -> dict[str, tuple[str, ...]]:
    """``namespace/name`` of pods, by node: those of admission, those with a claim of their own, those with plain limits."""
    found: dict[str, set[str]] = {}
    for pod in (await client.list(PODS, labels=f"{LABEL_SHARE}=true"))[0]:
        if not _is_finished(pod):
            found.setdefault(pod["spec"].get("nodeName") or "", set()).add(_place(pod))
    with contextlib.suppress(NotFoundInCluster):  # a server without claims
        for claim in (await client.list(RESOURCE_CLAIMS))[0]:
            for node in _allocated_nodes(claim):
                found.setdefault(node, set()).update(_reserved_for(claim))
    for gpu_node in gpu_nodes:
        offered = {entry["name"] for entry in (gpu_node.get("status") or {}).get("resources") or ()}
        if offered:
            name = str(gpu_node["metadata"]["name"])
            pods, _ = await client.list(PODS, fields=f"spec.nodeName={name}")
            found.setdefault(name, set()).update(
                _place(pod) for pod in pods if not _is_finished(pod) and _has_any(pod, offered)
            )
    return {node: tuple(sorted(pods)) for node, pods in found.items()}


def _allocated_nodes(claim: Mapping[str, Any]) -> set[str]:
    """The driver's pools are nodes."""
    results = (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
    return {str(result["pool"]) for result in results if result.get("driver") == DRIVER}


def _reserved_for(claim: Mapping[str, Any]) -> Iterable[str]:
    namespace = claim["metadata"]["namespace"]
    users = (claim.get("status") or {}).get("reservedFor") or ()
    return (f"{namespace}/{user['name']}" for user in users if user.get("resource") == "pods")


def _has_any(pod: Mapping[str, Any], resources: set[str]) -> bool:
    containers = (*(pod["spec"].get("containers") or ()), *(pod["spec"].get("initContainers") or ()))
    return any(resources & set((container.get("resources") or {}).get("limits") or {}) for container in containers)


def _is_finished(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in _FINISHED


def _place(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
