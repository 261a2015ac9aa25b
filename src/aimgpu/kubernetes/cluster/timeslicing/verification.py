"""Whether time-slicing works: what the nodes advertise, and a pod that gets a replica."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import NODES, PODS
from aimgpu.kubernetes.cluster.timeslicing.installation import Installation, read_setup
from aimgpu.kubernetes.cluster.timeslicing.node_replicas import NodeReplicas, node_replicas

_STEP_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was seen of one node."""

    replicas: NodeReplicas
    pod: str | None = None  # how the test pod ended up; None: it was not run
    pod_ran: bool | None = None

    @property
    def good(self) -> bool:
        return self.replicas.right and self.pod_ran is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTrial:
    """The pod that is run on each node."""

    image: str
    namespace: str = "default"


async def verify(
    client: Client, where: Installation, nodes: Sequence[str], *, trial: PodTrial | None, timeout_seconds: float
) -> list[Verified]:
    """Wait until each node advertises its replicas, then run a pod there with one of them. Raises InvalidInput."""
    setup = await read_setup(client, where, nodes)
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    found = []
    for node in nodes:
        text = (setup.config or {}).get(setup.labels.get(node) or "")
        if text is None:
            raise InvalidInput(
                f"node {node} chooses no configuration of configmap {where.kind.config_map}",
                hint="`aimgpu timeslicing apply` sets it up; `aimgpu timeslicing doctor` shows what is there.",
            )
        seen = await _wait_for_replicas(client, where, node, text, deadline)
        if trial is None or not seen.right:
            found.append(Verified(replicas=seen))
            continue
        ran, how = await _run_pod(client, seen, trial, deadline)
        found.append(Verified(replicas=seen, pod=how, pod_ran=ran))
    return found


async def _wait_for_replicas(client: Client, where: Installation, node: str, text: str, deadline: float) -> NodeReplicas:
    while True:
        seen = node_replicas(await client.get(NODES, node), text, where.kind)
        if seen.right or asyncio.get_running_loop().time() > deadline:
            return seen
        await asyncio.sleep(_STEP_SECONDS)


async def _run_pod(client: Client, seen: NodeReplicas, trial: PodTrial, deadline: float) -> tuple[bool, str]:
    pod = _pod(seen, trial)
    name = pod["metadata"]["name"]
    await client.create(PODS, pod, trial.namespace)
    try:
        while True:
            status = (await client.get(PODS, name, trial.namespace)).get("status") or {}
            phase = status.get("phase")
            if phase in ("Running", "Succeeded"):
                return True, f"a pod with one {seen.resource} ran"
            if phase == "Failed" or asyncio.get_running_loop().time() > deadline:
                return False, f"a pod with one {seen.resource} did not run: {why_not_running(status)}"
            await asyncio.sleep(_STEP_SECONDS)
    finally:
        await client.delete(PODS, name, trial.namespace)


def why_not_running(status: Object) -> str:
    """The scheduler's or the kubelet's own words."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason"))
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"{waiting.get('reason')}: {waiting.get('message') or ''}".rstrip(": ")
    return str(status.get("message") or status.get("reason") or status.get("phase") or "no status")


def _pod(seen: NodeReplicas, trial: PodTrial) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": trial.image,
        "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": {seen.resource: "1"}},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": seen.node},
        "tolerations": [{"operator": "Exists"}],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    name = f"aimgpu-timeslicing-{secrets.token_hex(4)}"
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
