"""Pods, claims, devices and nodes by the keys that a share is computed from: its cost does not grow with the cluster."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, limits_of, node_of, results_of
from aimgpu.kubernetes.cluster.operator.shares.workloads import Workload, workload_of
from aimgpu.kubernetes.vocabulary.names import MEMORY

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

    def all(self) -> Collection[tuple[Place, Mapping[str, Any]]]:
        return self._devices.items()

    def find(self, place: Place) -> Mapping[str, Any]:
        """Empty where it is not published."""
        return self._devices.get(place, {})


class GpuNodeIndex:
    """What the device plugins of nodes offer and what pods hold of it, from the GpuNodes."""

    def __init__(self, gpu_nodes: Iterable[Mapping[str, Any]] = ()) -> None:
        self._status: dict[str, Mapping[str, Any]] = {}
        self._offering: Counter[str] = Counter()  # nodes, by resource
        self._held: dict[str, dict[Key, list[Mapping[str, Any]]]] = {}  # by node and pod
        for item in gpu_nodes:
            self.put(item)

    def put(self, gpu_node: Mapping[str, Any]) -> bool:
        """Whether other resources are offered now."""
        name = str(gpu_node["metadata"]["name"])
        before = self._forget(name)
        status = self._status[name] = gpu_node.get("status") or {}
        held = self._held[name] = {}
        for one in status.get("heldReplicas") or ():
            held.setdefault((one["namespace"], one["pod"]), []).append(one)
        after = self._names(name)
        self._offering.update(after)
        return before != after

    def remove(self, gpu_node: Mapping[str, Any]) -> bool:
        """As `put`."""
        return bool(self._forget(str(gpu_node["metadata"]["name"])))

    def is_offered(self, resource: str) -> bool:
        """By any node."""
        return self._offering[resource] > 0

    def offer(self, node: str, resource: str) -> Mapping[str, Any] | None:
        """What one replica is, as far as those of this name are alike on the node; None: the node does not offer it."""
        entries = [one for one in self._entries(node) if one["name"] == resource]
        if not entries:
            return None
        return {key: value for key, value in entries[0].items() if all(one.get(key) == value for one in entries)}

    def held(self, pod: Mapping[str, Any], resource: str) -> list[Mapping[str, Any]]:
        """Replicas of this name that its node reports for the pod."""
        return [one for one in self._held.get(node_of(pod), {}).get(_key(pod), ()) if one["resource"] == resource]

    def find_partition(self, node: str, partition: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """With its GPU; None: it is not there, or not any more."""
        return next(((gpu, part) for gpu, part in self._partitions(node) if part["id"] == partition), None)

    def only_partition(self, node: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The GPU and its partition where the node has one: then nothing else can be meant."""
        found = self._partitions(node)
        return found[0] if len(found) == 1 else None

    def _forget(self, node: str) -> set[str]:
        names = self._names(node)
        self._offering.subtract(names)
        self._offering += Counter()  # without those that nobody offers
        self._status.pop(node, None)
        self._held.pop(node, None)
        return names

    def _names(self, node: str) -> set[str]:
        return {str(one["name"]) for one in self._entries(node)}

    def _partitions(self, node: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return [(gpu, part) for gpu in self._status.get(node, {}).get("gpus") or () for part in gpu.get("partitions") or ()]

    def _entries(self, node: str) -> Iterable[Mapping[str, Any]]:
        return self._status.get(node, {}).get("resources") or ()


class PodIndex:
    """Pods by workload, by the claims that they name, and those with limits by node."""

    def __init__(self) -> None:
        self._pods: dict[Key, Object] = {}
        self._workloads: dict[Workload, set[Key]] = {}
        self._users: dict[Key, set[Key]] = {}  # by claim
        self._limited: dict[str, set[Key]] = {}  # by node; "": without one

    def put(self, pod: Object) -> set[Workload]:
        """Returns the workloads that have changed by it."""
        before = self.remove(pod)
        key = _key(pod)
        self._pods[key] = pod
        for group, name in self._groups(pod):
            group.setdefault(name, set()).add(key)
        return before | {workload_of(pod)}

    def remove(self, pod: Object) -> set[Workload]:
        """As `put`. The name is enough: one that went in a gap of the watch comes without the rest."""
        key = _key(pod)
        known = self._pods.pop(key, None)
        if known is None:
            return set()
        for group, name in self._groups(known):
            group[name].discard(key)
            if not group[name]:
                del group[name]
        return {workload_of(known)}

    def all(self) -> Iterable[Object]:
        return self._pods.values()

    def workloads(self) -> list[Workload]:
        return list(self._workloads)

    def of(self, workload: Workload) -> list[Object]:
        return [self._pods[key] for key in self._workloads.get(workload, ())]

    def users_of(self, claim: Object) -> set[Workload]:
        return {workload_of(self._pods[key]) for key in self._users.get(_key(claim), ())}

    def limited_on(self, node: str) -> set[Workload]:
        """With limits of extended resources."""
        return {workload_of(self._pods[key]) for key in self._limited.get(node, ())}

    def __len__(self) -> int:
        return len(self._pods)

    def _groups(self, pod: Object) -> list[tuple[dict[Any, set[Key]], Any]]:
        namespace = pod["metadata"]["namespace"]
        found: list[tuple[dict[Any, set[Key]], Any]] = [(self._workloads, workload_of(pod))]
        found += [(self._users, (namespace, name)) for name in {claim.name for claim in claims_of(pod)}]
        return [*found, (self._limited, node_of(pod))] if limits_of(pod) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpus:
    """What the API server knows of GPUs."""

    claims: ClaimIndex = field(default_factory=ClaimIndex)
    devices: DeviceIndex = field(default_factory=DeviceIndex)
    nodes: GpuNodeIndex = field(default_factory=GpuNodeIndex)
    reasons: Mapping[Key, str] = field(default_factory=dict)  # why pods are not placed yet, beyond what their status says


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
