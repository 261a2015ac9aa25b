"""Follows what decides about pods, chooses a node for each that waits with our gate, and writes it: the hint, then the gate.

kube-scheduler allocates and binds. While this program does not run, admission gates nothing (`PLACER_LEASE`). What is gated
then waits for the next one, or for `aimgpu k8s ungate`.
"""

import asyncio
import contextlib
import datetime as dt
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aimgpu.errors import AimGpuError, ClusterFailed
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Kept, Key, Mirror, OnChange
from aimgpu.kubernetes.api.resources import LEASES, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES, VOLUME_CLAIMS, VOLUMES
from aimgpu.kubernetes.cluster.operator.leader import own_account
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions, PlacementForm
from aimgpu.kubernetes.cluster.placer.cluster_fleet import ClusterFleet, PodChoice
from aimgpu.kubernetes.cluster.placer.gpus import read_claim
from aimgpu.kubernetes.cluster.placer.pods import PodView, read_pod, row_of
from aimgpu.kubernetes.cluster.placer.policy import find_gap
from aimgpu.kubernetes.cluster.placer.rules import REQUIRED, read_node, required_affinity
from aimgpu.kubernetes.vocabulary.names import DRIVER, GROUP, HINT, PLACER_LEASE, UNHINTED

log = logging.getLogger(__name__)

_WRITERS = 16
_RENEW_SECONDS = 3.0
_POLICY_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # whether a pod has waited long enough
_PAUSE_SECONDS = 0.005  # events come in bunches
_AGAIN_SECONDS = 1.0
_REFUSALS = (400, 403, 422)  # by admission of others: another try would end the same way
_MANAGER = "aimgpu-placer"


