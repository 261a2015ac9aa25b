"""Claims for seats, completed with what KAI granted their pods."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Device
from aimgpu.errors import Conflict
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import CONFIG_MAPS, PODS
from aimgpu.kubernetes.node.dra_driver.claims import Allocated, DraClaim
from aimgpu.kubernetes.node.kai.granted import KaiGrant, config_map_of, find_partition, read_grant
from aimgpu.kubernetes.node.kai.seats import is_seat
from aimgpu.kubernetes.vocabulary.names import KAI_RESERVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class KaiClaims:
    """Reads a pod and its ConfigMap for each claim that is prepared."""

    client: Client
    read_devices: Callable[[], Sequence[Device]]

    async def complete(self, found: Object, claim: DraClaim) -> DraClaim:
        """The claim with GPUs and bytes in place of its seat. Raises Conflict: the kubelet asks again."""
        if not any(is_seat(one.device) for one in claim.allocated):
            return claim
        grant = await self._read_grant(found, claim)
        devices = await asyncio.to_thread(self.read_devices)
        allocated = tuple(each for one in claim.allocated for each in _complete(one, grant, devices))
        return replace(claim, allocated=allocated)

    async def _read_grant(self, found: Object, claim: DraClaim) -> KaiGrant:
        users = [user for user in (found["status"].get("reservedFor") or ()) if user.get("resource") == "pods"]
        if len(users) != 1:
            raise Conflict(f"claim {claim.label} is for {len(users)} pods; a part that KAI-Scheduler granted is for one")
        pod = await self.client.get(PODS, users[0]["name"], claim.namespace)
        if pod["metadata"]["uid"] != users[0]["uid"]:
            raise Conflict(f"pod {claim.namespace}/{users[0]['name']} was replaced by another of its name")
        config_map = await self.client.get(CONFIG_MAPS, config_map_of(pod), claim.namespace)
        reservations, _ = await self.client.list(PODS, KAI_RESERVATIONS)
        return read_grant(pod, config_map, reservations)


def _complete(one: Allocated, grant: KaiGrant, devices: Sequence[Device]) -> list[Allocated]:
    if not is_seat(one.device):
        return [one]
    partitions = [find_partition(name, devices) for name in grant.devices]
    return [replace(one, partition_id=each.id, memory_bytes=grant.memory_bytes(each)) for each in partitions]
