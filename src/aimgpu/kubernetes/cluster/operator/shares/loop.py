"""Follows pods, claims, published GPUs and nodes, and keeps one GpuShare per workload equal to what they say."""

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, TypeVar

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror, OnChange, as_it_is
from aimgpu.kubernetes.api.resources import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.operator.evictions import replace_stranded, why_stranded
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions
from aimgpu.kubernetes.cluster.operator.pod_gpus import concerns, is_finished, may_ask, node_of
from aimgpu.kubernetes.cluster.operator.shares.indexes import KnownGpus, PodIndex
from aimgpu.kubernetes.cluster.operator.shares.rows import asks
from aimgpu.kubernetes.cluster.operator.shares.workloads import Workload
from aimgpu.kubernetes.cluster.operator.shares.writer import ShareWriter
from aimgpu.kubernetes.cluster.operator.work_queue import WorkQueue
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES
from aimgpu.kubernetes.vocabulary.names import DRIVER

log = logging.getLogger(__name__)

_WORKERS = 16  # they mostly wait for the API server
_RESYNC_SECONDS = 300.0
_WAITING_SECONDS = 30.0
_Key = TypeVar("_Key", bound=Hashable)


class ShareLoop:
    """All pods are watched, since only admission's have a label, and those that can hold no GPU are dropped as they come."""

    def __init__(self, client: Client, options: OperatorOptions) -> None:
        self._client = client
        self._options = options
        self._pods = PodIndex()
        self.reasons: dict[Key, str] = {}  # why pods wait with our gate, as the placer says
        self._gpus = KnownGpus(reasons=self.reasons)
        self.queue: WorkQueue[Workload] = WorkQueue()
        self._waiting: set[Workload] = set()  # with a pod that has no node
        places = sorted(options.namespaces)
        shares = Mirror(client, GPU_SHARES, as_it_is, namespaces=places, on_change=self._saw_share)
        self._writer = ShareWriter(client, shares)
        self._mirrors = (
            Mirror(client, PODS, as_it_is, select=may_ask, on_change=self._saw_pod),
            Mirror(client, RESOURCE_CLAIMS, as_it_is, select=concerns, on_change=self._saw_claim),
            Mirror(client, RESOURCE_SLICES, as_it_is, fields=f"spec.driver={DRIVER}", on_change=self._saw_slice),
            Mirror(client, GPU_NODES, as_it_is, on_change=self._saw_gpu_node),
            shares,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for mirror in self._mirrors:
                group.create_task(mirror.run())
            group.create_task(self._resync())
            group.create_task(self._look_at_waiting())
            for mirror in self._mirrors:  # half-filled ones would say that shares are gone
                await mirror.synced.wait()
            log.info("operator.synced", extra={"data": {"pods": len(self._pods), "claims": len(self._gpus.claims)}})
            for _ in range(_WORKERS):
                group.create_task(work(self.queue, self._reconcile))

    def listen(self, on_change: OnChange[Object]) -> None:
        """Another loop that pods, claims, slices and GpuNodes matter to: what they are is followed once."""
        for mirror in self._mirrors[:-1]:
            mirror.listen(on_change)

    def used_templates(self) -> set[tuple[str, str]] | None:
        """Claim templates that pods of the watched namespaces refer to; None: the pods are not known yet."""
        if not self._mirrors[0].synced.is_set():
            return None
        return {
            (str(pod["metadata"]["namespace"]), str(claim.get("resourceClaimTemplateName")))
            for pod in self._pods.all()
            for claim in pod["spec"].get("resourceClaims") or ()
        }

    def _watches(self, item: Mapping[str, Any]) -> bool:
        return not self._options.namespaces or item["metadata"]["namespace"] in self._options.namespaces

    def _saw_pod(self, _key: Key, before: Object | None, now: Object | None) -> None:
        if not self._watches(now or before or {}):
            return
        if now is not None:
            self._add(self._pods.put(now))
        elif before is not None:
            self._add(self._pods.remove(before))

    def _saw_claim(self, _key: Key, before: Object | None, now: Object | None) -> None:
        """What is left of a GPU changes for all that share it."""
        claims = self._gpus.claims
        claim = now or before or {}
        changed = (claims.remove if now is None else claims.put)(claim)
        for each in (claim, *(other for place in changed for other in claims.holders(place))):
            self._add(self._pods.users_of(each))

    def _saw_slice(self, _key: Key, before: Object | None, now: Object | None) -> None:
        devices = self._gpus.devices
        (devices.remove if now is None else devices.put)(now or before or {})

    def _saw_gpu_node(self, key: Key, before: Object | None, now: Object | None) -> None:
        nodes = self._gpus.nodes
        others = (nodes.remove if now is None else nodes.put)(now or before or {})
        self._add(self._pods.limited_on(key[1]))
        if others:  # pods that wait may now be known to wait for this
            self._add(self._pods.limited_on(""))

    def _saw_share(self, key: Key, before: Object | None, now: Object | None) -> None:
        """One that was changed or deleted by hand is put right; one whose workload went while we were away is removed."""
        if wanted := ((now or before or {}).get("spec") or {}).get("workload"):
            self.queue.add(Workload(key[0], wanted["kind"], wanted["name"]))

    def _add(self, workloads: set[Workload]) -> None:
        for workload in workloads:
            self.queue.add(workload)

    async def _look_at_waiting(self) -> None:
        """What is free for them changes with every pod of the cluster: it is shown now and then."""
        while True:
            await asyncio.sleep(_WAITING_SECONDS)
            self._add(set(self._waiting))

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(_RESYNC_SECONDS)
            self._add(set(self._pods.workloads()))

    async def _reconcile(self, workload: Workload) -> None:
        pods = [pod for pod in self._pods.of(workload) if asks(pod, self._gpus)]
        now = dt.datetime.now(dt.UTC)
        again = await self._writer.write(workload, pods, self._gpus, now)
        if again is not None:
            self.queue.add_after(workload, again)
        waits = any(not node_of(pod) and not is_finished(pod) for pod in pods)
        (self._waiting.add if waits else self._waiting.discard)(workload)
        for pod in pods:
            if (why := why_stranded(pod, self._gpus.claims)) is not None:
                await replace_stranded(self._client, pod, why, now)


async def work(queue: WorkQueue[_Key], reconcile: Callable[[_Key], Awaitable[None]]) -> None:
    """Take keys and reconcile them for ever; a failure is logged and tried again later."""
    while True:
        key = await queue.take()
        try:
            await reconcile(key)
        except (TimeoutError, AimGpuError, OSError) as error:
            pause = queue.failed(key)
            log.warning("reconcile.failed", extra={"data": {"key": str(key), "reason": str(error), "again_seconds": pause}})
        except Exception:  # the last edge: whatever is wrong with one workload's objects, the others are reconciled
            log.exception("reconcile.crashed", extra={"data": {"key": str(key), "again_seconds": queue.failed(key)}})
        else:
            queue.done(key)
