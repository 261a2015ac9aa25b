"""Pods that hold something of a node's GPUs, whichever way they asked: these are in the way of another layout."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.names import LABEL_SHARE
from aimgpu.kubernetes.operator.pod_gpus import is_finished, limits_of, node_of, results_of
from aimgpu.kubernetes.standard_resources import PODS, RESOURCE_CLAIMS


async def find_holders(client: Client, gpu_nodes: Sequence[Object]) -> dict[str, tuple[str, ...]]:
    """``namespace/name`` of pods, by node: those of admission, those with a claim of their own, those with plain limits."""
    found: dict[str, set[str]] = {}
    for pod in (await client.list(PODS, labels=f"{LABEL_SHARE}=true"))[0]:
        if not is_finished(pod):
            found.setdefault(node_of(pod), set()).add(_place(pod))
    with contextlib.suppress(NotFoundInCluster):  # a server without claims
        for claim in (await client.list(RESOURCE_CLAIMS))[0]:
            for node in {str(result["pool"]) for result in results_of(claim, admin=True)}:  # the driver's pools are nodes
                found.setdefault(node, set()).update(_reserved_for(claim))
    for gpu_node in gpu_nodes:
        offered = {entry["name"] for entry in (gpu_node.get("status") or {}).get("resources") or ()}
        if offered:
            name = str(gpu_node["metadata"]["name"])
            pods, _ = await client.list(PODS, fields=f"spec.nodeName={name}")
            found.setdefault(name, set()).update(
                _place(pod) for pod in pods if not is_finished(pod) and offered & set(limits_of(pod))
            )
    return {node: tuple(sorted(pods)) for node, pods in found.items()}


def _reserved_for(claim: Mapping[str, Any]) -> Iterable[str]:
    namespace = claim["metadata"]["namespace"]
    users = (claim.get("status") or {}).get("reservedFor") or ()
    return (f"{namespace}/{user['name']}" for user in users if user.get("resource") == "pods")


def _place(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
