"""Replicas that the device plugins of nodes offer, and which of them a request can have."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.domain import IsolationRequirement
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.vocabulary.annotations import ISOLATION, NUM_DEVICES, GpuRequest
from aimgpu.units import MIB, PPM

_STRONGER = (
    IsolationRequirement.NONE,
    IsolationRequirement.ADVISORY,
    IsolationRequirement.ENFORCED,
    IsolationRequirement.HARDWARE,
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ReplicaOffer:
    """One extended resource of a node, as the node's GpuNode describes it."""

    name: str
    memory_bytes: int  # of one replica
    partition_bytes: int  # of the GPU or partition that it is a part of
    shared: bool
    most: int | None = None  # replicas that a container may have; None: any number, each of another GPU
    isolation: IsolationRequirement = IsolationRequirement.NONE
    compute_mode: str | None = None
    memory_mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChoice:
    name: str
    count: int
    memory_bytes: int  # of each


class OfferedReplicas:
    """The offers in the GpuNodes of the cluster."""

    def __init__(self, gpu_nodes: Iterable[Mapping[str, Any]] = ()) -> None:
        self._offers: dict[str, tuple[ReplicaOffer, ...]] = {}
        for item in gpu_nodes:
            self.put(item)

    def put(self, gpu_node: Mapping[str, Any]) -> None:
        entries = (gpu_node.get("status") or {}).get("resources") or ()
        self._offers[str(gpu_node["metadata"]["name"])] = tuple(_read_offer(entry) for entry in entries)

    def remove(self, gpu_node: Mapping[str, Any]) -> None:
        self._offers.pop(str(gpu_node["metadata"]["name"]), None)

    def by_name(self) -> dict[str, list[ReplicaOffer]]:
        found: dict[str, list[ReplicaOffer]] = {}
        for offers in self._offers.values():
            for offer in offers:
                found.setdefault(offer.name, []).append(offer)
        return found


def choose_replicas_of(request: GpuRequest, offered: Mapping[str, list[ReplicaOffer]]) -> ReplicaChoice:
    """The smallest replica that is large enough on every node: kube-scheduler may take any. Raises InvalidInput."""
    fitting = []
    for name, offers in offered.items():
        if all(_misfit(request, offer) is None for offer in offers):
            fitting.append((min(offer.memory_bytes for offer in offers), name))
    if not fitting:
        reasons = (f"{offer.name}: {_misfit(request, offer)}" for offers in offered.values() for offer in sorted(offers))
        raise InvalidInput(
            f"no replica of a GPU that the device plugin offers is what the pod asks for ({'; '.join(dict.fromkeys(reasons))})",
            hint="Ask for less, or change the replicas with `aimgpu timeslicing apply`.",
        )
    memory, name = min(fitting)
    return ReplicaChoice(name=name, count=request.devices, memory_bytes=memory)


def _misfit(request: GpuRequest, offer: ReplicaOffer) -> str | None:
    """Why a request cannot have this; None: it can."""
    for wanted, there in ((request.compute_mode, offer.compute_mode), (request.memory_mode, offer.memory_mode)):
        if wanted is not None and wanted != there:
            return f"it is not {wanted}"
    needed = _needed_bytes(request, offer)
    if (needed is None) == offer.shared:
        return "it is a share" if offer.shared else "it is not shared"
    if needed is not None and needed > offer.memory_bytes:
        return f"it has {offer.memory_bytes // MIB} MiB and {needed // MIB} MiB are asked for"
    if offer.most is not None and request.devices > offer.most:
        return f"a container gets {offer.most} of it at most ({NUM_DEVICES})"
    if offer.shared and request.isolation and _STRONGER.index(request.isolation) > _STRONGER.index(offer.isolation):
        return f"its plugin's configuration has aim.isolation {offer.isolation.value} ({ISOLATION})"
    return None


def _needed_bytes(request: GpuRequest, offer: ReplicaOffer) -> int | None:
    """None: the whole partition. A fraction is rounded down to whole MiB as in claims, so that two halves fit."""
    if request.memory_mib is not None:
        return request.memory_mib * MIB
    if request.fraction_ppm is not None:
        return max(offer.partition_bytes * request.fraction_ppm // PPM // MIB, 1) * MIB
    return None


def _read_offer(entry: Mapping[str, Any]) -> ReplicaOffer:
    most = entry.get("mostPerContainer")
    return ReplicaOffer(
        name=str(entry["name"]),
        memory_bytes=int(entry["memoryBytes"]),
        partition_bytes=int(entry["partitionBytes"]),
        shared=bool(entry.get("shared")),
        most=None if most is None else int(most),
        isolation=IsolationRequirement(entry.get("isolation") or "none"),
        compute_mode=entry.get("computeMode"),
        memory_mode=entry.get("memoryMode"),
    )
