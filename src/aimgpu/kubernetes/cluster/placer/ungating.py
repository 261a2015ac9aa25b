"""Lets pods go that wait with our gate and nobody places: after the operator was removed, or placement was turned off."""

import contextlib

from aimgpu.errors import ClusterConflict, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.mirror import Key
from aimgpu.kubernetes.api.resources import PODS
from aimgpu.kubernetes.cluster.placer.pods import is_gated
from aimgpu.kubernetes.vocabulary.names import GATE, UNHINTED


async def ungate_pods(client: Client, namespace: str | None = None) -> list[Key]:
    """Take our gate off all pods that have it, without a hint. Other gates stay."""
    pods, _ = await client.list(PODS, namespace, keep=is_gated)
    for pod in pods:
        gates = [gate for gate in pod["spec"]["schedulingGates"] if gate["name"] != GATE]
        metadata = {"uid": pod["metadata"]["uid"], "annotations": {UNHINTED: "let go: no operator places it"}}
        with contextlib.suppress(NotFoundInCluster, ClusterConflict):  # gone, or changed: what is left shows in the next call
            body = {"metadata": metadata, "spec": {"schedulingGates": gates or None}}
            await client.patch(PODS, pod["metadata"]["name"], body, pod["metadata"]["namespace"])
    return [(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in pods]
