"""One leader among replicas, by a Lease: taken when it is free or has run out, renewed while leading, given up when leaving."""

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aimgpu.errors import AimGpuError, ClusterConflict, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import LEASES

log = logging.getLogger(__name__)

# A leader that is gone is replaced 13 to 14 seconds after it last renewed; one that cannot renew stops after nine.
DURATION_SECONDS = 12
_RENEW_SECONDS = 3.0
_RETRY_SECONDS = 1.0


class Leader:
    """Times of other machines are not compared: a Lease has run out when it has not changed here for its duration."""

    def __init__(
        self, client: Client, *, namespace: str, name: str, identity: str, clock: Callable[[], float] | None = None
    ) -> None:
        self._client = client
        self._namespace, self._name, self._identity = namespace, name, identity
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._seen: tuple[object, float] | None = None  # what the Lease said, and since when
        self._owners: list[Object] | None = None  # of the Lease; None: not known yet
        self._held: Object | None = None  # the Lease as we wrote it last: it is renewed without reading it

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait until leading, then run `work` for as long as it leads; ends when `work` ends or the Lease is lost."""
        while not await self._try(self._take):  # noqa: ASYNC110 - the API server is asked, nothing here can be awaited
            await asyncio.sleep(_RETRY_SECONDS)
        log.info("leader.elected", extra={"data": {"identity": self._identity}})
        working = asyncio.ensure_future(work())
        renewing = asyncio.ensure_future(self._renew())
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, renewing):
                task.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)
            await self._try(self._give_up)
        if working.done() and not working.cancelled() and (error := working.exception()) is not None:
            raise error

    async def _renew(self) -> None:
        """Returns when the Lease was lost: to another, or because it could not be renewed in time."""
        renewed = self._clock()
        while self._clock() - renewed < DURATION_SECONDS - _RENEW_SECONDS:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                if not await self._take():
                    break
                renewed = self._clock()
            except (ClusterFailed, OSError) as error:
                log.warning("leader.not_renewed", extra={"data": {"reason": str(error)}})
        log.warning("leader.lost", extra={"data": {"identity": self._identity}})

    async def _try(self, step: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await step()
        except (AimGpuError, OSError) as error:
            log.warning("leader.unreachable", extra={"data": {"reason": str(error)}})
            return False

    async def _take(self) -> bool:
        """Whether the Lease is ours now."""
        if self._owners is None:
            self._owners = await own_account(self._client, self._namespace)
        lease, held = self._held or await self._client.find(LEASES, self._name, self._namespace), self._held is not None
        self._held = None
        try:
            if lease is None:
                metadata = {"name": self._name, "ownerReferences": self._owners}
                body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
                self._held = await self._client.create(LEASES, {**body, "spec": self._spec(transitions=0)}, self._namespace)
                return True
            spec = lease.get("spec") or {}
            if spec.get("holderIdentity") not in (self._identity, "", None) and not self._has_run_out(spec):
                return False
            other = spec.get("holderIdentity") != self._identity
            transitions = int(spec.get("leaseTransitions") or 0) + int(other)
            fresh = {**lease, "spec": {**self._spec(transitions=transitions), **({} if other else _since(spec))}}
            self._held = await self._client.replace(LEASES, fresh, self._namespace)  # refused where another was faster
        except (ClusterConflict, NotFoundInCluster):
            return await self._take() if held else False
        return True

    def _has_run_out(self, spec: dict[str, Any]) -> bool:
        said = (spec.get("holderIdentity"), spec.get("renewTime"))
        if self._seen is None or self._seen[0] != said:
            self._seen = (said, self._clock())
            return False
        return self._clock() - self._seen[1] > float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)

    async def _give_up(self) -> bool:
        """So that the next one need not wait."""
        self._held = None
        lease = await self._client.find(LEASES, self._name, self._namespace)
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            await self._client.replace(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}}, self._namespace)
        return True

    def _spec(self, *, transitions: int) -> dict[str, Any]:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


async def own_account(client: Client, namespace: str, account: str = "") -> list[Object]:
    """An owner reference to our service account: what it owns goes when the chart is uninstalled.

    Empty for other users, and for accounts of another name than this.
    """
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    review = await client.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=body)
    user = (review.get("status") or {}).get("userInfo") or {}
    prefix, _, name = str(user.get("username") or "").rpartition(":")
    if prefix != f"system:serviceaccount:{namespace}" or not user.get("uid") or account not in ("", name):
        return []
    return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": user["uid"]}]


def _since(spec: dict[str, Any]) -> dict[str, Any]:
    return {"acquireTime": spec["acquireTime"]} if spec.get("acquireTime") else {}
