"""Keeps the ResourceSlices of this node as they should be, and finds out which features the API server lacks."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aimgpu.errors import ClusterConflict, ClusterFailed
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DEVICE_CLASSES, RESOURCE_SLICES
from aimgpu.kubernetes.node.dra_driver.resource_slices import Features
from aimgpu.kubernetes.vocabulary.names import DRIVER, TYPE, TYPE_DIVISIBLE, TYPE_SHARED, WHOLE_CLASS

log = logging.getLogger(__name__)


async def require_claims(client: Client) -> None:
    """Raises ClusterFailed where the server has no resource claims, or not in the version that this driver writes."""
    needed = f"{RESOURCE_SLICES.group}/{RESOURCE_SLICES.version}"
    if not await client.serves(needed):
        major, minor, _ = await client.version()
        raise ClusterFailed(
            f"the API server ({major}.{minor}) does not serve {needed}; Kubernetes does from 1.34 on",
            hint="Run the device plugin instead: --no-dra --device-plugin FILE.",
        )


@dataclass(slots=True, kw_only=True)
class Publisher:
    """A pool has one generation; slices of an older one are ignored by the scheduler once a newer one is there."""

    client: Client
    node: str
    node_uid: str | None = None
    features: Features = field(default_factory=Features)
    _published: list[dict[str, Any]] | None = None
    _kept: dict[str, Object] = field(default_factory=dict)  # specs by name, as the server has them

    async def publish(self, specs: Sequence[Mapping[str, Any]]) -> bool:
        """Make the node's slices these; whether the server took all of it.

        False: a feature is missing (`features` says so now), and the caller should build the slices again.
        """
        wanted = [dict(spec) for spec in specs]
        if wanted == self._published:
            return True
        existing = {found["metadata"]["name"]: found for found in await self._list()}
        if self._is_published(wanted, existing):
            self._published, self._kept = wanted, {name: found["spec"] for name, found in existing.items()}
            return True
        generation = 1 + max((found["spec"]["pool"]["generation"] for found in existing.values()), default=0)
        pool = {"name": self.node, "generation": generation, "resourceSliceCount": len(wanted)}
        complete = True
        self._kept = {}
        for number, spec in enumerate(wanted):
            name = self._name(number)
            answer = await self._write(name, {**spec, "pool": pool}, existing.pop(name, None))
            self._kept[name] = answer["spec"]
            complete = self._learn(spec, answer["spec"]) and complete
        for name in existing:
            await self.client.delete(RESOURCE_SLICES, name)
        self._published = wanted if complete else None
        log.info("slices.published", extra={"data": {"generation": generation, "slices": len(wanted)}})
        return complete

    async def withdraw(self) -> None:
        """When the driver is removed; the kubelet would do it too, after a while."""
        for found in await self._list():
            await self.client.delete(RESOURCE_SLICES, found["metadata"]["name"])
        self._published = None

    async def single_device(self) -> bool | None:
        """Whether a GPU is one device in the slices that are published; None where they do not show it."""
        devices = [device for found in await self._list() for device in found["spec"].get("devices") or ()]
        types = {device.get("attributes", {}).get(TYPE, {}).get("string") for device in devices}
        return TYPE_DIVISIBLE in types if types & {TYPE_DIVISIBLE, TYPE_SHARED} else None

    def forget(self) -> None:
        """Look at the next `publish` what is there: another program may have changed it."""
        self._published = None

    def saw(self, name: str, spec: Mapping[str, Any] | None) -> bool:
        """A change of a slice of the node (None: it is gone); whether they are to be published again.

        The kubelet deletes them when it starts, and anybody with the right may edit them. Our own former writes are older.
        """
        kept = self._kept.get(name)
        if self._published is None or kept is None:
            return False
        edited = spec != kept and ((spec or {}).get("pool") or {}).get("generation", 0) >= kept["pool"]["generation"]
        lost = spec is None or edited
        if lost:
            self.forget()
        return lost

    def _is_published(self, wanted: Sequence[Mapping[str, Any]], existing: Mapping[str, Object]) -> bool:
        """Whether these are exactly what the server has: written by an agent before, and not changed since."""
        if set(existing) != {self._name(number) for number in range(len(wanted))}:
            return False
        pools = [found["spec"]["pool"] for found in existing.values()]
        owners = [(found["metadata"].get("ownerReferences") or [{}])[0].get("uid") for found in existing.values()]
        return (
            all(pool == {**pools[0], "name": self.node, "resourceSliceCount": len(wanted)} for pool in pools)
            and set(owners) <= {self.node_uid}
            and all(_as_written(existing[self._name(number)]["spec"]) == spec for number, spec in enumerate(wanted))
        )

    @property
    def _own(self) -> str:
        return f"spec.nodeName={self.node},spec.driver={DRIVER}"

    def _name(self, number: int) -> str:
        return f"{self.node}-{DRIVER}-{number}"

    async def _list(self) -> list[Object]:
        found, _ = await self.client.list(RESOURCE_SLICES, fields=self._own)
        return found

    async def _write(self, name: str, spec: dict[str, Any], existing: Object | None) -> Object:
        metadata: dict[str, Any] = {"name": name}
        if self.node_uid:
            owner = {"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": self.node_uid, "controller": True}
            metadata["ownerReferences"] = [owner]
        body: Object = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}
        if existing is None:
            try:
                return await self.client.create(RESOURCE_SLICES, body)
            except ClusterConflict:
                existing = await self.client.get(RESOURCE_SLICES, name)
        metadata["resourceVersion"] = existing["metadata"]["resourceVersion"]
        return await self.client.replace(RESOURCE_SLICES, body)

    def _learn(self, wanted: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
        """Fields of a feature that is switched off are dropped without an error."""
        lost = _lost_fields(wanted, kept)
        if not lost:
            return True
        self.features = replace(
            self.features,
            consumable_capacity=self.features.consumable_capacity and "allowMultipleAllocations" not in lost,
            partitionable_devices=self.features.partitionable_devices and not lost & {"sharedCounters", "consumesCounters"},
            device_taints=self.features.device_taints and "taints" not in lost,
        )
        self.report()
        return False

    async def look_at_classes(self) -> None:
        """The server drops the name that plain limits need where that feature is off. Without the class nothing is known."""
        try:
            found = await self.client.find(DEVICE_CLASSES, WHOLE_CLASS)
        except ClusterFailed:
            return  # not allowed to look, or not now
        named = found is None or bool(found["spec"].get("extendedResourceName"))
        if named != self.features.extended_resources:
            self.features = replace(self.features, extended_resources=named)
            if not named:
                self.report()

    def lacks_device_status(self) -> None:
        """Found where a claim's status was written."""
        self.features = replace(self.features, device_status=False)
        self.report()

    def report(self) -> None:
        """Log what the server lacks."""
        log.warning("server.lacks", extra={"data": {"features": list(self.features.missing())}})


def _as_written(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Without the pool, and without the time that the server adds to a taint."""
    devices = []
    for device in spec.get("devices") or ():
        taints = [{name: value for name, value in taint.items() if name != "timeAdded"} for taint in device.get("taints") or ()]
        devices.append({**device, "taints": taints} if taints else device)
    found = {name: value for name, value in spec.items() if name != "pool"}
    return {**found, "devices": devices} if "devices" in spec else found


def _lost_fields(wanted: Mapping[str, Any], kept: Mapping[str, Any]) -> set[str]:
    lost = {name for name in ("sharedCounters",) if wanted.get(name) and not kept.get(name)}
    there = {device["name"]: device for device in kept.get("devices") or ()}
    for device in wanted.get("devices") or ():
        found = there.get(device["name"], {})
        lost |= {
            name
            for name in ("allowMultipleAllocations", "consumesCounters", "taints")
            if device.get(name) and not found.get(name)
        }
    return lost
