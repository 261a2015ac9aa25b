"""Takes pods off their nodes: for a plan, or because the device that was allocated to them is not there any more."""

import datetime as dt
from collections.abc import Mapping
from typing import Any

from aimgpu.errors import ClusterConflict, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import EVENTS, PODS
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, is_finished, is_reserved_for
from aimgpu.kubernetes.cluster.operator.shares.indexes import ClaimIndex
from aimgpu.kubernetes.vocabulary.names import DEVICE_GONE, DRIVER

_TOO_MANY = 429  # an eviction that a PodDisruptionBudget does not allow now
_MANAGER = "aimgpu-operator"


async def evict(client: Client, namespace: str, name: str, *, dry_run: bool = False) -> str | None:
    """What keeps the pod; None: it goes, or is gone."""
    body: Object = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    if dry_run:
        body["deleteOptions"] = {"dryRun": ["All"]}
    try:
        await client.request("POST", PODS.path(namespace, name, "eviction"), body=body)
    except NotFoundInCluster:
        return None
    except ClusterFailed as error:
        if error.status != _TOO_MANY:  # else its budget allows it later
            raise
        return error.message
    return None


def why_stranded(pod: Mapping[str, Any], claims: ClaimIndex) -> str | None:
    """Why its node will never start it; None: it may yet. Its claim keeps a device that is gone until the pod is."""
    if pod["metadata"].get("deletionTimestamp") or is_finished(pod):
        return None
    for each in claims_of(pod):
        claim = claims.get(pod["metadata"]["namespace"], each.name)
        status = (claim or {}).get("status") or {}
        if claim is None or "allocation" not in status or (each.shared and not is_reserved_for(claim, pod)):
            continue
        for device in status.get("devices") or ():
            for condition in device.get("conditions") or ():
                if device.get("driver") == DRIVER and condition.get("reason") == DEVICE_GONE:
                    return str(condition.get("message"))
    return None


async def replace_stranded(client: Client, pod: Mapping[str, Any], why: str, now: dt.datetime) -> None:
    """Evicts it where a controller makes another, which is then placed on what is there; the reason is an Event of the pod."""
    metadata = pod["metadata"]
    owned = any(owner.get("controller") and owner["kind"] != "Node" for owner in metadata.get("ownerReferences") or ())
    act = "evicted, so that its controller's next pod is placed again" if owned else "delete the pod, and create it again"
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:200]}.{metadata['uid'][:8]}.device-gone", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            **{key: metadata[key] for key in ("name", "namespace", "uid")},
        },
        "type": "Warning",
        "reason": DEVICE_GONE,
        "message": f"{why}: {act}"[:1024],
        "source": {"component": _MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
    try:
        await client.create(EVENTS, event, metadata["namespace"])
    except ClusterConflict:  # reported before
        if not owned:
            return
    if owned:
        await evict(client, metadata["namespace"], metadata["name"])
