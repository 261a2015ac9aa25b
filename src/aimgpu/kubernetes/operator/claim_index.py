"""Claims and published devices by the keys that a share is computed from: its cost does not grow with the cluster."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from aimgpu.kubernetes.names import DRIVER, MEMORY
from aimgpu.kubernetes.quantities import parse_quantity

Object = dict[str, Any]
Key = tuple[str, str]  # namespace and name
Place = tuple[str, str]  # pool and device


class ClaimIndex:
    """All claims of the cluster: a GPU is shared by pods of any namespace."""

    def __init__(self, claims: Iterable[Object] = ()) -> None:
        self._claims: dict[Key, Object] = {}
        self._taken: Counter[Place] = Counter()
        self._holders: dict[Place, set[Key]] = {}
        for claim in claims:
            self.put(claim)

    def put(self, claim: Object) -> set[Place]:
        """Returns the devices of which more or less is taken now."""
        before = self._forget(_key(claim))
        self._claims[_key(claim)] = claim
        after = _consumed_by(claim)
        for place, count in after.items():
            self._taken[place] += count
            self._holders.setdefault(place, set()).add(_key(claim))
        return {place for place in before | after if before.get(place) != after.get(place)}

    def remove(self, claim: Object) -> set[Place]:
        """As `put`."""
        return set(self._forget(_key(claim)))

    def get(self, namespace: str, name: str | None) -> Object | None:
        return self._claims.get((namespace, name)) if name else None

    def taken_bytes(self, place: Place) -> int:
        """Of this device, by all claims."""
        return self._taken[place]

    def holders(self, place: Place) -> list[Object]:
        """The claims on this device."""
        return [self._claims[key] for key in self._holders.get(place, ())]

    def __len__(self) -> int:
        return len(self._claims)

    def _forget(self, key: Key) -> dict[Place, int]:
        claim = self._claims.pop(key, None)
        freed = _consumed_by(claim)
        for place, count in freed.items():
            self._taken[place] -= count
            self._holders[place].discard(key)
            if not self._holders[place]:
                del self._holders[place], self._taken[place]
        return freed


class DeviceIndex:
    """The devices of the ResourceSlices, by pool and name."""

    def __init__(self, slices: Iterable[Mapping[str, Any]] = ()) -> None:
        self._devices: dict[Place, Mapping[str, Any]] = {}
        self._published: dict[str, list[Place]] = {}  # by ResourceSlice
        for item in slices:
            self.put(item)

    def put(self, item: Mapping[str, Any]) -> None:
        self.remove(item)
        spec = item["spec"]
        pool = str((spec.get("pool") or {}).get("name"))
        found = {(pool, str(device["name"])): device for device in spec.get("devices") or ()}
        self._published[item["metadata"]["name"]] = list(found)
        self._devices |= found

    def remove(self, item: Mapping[str, Any]) -> None:
        for place in self._published.pop(item["metadata"]["name"], ()):
            self._devices.pop(place, None)

    def find(self, place: Place) -> Mapping[str, Any]:
        """Empty where it is not published."""
        return self._devices.get(place, {})


def results_of(claim: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """What the scheduler allocated of our devices."""
    allocation = ((claim or {}).get("status") or {}).get("allocation") or {}
    return [each for each in (allocation.get("devices") or {}).get("results") or () if each.get("driver") == DRIVER]


def consumed_bytes(result: Mapping[str, Any]) -> int:
    return parse_quantity((result.get("consumedCapacity") or {}).get(MEMORY) or 0)


def _consumed_by(claim: Mapping[str, Any] | None) -> dict[Place, int]:
    taken: dict[Place, int] = {}
    for result in results_of(claim):
        place = str(result["pool"]), str(result["device"])
        taken[place] = taken.get(place, 0) + consumed_bytes(result)
    return taken


def _key(item: Mapping[str, Any]) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]
