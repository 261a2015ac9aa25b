"""Allocates claims and binds pods in place of kube-scheduler, node after node."""

import asyncio
import itertools
import time
import uuid
from typing import Any

from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import PODS, RESOURCE_CLAIMS
from aimgpu.kubernetes.vocabulary.names import DRIVER
from benchmarks.kube_node.scheduling import AT_ONCE, fake_slices


class Binder:
    """`asked`: when each binding was asked for, by the steady clock. Others can see it before its answer is here."""

    def __init__(self, client: Client, nodes: int) -> None:
        self._client = client
        self._nodes = itertools.cycle(range(nodes))
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._begun: set[str] = set()
        published = [device for item in fake_slices(0) for device in item["spec"].get("devices") or ()]
        self._device = next(one["name"] for one in published if one.get("allowMultipleAllocations"))
        self.asked: dict[str, float] = {}

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            async for event in self._client.watch(PODS, "default"):
                if event.type in ("SYNCED", "DELETED") or event.object["spec"].get("nodeName"):
                    continue
                name = event.object["metadata"]["name"]
                claims = (event.object.get("status") or {}).get("resourceClaimStatuses") or ()
                if claims and name not in self._begun:
                    self._begun.add(name)
                    group.create_task(self._bind(event.object, claims[0]["resourceClaimName"], f"fake-{next(self._nodes)}"))

    async def _bind(self, pod: Object, claim: str, node: str) -> None:
        name = pod["metadata"]["name"]
        async with self._limit:
            user = {"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}
            status = {"allocation": self._allocation(node), "reservedFor": [user]}
            await self._client.patch(RESOURCE_CLAIMS, claim, {"status": status}, "default", subresource="status")
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            self.asked[name] = time.monotonic()
            await self._client.request("POST", PODS.path("default", name, "binding"), body=body)

    def _allocation(self, node: str) -> dict[str, Any]:
        result = {
            "request": "gpu",
            "driver": DRIVER,
            "pool": node,
            "device": self._device,
            "shareID": str(uuid.uuid4()),
            "consumedCapacity": {"memory": "4Gi", "compute": "0"},
        }
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        return {"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]}}
