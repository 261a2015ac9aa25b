"""Writes GpuShares: only what differs from what is there, with an Event when a workload gets or loses its share."""

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.errors import ClusterConflict, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror
from aimgpu.kubernetes.api.resources import EVENTS
from aimgpu.kubernetes.cluster.operator.shares.indexes import KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.status import share_status
from aimgpu.kubernetes.cluster.operator.shares.workloads import Workload, gpu_share
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_SHARES

_MANAGER = "aimgpu-operator"
_PATIENCE = dt.timedelta(seconds=5)  # what is placed within it is not a reason to warn


class ShareWriter:
    def __init__(self, client: Client, shares: Mirror[Object]) -> None:
        self._client = client
        self._shares = shares
        self._untold: dict[Key, dt.datetime] = {}  # shares that began to wait

    async def write(self, workload: Workload, pods: Sequence[Object], gpus: KnownGpus, now: dt.datetime) -> float | None:
        """A workload without pods that ask for GPUs has no share. Returns in how many seconds to come again, where needed."""
        key = workload.namespace, workload.share_name
        share = self._shares.kept.get(key)
        if not pods:
            self._untold.pop(key, None)
            if share is not None:
                await self._client.delete(GPU_SHARES, workload.share_name, workload.namespace)
            return None
        if share is None:
            share = await self._create(workload)
        before = share.get("status") or {}
        status = share_status(pods, gpus, before)
        condition = status["conditions"][0]
        changed = "lastTransitionTime" not in condition
        if changed:
            condition["lastTransitionTime"] = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        if changed and condition["reason"] == "Waiting":
            self._untold[key] = now
        elif condition["reason"] != "Waiting" and self._untold.pop(key, None) is not None:
            changed = True  # it waits for another reason by now, or not any more
        if status != before:
            share = await self._write(share, before, status)
        if changed and condition["reason"] != "Waiting":
            await self._tell(share, condition, now)
        if key not in self._untold:
            return None
        left = (self._untold[key] + _PATIENCE - now).total_seconds()
        if left > 0:
            return left
        del self._untold[key]
        await self._tell(share, condition, now)
        return None

    async def _write(self, share: Object, before: Object, status: Object) -> Object:
        metadata = share["metadata"]
        body = {"status": {**{name: None for name in before if name not in status}, **status}}
        try:
            fresh = await self._client.patch(GPU_SHARES, metadata["name"], body, metadata["namespace"], subresource="status")
        except NotFoundInCluster:  # deleted by hand meanwhile; the watch brings it back here
            self._shares.kept.pop((metadata["namespace"], metadata["name"]), None)
            raise
        self._shares.wrote(share, fresh)
        return fresh

    async def _create(self, workload: Workload) -> Object:
        try:
            share = await self._client.create(GPU_SHARES, gpu_share(workload), workload.namespace)
        except ClusterConflict:  # of an operator before, not seen by the watch yet
            share = await self._client.get(GPU_SHARES, workload.share_name, workload.namespace)
        self._shares.wrote(None, share)
        return self._shares.kept[workload.namespace, workload.share_name]

    async def _tell(self, share: Object, condition: Mapping[str, Any], now: dt.datetime) -> None:
        metadata = share["metadata"]
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name'][:40]}.{uuid.uuid4().hex[:12]}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": share["apiVersion"],
                "kind": "GpuShare",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Normal" if condition["status"] == "True" else "Warning",
            "reason": condition["reason"],
            "message": condition["message"][:1024],
            "source": {"component": _MANAGER},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        await self._client.create(EVENTS, event, metadata["namespace"])
