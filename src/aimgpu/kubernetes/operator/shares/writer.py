"""Writes GpuShares: only what differs from what is there, with an Event when a workload gets or loses its share."""

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.errors import ClusterConflict, NotFoundInCluster
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.custom_resources import GPU_SHARES
from aimgpu.kubernetes.operator.shares.indexes import KnownGpus
from aimgpu.kubernetes.operator.shares.status import share_status
from aimgpu.kubernetes.operator.shares.workloads import Workload, gpu_share
from aimgpu.kubernetes.standard_resources import EVENTS

_MANAGER = "aimgpu-operator"


class ShareWriter:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[tuple[str, str], Object] = {}

    def saw(self, kind: str, share: Object) -> Object:
        """What the API server has now; returns what is known of it: a watch may report only the name of what is gone."""
        key = share["metadata"]["namespace"], share["metadata"]["name"]
        if kind == "DELETED":
            return self._known.pop(key, share)
        self._known[key] = share
        return share

    async def write(self, workload: Workload, pods: Sequence[Object], gpus: KnownGpus, now: dt.datetime) -> None:
        """A workload without pods that ask for GPUs has no share."""
        key = workload.namespace, workload.share_name
        share = self._known.get(key)
        if not pods:
            if share is not None:
                await self._client.delete(GPU_SHARES, workload.share_name, workload.namespace)
            return
        if share is None:
            share = await self._create(workload)
        before = share.get("status") or {}
        status = share_status(pods, gpus, before)
        condition = status["conditions"][0]
        changed = "lastTransitionTime" not in condition
        if changed:
            condition["lastTransitionTime"] = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        if status == before:
            return
        body = {"status": {**{name: None for name in before if name not in status}, **status}}
        try:
            fresh = await self._client.patch(GPU_SHARES, workload.share_name, body, workload.namespace, subresource="status")
        except NotFoundInCluster:  # deleted by hand meanwhile; the watch brings it back here
            self._known.pop(key, None)
            raise
        self._known[key] = fresh
        if changed:
            await self._tell(fresh, condition, now)

    async def _create(self, workload: Workload) -> Object:
        try:
            return await self._client.create(GPU_SHARES, gpu_share(workload), workload.namespace)
        except ClusterConflict:  # of an operator before, not seen by the watch yet
            return await self._client.get(GPU_SHARES, workload.share_name, workload.namespace)

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