class PodPlacer:
    """Writes into `reasons` why a pod waits with our gate. `counts`: of pods, since it runs."""

    def __init__(self, client: Client, options: OperatorOptions, identity: str, reasons: dict[Key, str]) -> None:
        self._client = client
        self._options = options
        self._identity = identity
        self._reasons = reasons
        self._fleet = ClusterFleet()
        self._wake = asyncio.Event()
        self._writing: dict[Key, asyncio.Task[None]] = {}
        self._last: dict[str, asyncio.Task[None]] = {}  # of these, by node
        self._slots = asyncio.Semaphore(_WRITERS)
        self._since: dict[Key, float] = {}  # pods that found no node, and when they first did not
        self._refused: dict[Key, int] = {}  # with `freed` of the fleet then
        self._gap: str | None = "not checked yet"
        self.counts = dict.fromkeys(("hinted", "skipped", "placed", "placed-elsewhere"), 0)
        fleet = self._fleet
        self._mirrors = (
            Mirror(client, NODES, read_node, on_change=self._saw(lambda key, now: fleet.put_node(key[1], now))),
            Mirror(
                client,
                RESOURCE_SLICES,
                lambda item: dict(item["spec"]),
                fields=f"spec.driver={DRIVER}",
                on_change=self._saw(lambda key, now: fleet.put_slice(key[1], now)),
            ),
            Mirror(client, RESOURCE_CLAIMS, read_claim, on_change=self._saw(fleet.put_claim)),
            Mirror(client, PODS, read_pod, on_change=self._saw_pod),
        )

    async def run(self) -> None:
        """For ever. Where the policy is missing, pods are let go without a hint and none is gated."""
        async with asyncio.TaskGroup() as group:
            for mirror in self._mirrors:
                group.create_task(mirror.run())
            await self._check_policy()
            for mirror in self._mirrors:
                await mirror.synced.wait()
            log.info("placer.synced", extra={"data": {"waiting": len(self._fleet.waiting()), "off": self._gap}})
            group.create_task(self._keep_checking())
            group.create_task(self._keep_lease())
            await self._place(group)

    async def _place(self, group: asyncio.TaskGroup) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):  # `wait_for` loses a cancellation until Python 3.12
                    await self._wake.wait()
            await asyncio.sleep(_PAUSE_SECONDS)
            self._wake.clear()
            for pod in self._fleet.waiting():
                await asyncio.sleep(0)  # leases and watches go on while many are looked at
                if not self._fleet.waits(pod) or pod.key in self._writing or (choice := await self._choose(pod)) is None:
                    continue
                await self._slots.acquire()
                earlier = self._last.get(choice.node) if choice.node else None
                self._writing[pod.key] = self._last[choice.node] = group.create_task(self._write(pod, choice, earlier))

    async def _choose(self, pod: PodView) -> PodChoice | None:
        """None: it waits on."""
        if self._gap is not None:
            return PodChoice(skipped=f"placement is off: {self._gap}")
        if self._refused.get(pod.key) != self._fleet.freed:
            choice = await self._evaluate(pod)
            if choice is None or not choice.waits:
                return choice
            self._refused[pod.key], self._reasons[pod.key] = self._fleet.freed, choice.waits
        now = asyncio.get_running_loop().time()
        waiting = self._options.waiting_seconds
        if waiting is None or now - self._since.setdefault(pod.key, now) < waiting:
            return None
        return PodChoice(skipped=f"waited {waiting:.0f} s: {self._reasons[pod.key]}")

    async def _evaluate(self, pod: PodView) -> PodChoice | None:
        """Evaluate one pod; a pod that cannot be read does not stop the others."""
        try:
            volumes = await self._read_volumes(pod)
        except (TimeoutError, AimGpuError, OSError) as error:  # the next look tries again
            log.warning("placer.volumes_not_read", extra={"data": {"pod": "/".join(pod.key), "reason": str(error)}})
            return None
        try:
            return self._fleet.choose(pod, volumes)
        except Exception:
            log.exception("placer.not_evaluated", extra={"data": {"pod": "/".join(pod.key)}})
            self._fleet.forget(pod.key)
            return PodChoice(skipped="it cannot be evaluated")

    async def _read_volumes(self, pod: PodView) -> list[Sequence[Object]]:
        """Selector terms of the volumes that the pod's claims are bound to; those that are not bound yet restrict nothing."""
        found: list[Sequence[Object]] = []
        for volume in pod.waiting["spec"].get("volumes") or ():
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            claim = await self._client.find(VOLUME_CLAIMS, name, pod.key[0]) if name else None
            bound = ((claim or {}).get("spec") or {}).get("volumeName")
            there = await self._client.find(VOLUMES, bound) if bound else None
            required = (((there or {}).get("spec") or {}).get("nodeAffinity") or {}).get("required") or {}
            if required.get("nodeSelectorTerms"):
                found.append(required["nodeSelectorTerms"])
        return found

    async def _write(self, pod: PodView, choice: PodChoice, earlier: asyncio.Task[None] | None) -> None:
        """After the `earlier` one for this node: in another order kube-scheduler would give them other devices than guessed."""
        if earlier is not None:
            await asyncio.wait([earlier])
        namespace, name = pod.key
        node = choice.node
        if not node:
            self._fleet.leave(pod.key)
        try:
            if node and self._options.placement is PlacementForm.HINT:
                body = {"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}}
                try:
                    await self._client.patch(PODS, name, body, namespace, subresource="status", manager=_MANAGER)
                except ClusterFailed as error:
                    if error.status not in _REFUSALS:
                        raise
                    self._fleet.forget(pod.key)
                    self._fleet.leave(pod.key)
                    choice = PodChoice(skipped=f"the hint was refused: {error}")
            body = _release(pod, choice, self._options.placement)
            await self._client.patch(PODS, name, body, namespace, manager=_MANAGER)
            self.counts["hinted" if choice.node else "skipped"] += 1
        except (
            TimeoutError,
            AimGpuError,
            OSError,
        ) as error:  # it went, or it is tried again
            log.warning("placer.not_written", extra={"data": {"pod": "/".join(pod.key), "reason": str(error)}})
            self._fleet.forget(pod.key)
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._wake.set)
            await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            if self._last.get(node) is self._writing.pop(pod.key):
                del self._last[node]
            self._slots.release()

    def _saw(self, put: Callable[[Key, Kept | None], None]) -> OnChange[Kept]:
        def saw(key: Key, _before: Kept | None, now: Kept | None) -> None:
            put(key, now)
            self._wake.set()

        return saw

    def _saw_pod(self, key: Key, before: PodView | None, now: PodView | None) -> None:
        self._fleet.put_pod(key, now)
        if now is None or not now.waiting:
            for known in (self._reasons, self._since, self._refused):
                known.pop(key, None)
        if before is not None and not before.node and now is not None and now.node and now.hinted:
            self.counts["placed"] += 1
            if now.node != now.hinted:
                self.counts["placed-elsewhere"] += 1
                data = {"pod": "/".join(key), "hint": now.hinted, "node": now.node}
                log.info("placer.placed_elsewhere", extra={"data": data})
        self._wake.set()

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(_POLICY_SECONDS)
            await self._check_policy()

    async def _check_policy(self) -> None:
        with contextlib.suppress(TimeoutError, AimGpuError, OSError):  # the server is away: nothing can be written either
            gap = await find_gap(self._client, self._options.namespace)
            if gap != self._gap:
                log.log(logging.INFO if gap is None else logging.ERROR, "placer.policy", extra={"data": {"off": gap}})
            self._gap = gap
            self._wake.set()

    async def _keep_lease(self) -> None:
        """Admission gates pods while it is renewed."""
        owners = None
        while True:
            with contextlib.suppress(TimeoutError, AimGpuError, OSError):
                owners = owners or await own_account(self._client, self._options.namespace)
                if self._gap is None:
                    await self._renew(owners)
            await asyncio.sleep(_RENEW_SECONDS)

    async def _renew(self, owners: Sequence[Object]) -> None:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata = {
            "name": PLACER_LEASE,
            "ownerReferences": owners,
            "annotations": {f"{GROUP}/{name}": str(count) for name, count in self.counts.items()},
        }
        spec = {"holderIdentity": self._identity, "renewTime": now}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        await self._client.patch(LEASES, PLACER_LEASE, body, self._options.namespace, kind="apply", manager=_MANAGER)


def _release(pod: PodView, choice: PodChoice, form: PlacementForm | None) -> Object:
    """The patch that takes the gate: ours is the last."""
    spec: Object = {"schedulingGates": None}
    if choice.node and form is PlacementForm.AFFINITY:
        spec["affinity"] = {"nodeAffinity": {REQUIRED: _pinned(pod.waiting["spec"], choice.node)}}
    note = {HINT: choice.node} if choice.node else {UNHINTED: choice.skipped}
    return {"metadata": {"uid": pod.uid, "annotations": note}, "spec": spec}


def _pinned(spec: Mapping[str, Any], node: str) -> Object:
    """The pod's own terms, each narrowed to the node: of a gated pod they may be narrowed only."""
    own: Sequence[Object] = (required_affinity(spec) or {}).get("nodeSelectorTerms") or [{}]
    return {"nodeSelectorTerms": [{**term, "matchFields": [*(term.get("matchFields") or ()), row_of(node)]} for term in own]}
