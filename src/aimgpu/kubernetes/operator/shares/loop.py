"""Follows pods, claims, published GPUs and nodes, and keeps one GpuShare per workload equal to what they say."""

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, TypeVar

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api_client import Client, Object, Resource
from aimgpu.kubernetes.custom_resources import GPU_NODES, GPU_SHARES
from aimgpu.kubernetes.names import DRIVER
from aimgpu.kubernetes.operator.options import OperatorOptions
from aimgpu.kubernetes.operator.pod_gpus import concerns, may_ask
from aimgpu.kubernetes.operator.shares.indexes import KnownGpus, PodIndex
from aimgpu.kubernetes.operator.shares.rows import asks
from aimgpu.kubernetes.operator.shares.workloads import Workload
from aimgpu.kubernetes.operator.shares.writer import ShareWriter
from aimgpu.kubernetes.operator.work_queue import WorkQueue
from aimgpu.kubernetes.standard_resources import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES

log = logging.getLogger(__name__)

_WORKERS = 16  # they mostly wait for the API server
_RESYNC_SECONDS = 300.0
_Key = TypeVar("_Key", bound=Hashable)
_FOLLOWED = (PODS, RESOURCE_CLAIMS, RESOURCE_SLICES, GPU_SHARES, GPU_NODES)
_Saw = Callable[[str, Object], None]


class ShareLoop:
    """All pods are watched, since only admission's have a label, and those that can hold no GPU are dropped as they come."""

    def __init__(self, client: Client, options: OperatorOptions) -> None:
        self._client = client
        self._options = options
        self._pods = PodIndex()
        self._gpus = KnownGpus()
        self._queue: WorkQueue[Workload] = WorkQueue()
        self._synced = {each.plural: asyncio.Event() for each in _FOLLOWED}
        self._writer = ShareWriter(client)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(PODS, self._saw_pod, keep=lambda pod: self._watches(pod) and may_ask(pod)))
            group.create_task(self._watch_claims())
            group.create_task(self._watch(GPU_SHARES, self._saw_share, keep=self._watches))
            group.create_task(self._watch(GPU_NODES, self._saw_gpu_node))
            group.create_task(self._resync())
            for event in self._synced.values():  # a half-filled cache would say that shares are gone
                await event.wait()
            log.info("operator.synced", extra={"data": {"pods": len(self._pods), "claims": len(self._gpus.claims)}})
            for _ in range(_WORKERS):
                group.create_task(work(self._queue, self._reconcile))

    def used_templates(self) -> set[tuple[str, str]] | None:
        """Claim templates that pods refer to; None: the pods are not known yet, or not all are looked at."""
        if not self._synced[PODS.plural].is_set() or self._options.namespaces:
            return None
        return {
            (str(pod["metadata"]["namespace"]), str(claim.get("resourceClaimTemplateName")))
            for pod in self._pods.all()
            for claim in pod["spec"].get("resourceClaims") or ()
        }

    async def _watch_claims(self) -> None:
        """Where the server has none, device plugins are all that there is."""
        while not await self._serves_claims():
            for resource in (RESOURCE_CLAIMS, RESOURCE_SLICES):
                self._synced[resource.plural].set()
            await asyncio.sleep(_RESYNC_SECONDS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(RESOURCE_CLAIMS, self._saw_claim, keep=concerns))
            group.create_task(self._watch(RESOURCE_SLICES, self._saw_slice, fields=f"spec.driver={DRIVER}"))

    async def _serves_claims(self) -> bool:
        while True:
            try:
                return await self._client.serves(f"{RESOURCE_CLAIMS.group}/{RESOURCE_CLAIMS.version}")
            except (AimGpuError, OSError) as error:
                log.warning("operator.waits", extra={"data": {"reason": str(error)}})
                await asyncio.sleep(1.0)

    async def _watch(
        self, resource: Resource, saw: _Saw, *, fields: str = "", keep: Callable[[Object], bool] | None = None
    ) -> None:
        async for event in self._client.watch(resource, fields=fields, keep=keep):
            if event.type == "SYNCED":
                self._synced[resource.plural].set()
            else:
                event.object["metadata"].pop("managedFields", None)  # half of an object, and never looked at
                saw(event.type, event.object)

    def _watches(self, item: Mapping[str, Any]) -> bool:
        return not self._options.namespaces or item["metadata"]["namespace"] in self._options.namespaces

    def _saw_pod(self, kind: str, pod: Object) -> None:
        self._add((self._pods.remove if kind == "DELETED" else self._pods.put)(pod))

    def _saw_claim(self, kind: str, claim: Object) -> None:
        """What is left of a GPU changes for all that share it."""
        claims = self._gpus.claims
        changed = (claims.remove if kind == "DELETED" else claims.put)(claim)
        for each in (claim, *(other for place in changed for other in claims.holders(place))):
            self._add(self._pods.users_of(each))

    def _saw_slice(self, kind: str, item: Object) -> None:
        (self._gpus.devices.remove if kind == "DELETED" else self._gpus.devices.put)(item)

    def _saw_gpu_node(self, kind: str, item: Object) -> None:
        nodes = self._gpus.nodes
        others = (nodes.remove if kind == "DELETED" else nodes.put)(item)
        self._add(self._pods.limited_on(item["metadata"]["name"]))
        if others:  # pods that wait may now be known to wait for this
            self._add(self._pods.limited_on(""))

    def _saw_share(self, kind: str, share: Object) -> None:
        """One that was changed or deleted by hand is put right; one whose workload went while we were away is removed."""
        known = self._writer.saw(kind, share)
        if wanted := (known.get("spec") or {}).get("workload"):
            self._queue.add(Workload(share["metadata"]["namespace"], wanted["kind"], wanted["name"]))

    def _add(self, workloads: set[Workload]) -> None:
        for workload in workloads:
            self._queue.add(workload)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(_RESYNC_SECONDS)
            self._add(set(self._pods.workloads()))

    async def _reconcile(self, workload: Workload) -> None:
        pods = [pod for pod in self._pods.of(workload) if asks(pod, self._gpus)]
        await self._writer.write(workload, pods, self._gpus, dt.datetime.now(dt.UTC))


async def work(queue: WorkQueue[_Key], reconcile: Callable[[_Key], Awaitable[None]]) -> None:
    """Take keys and reconcile them for ever; a failure is logged and tried again later."""
    while True:
        key = await queue.take()
        try:
            await reconcile(key)
        except (TimeoutError, AimGpuError, OSError) as error:
            pause = queue.failed(key)
            log.warning("reconcile.failed", extra={"data": {"key": str(key), "reason": str(error), "again_seconds": pause}})
        else:
            queue.done(key)
