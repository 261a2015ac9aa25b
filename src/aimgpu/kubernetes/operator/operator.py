"""The operator's loops: watches fill caches and queue keys, one worker after another reconciles them."""

import asyncio
import datetime as dt
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.admission.claims import MANAGED_BY
from aimgpu.kubernetes.api_client import Client, Object, Resource
from aimgpu.kubernetes.custom_resources import GPU_SHARES
from aimgpu.kubernetes.names import DRIVER, LABEL_SHARE
from aimgpu.kubernetes.operator.claim_index import ClaimIndex, DeviceIndex
from aimgpu.kubernetes.operator.claim_templates import TemplateCollector
from aimgpu.kubernetes.operator.definitions import keep_definitions
from aimgpu.kubernetes.operator.leader import Leader
from aimgpu.kubernetes.operator.options import OperatorOptions
from aimgpu.kubernetes.operator.plan_loop import PlanLoop
from aimgpu.kubernetes.operator.share_writer import ShareWriter
from aimgpu.kubernetes.operator.shares import Workload, workload_of
from aimgpu.kubernetes.operator.work_queue import WorkQueue
from aimgpu.kubernetes.standard_resources import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES

log = logging.getLogger(__name__)

_WORKERS = 16  # they mostly wait for the API server
_RESYNC_SECONDS = 300.0
_Key = TypeVar("_Key", bound=Hashable)


class Operator:
    """Leads or waits to. All state is rebuilt from the API server when it starts to lead."""

    def __init__(self, client: Client, options: OperatorOptions) -> None:
        self._client = client
        self._options = options
        identity = f"{socket.gethostname()}-{os.getpid()}"
        self._leader = Leader(client, namespace=options.namespace, name="aim-gpu-sharing-operator", identity=identity)

    async def run(self) -> None:
        """For ever: an operator that lost the lead waits for it again."""
        while True:
            await self._leader.lead(self._work)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_definitions(self._client))
            shares = ShareLoop(self._client, self._options)
            group.create_task(shares.run())
            keep = self._options.keep_templates_seconds
            group.create_task(TemplateCollector(self._client, shares.used_templates, keep).run())
            group.create_task(PlanLoop(self._client).run())


class ShareLoop:
    """One GpuShare per workload, kept equal to what its pods and claims say."""

    def __init__(self, client: Client, options: OperatorOptions) -> None:
        self._client = client
        self._options = options
        self._pods: dict[tuple[str, str], Object] = {}
        self._claims = ClaimIndex()
        self._devices = DeviceIndex()
        self._members: dict[Workload, set[tuple[str, str]]] = {}
        self._queue: WorkQueue[Workload] = WorkQueue()
        self._synced = [asyncio.Event() for _ in range(4)]
        self._writer = ShareWriter(client)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(0, PODS, self._saw_pod, labels=f"{LABEL_SHARE}=true"))
            ours = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
            group.create_task(self._watch(1, RESOURCE_CLAIMS, self._saw_claim, labels=ours))
            group.create_task(self._watch(2, RESOURCE_SLICES, self._saw_slice, fields=f"spec.driver={DRIVER}"))
            group.create_task(self._watch(3, GPU_SHARES, self._saw_share))
            group.create_task(self._resync())
            for event in self._synced:  # a half-filled cache would say that shares are gone
                await event.wait()
            log.info("operator.synced", extra={"data": {"pods": len(self._pods), "claims": len(self._claims)}})
            for _ in range(_WORKERS):
                group.create_task(work(self._queue, self._reconcile))

    def used_templates(self) -> set[tuple[str, str]] | None:
        """Claim templates that pods refer to; None: the pods are not known yet, or not all are looked at."""
        if not self._synced[0].is_set() or self._options.namespaces:
            return None
        claims = ((key[0], claim) for key, pod in self._pods.items() for claim in pod["spec"].get("resourceClaims") or ())
        return {(namespace, str(claim.get("resourceClaimTemplateName"))) for namespace, claim in claims}

    async def _watch(
        self, number: int, resource: Resource, saw: Callable[[str, Object], None], *, labels: str = "", fields: str = ""
    ) -> None:
        async for event in self._client.watch(resource, labels=labels, fields=fields):
            if event.type == "SYNCED":
                self._synced[number].set()
            elif resource is RESOURCE_CLAIMS or not resource.namespaced or self._watches(event.object["metadata"]["namespace"]):
                event.object["metadata"].pop("managedFields", None)  # half of an object, and never looked at
                saw(event.type, event.object)

    def _watches(self, namespace: str) -> bool:
        return not self._options.namespaces or namespace in self._options.namespaces

    def _saw_pod(self, kind: str, pod: Object) -> None:
        key = _key(pod)
        if kind == "DELETED":  # one that went in a gap of the watch comes with its name only
            pod = self._pods.get(key, pod)
        workload = workload_of(pod)
        members = self._members.setdefault(workload, set())
        if kind == "DELETED":
            self._pods.pop(key, None)
            members.discard(key)
            if not members:
                del self._members[workload]
        else:
            self._pods[key] = pod
            members.add(key)
        self._queue.add(workload)

    def _saw_claim(self, kind: str, claim: Object) -> None:
        """What is left of a GPU changes for all that share it."""
        if kind == "DELETED":
            claim = self._claims.get(*_key(claim)) or claim
        changed = (self._claims.remove if kind == "DELETED" else self._claims.put)(claim)
        sharing = [other for place in changed for other in self._claims.holders(place)]
        for each in (claim, *sharing):
            namespace = each["metadata"]["namespace"]
            for owner in each["metadata"].get("ownerReferences") or ():
                pod = self._pods.get((namespace, owner["name"])) if owner["kind"] == "Pod" else None
                if pod is not None:
                    self._queue.add(workload_of(pod))

    def _saw_slice(self, kind: str, item: Object) -> None:
        (self._devices.remove if kind == "DELETED" else self._devices.put)(item)

    def _saw_share(self, kind: str, share: Object) -> None:
        """One that was changed or deleted by hand is put right; one whose workload went while we were away is removed."""
        known = self._writer.saw(kind, share)
        if wanted := (known.get("spec") or {}).get("workload"):
            self._queue.add(Workload(share["metadata"]["namespace"], wanted["kind"], wanted["name"]))

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(_RESYNC_SECONDS)
            for workload in self._members:
                self._queue.add(workload)

    async def _reconcile(self, workload: Workload) -> None:
        pods = [self._pods[key] for key in self._members.get(workload, ()) if key in self._pods]
        await self._writer.write(workload, pods, self._claims, self._devices, dt.datetime.now(dt.UTC))


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


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]
