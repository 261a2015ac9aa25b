"""What the driver writes into a claim's status: per device what was granted, how it is enforced, and whether it is healthy."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aimgpu.domain import Device, Grant, granted_to
from aimgpu.errors import ClusterFailed, NotFoundInCluster, PartitionGone
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.quantities import format_quantity
from aimgpu.kubernetes.api.resources import RESOURCE_CLAIMS
from aimgpu.kubernetes.node.dra_driver.checkpoint import ClaimRecord
from aimgpu.kubernetes.vocabulary.names import DEVICE_GONE, DRIVER
from aimgpu.units import PPM

log = logging.getLogger(__name__)

NOT_PREPARED = "NotPrepared"
_LONGEST_MESSAGE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """What is known of the node when statuses are written."""

    devices: Sequence[Device]
    unhealthy: Mapping[str, str]  # GPUs with what is wrong
    now: datetime


def device_statuses(record: ClaimRecord, grants: Sequence[Grant], node: ObservedNode) -> list[dict[str, Any]]:
    """For each device of the claim. Grants are in the order of the allocation."""
    by_tenant: dict[str, list[Grant]] = {}
    for grant in sorted(grants, key=lambda grant: int(grant.id.rpartition(".")[2])):
        by_tenant.setdefault(grant.instance_id, []).append(grant)
    statuses = []
    for device in record.devices:
        tenant = f"{record.uid}.{device.requests[-1]}"
        held = by_tenant.get(tenant) or by_tenant.get(f"{record.uid}.all")
        if not held:
            continue
        statuses.append(_status(device.pool, device.device, device.share_id, held.pop(0), node))
    return statuses


def _status(pool: str, device: str, share_id: str | None, grant: Grant, node: ObservedNode) -> dict[str, Any]:
    reason = node.unhealthy.get(grant.device_id)
    compute = granted_to(grant, node.devices)
    condition = {
        "type": "Ready",
        "status": "False" if reason else "True",
        "reason": "Unhealthy" if reason else "Prepared",
        "message": reason or f"enforced at level {grant.level.value} by {grant.mechanism or 'nothing'}",
        "lastTransitionTime": node.now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    data = {
        "partition": grant.partition_id,
        "memory": format_quantity(grant.memory_bytes),
        "computePercent": None if grant.compute_ppm is None else grant.compute_ppm * 100 // PPM,  # of the partition
        "compute": None if compute is None else compute.text,  # of the GPU
        "exclusive": grant.exclusive,
        "level": grant.level.value,
        "mechanism": grant.mechanism,
    }
    status: dict[str, Any] = {"driver": DRIVER, "pool": pool, "device": device, "conditions": [condition], "data": data}
    if share_id is not None:
        status["shareID"] = share_id
    return status


def refusals(claim: Object, pool: str, error: Exception, text: str, now: datetime) -> list[dict[str, Any]]:
    """For each device of a claim that this node cannot prepare; empty where that is in its status already."""
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": DEVICE_GONE if isinstance(error, PartitionGone) else NOT_PREPARED,
        "message": text[:_LONGEST_MESSAGE],
        "lastTransitionTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    status = claim.get("status") or {}
    known = [each.get("message") for device in status.get("devices") or () for each in device.get("conditions") or ()]
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    if known and set(known) == {condition["message"]}:
        return []
    return [
        {
            **{name: result[name] for name in ("driver", "pool", "device", "shareID") if name in result},
            "conditions": [condition],
        }
        for result in results
        if result["driver"] == DRIVER and result["pool"] == pool
    ]


async def write_refusal(client: Client, claim: Object, pool: str, error: Exception, text: str) -> None:
    """Best effort: the kubelet reports the reason too, as an Event of the pod."""
    if statuses := refusals(claim, pool, error, text, datetime.now(UTC)):
        await _write(client, {name: claim["metadata"][name] for name in ("name", "namespace", "uid")}, statuses)


async def write_status(client: Client, record: ClaimRecord, statuses: Sequence[Mapping[str, Any]]) -> bool:
    """Best effort: a claim whose status cannot be written is prepared all the same. False: the server dropped it."""
    return await _write(client, {"name": record.name, "namespace": record.namespace, "uid": record.uid}, statuses)


async def _write(client: Client, claim: Mapping[str, str], statuses: Sequence[Mapping[str, Any]]) -> bool:
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": dict(claim),
        "status": {"devices": list(statuses)},
    }
    name, namespace = claim["name"], claim["namespace"]
    try:
        kept = await client.patch(RESOURCE_CLAIMS, name, body, namespace, kind="apply", subresource="status", manager=DRIVER)
    except NotFoundInCluster:
        return True  # deleted meanwhile
    except ClusterFailed as error:
        log.warning("claim.status_not_written", extra={"data": {"claim": f"{namespace}/{name}", "reason": error.message}})
        return True
    return not statuses or bool(kept["status"].get("devices"))
