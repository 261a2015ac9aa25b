"""Claims between the kubelet's calls: a lost ledger is rebuilt, statuses are written, unused claims are released."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aimgpu.errors import AimGpuError, Conflict, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import RESOURCE_CLAIMS
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.agent.survey import Survey
from aimgpu.kubernetes.node.dra_driver.checkpoint import ClaimRecord, ClaimState
from aimgpu.kubernetes.node.dra_driver.claim_status import ObservedNode, device_statuses, write_status
from aimgpu.kubernetes.node.dra_driver.claims import DraClaim, read_claim
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.dra_driver.publisher import Publisher
from aimgpu.ledger import Ledger

log = logging.getLogger(__name__)

_STALE_SECONDS = 60.0  # a claim that is gone from the API may still be used by containers that are ending


@dataclass(slots=True, kw_only=True)
class ClaimUpkeep:
    """`complete`: what a claim does not say itself."""

    options: Options
    client: Client
    preparation: Preparation
    ledger: Ledger
    publisher: Publisher
    complete: Callable[[Object, DraClaim], Awaitable[DraClaim]]
    _gone_since: dict[str, float] = field(default_factory=dict)
    _look_for_stale: float = 0.0
    _told: dict[str, object] = field(default_factory=dict)  # statuses as last written

    async def adopt_unrecorded(self) -> None:
        """A ledger that was lost while pods run is rebuilt from their CDI files and claims.

        Raises Conflict where it cannot be: an empty ledger would let their files be deleted and their room be given away.
        """
        for uid, label in (await asyncio.to_thread(self.preparation.unrecorded)).items():
            namespace, _, name = label.partition("/")
            try:
                if not label:
                    raise Conflict(f"the CDI file of claim {uid} was written by another build and does not name the claim")
                found = await self.client.find(RESOURCE_CLAIMS, name, namespace)
                if found is None or found["metadata"]["uid"] != uid or not (found.get("status") or {}).get("reservedFor"):
                    continue  # no pod has it any more
                claim = read_claim(found, uid, self.options.node)
                await asyncio.to_thread(self.preparation.adopt, await self.complete(found, claim))
            except AimGpuError as error:
                raise Conflict(
                    f"the ledger in {self.options.state} does not know claim {label or uid}, which was prepared on this node, "
                    f"and cannot be rebuilt: {error.message}",
                    hint=f"Give the agent its former state folder back, or drain {self.options.node}: its pods keep running.",
                ) from error

    async def write_statuses(self, survey: Survey | None) -> None:
        """Of claims that were prepared or whose GPU changed its health since."""
        if not self.publisher.features.device_status:
            return
        unhealthy = survey.unhealthy if survey else {}
        known = await asyncio.to_thread(self.preparation.prepared)
        # One that is being prepared has no devices yet: an empty status would take back the reason of a refusal.
        records = [record for record in known if record.state is ClaimState.PREPARED]
        grants = await asyncio.to_thread(self.ledger.grants)
        node = ObservedNode(devices=survey.devices if survey else (), unhealthy=unhealthy, now=datetime.now(UTC))
        for record in records:
            held = [grant for grant in grants if grant.instance_id in record.tenants]
            facts = ([(grant.id, grant.level, unhealthy.get(grant.device_id)) for grant in held], record.devices)
            if facts != self._told.get(record.uid):
                if not await write_status(self.client, record, device_statuses(record, held, node)):
                    self.publisher.lacks_device_status()
                    return
                self._told[record.uid] = facts
        present = {record.uid for record in records}
        self._told = {uid: facts for uid, facts in self._told.items() if uid in present}

    async def release_stale(self, now: float) -> None:
        """Release claims that were deleted while the kubelet or this agent was down."""
        if now < self._look_for_stale:
            return
        self._look_for_stale = now + _STALE_SECONDS / 2
        for record in await asyncio.to_thread(self.preparation.prepared):
            if not await self._is_gone(record):
                self._gone_since.pop(record.uid, None)
            elif now - self._gone_since.setdefault(record.uid, now) >= _STALE_SECONDS:
                log.warning("claim.stale", extra={"data": {"claim": record.label, "uid": record.uid}})
                await asyncio.to_thread(self.preparation.unprepare, record.uid)
                self._gone_since.pop(record.uid, None)

    async def _is_gone(self, record: ClaimRecord) -> bool:
        try:
            found = await self.client.get(RESOURCE_CLAIMS, record.name, record.namespace)
        except NotFoundInCluster:
            return True
        return bool(found["metadata"]["uid"] != record.uid)
