"""What of each GPU is free for a claim that waits, and what would fit: kube-scheduler reports only how many nodes do not."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.cluster.operator.pending_pods import NotUnderstood, read_selectors
from aimgpu.kubernetes.cluster.operator.pod_gpus import requests_of, results_of
from aimgpu.kubernetes.cluster.operator.shares.indexes import Key, KnownGpus, Place
from aimgpu.kubernetes.vocabulary.names import MEMORY, PARTITION_CLASS, SHARED_CLASS, SHARED_PARTITION_CLASS, TYPE, WHOLE_CLASS
from aimgpu.kubernetes.vocabulary.names import TYPE_DIVISIBLE as DIVISIBLE
from aimgpu.kubernetes.vocabulary.names import TYPE_PARTITION as PARTITION
from aimgpu.kubernetes.vocabulary.names import TYPE_SHARED as SHARED
from aimgpu.kubernetes.vocabulary.names import TYPE_WHOLE as WHOLE
from aimgpu.units import format_bytes

_SHOWN = 6
# Types of devices that a class selects, and whether they have to be partitions.
_CLASSES: Mapping[str, tuple[tuple[str, ...], bool | None]] = {
    WHOLE_CLASS: ((WHOLE, DIVISIBLE), False),
    PARTITION_CLASS: ((PARTITION, DIVISIBLE), True),
    SHARED_CLASS: ((SHARED, DIVISIBLE), None),
    SHARED_PARTITION_CLASS: ((SHARED, DIVISIBLE), True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRoom:
    """For the claims that were asked about; `text` is without a full stop."""

    ever: bool  # an empty cluster would have room
    now: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceRoom:
    node: str
    gpu: str
    size: int
    free: int
    busy: str  # why nothing is free although it is not full; empty: nothing is in the way


def find_room(spec: Mapping[str, Any], gpus: KnownGpus, *, without: Collection[Key] = ()) -> ClaimRoom | None:
    """`spec`: of a claim; `without`: claims that will have gone. None: it names what is not understood, or no GPU is known."""
    rooms: list[ClaimRoom] = []
    for request in (spec.get("devices") or {}).get("requests") or ():
        found = [_request_room(one, gpus, without) for one in requests_of({"spec": {"devices": {"requests": [request]}}})]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return None
        best = next((one for one in known if one.now), next((one for one in known if one.ever), known[0]))
        rooms.append(best)
    return next((one for one in rooms if not one.now), rooms[0]) if rooms else None


def _request_room(request: Mapping[str, Any], gpus: KnownGpus, without: Collection[Key]) -> ClaimRoom | None:
    types, partitioned = _CLASSES.get(str(request.get("deviceClassName")), ((), None))
    try:
        attributes = read_selectors(
            one for one in request.get("selectors") or () if ".compareTo(" not in str((one.get("cel") or {}).get("expression"))
        )
        asked = ((request.get("capacity") or {}).get("requests") or {}).get(MEMORY)
        wanted = None if asked is None else parse_quantity(asked)
    except (NotUnderstood, AimGpuError):
        return None
    count = int(request.get("count") or 1)
    devices = [
        room
        for place, device in gpus.devices.all()
        if _text(device, TYPE) in types
        and (partitioned is None or _flag(device, "partitioned") is partitioned)
        and all(_text(device, name) == value for name, value in attributes.items())
        for room in [_device_room(place, device, gpus, without)]
    ]
    if not types or not gpus.devices.all() or (wanted is None and SHARED in types):  # a default share: its node's own
        return None
    least = (lambda one: one.size) if wanted is None else (lambda _one: wanted)
    ever = _on_one_node((one for one in devices if one.size >= least(one)), count)
    now = _on_one_node((one for one in devices if one.free >= least(one)), count)
    return ClaimRoom(ever=ever, now=now, text=_describe(devices, wanted, count, ever=ever))


def _device_room(place: Place, device: Mapping[str, Any], gpus: KnownGpus, without: Collection[Key]) -> _DeviceRoom:
    size = parse_quantity(((device.get("capacity") or {}).get(MEMORY) or {}).get("value") or 0)
    taken, busy = 0, ""
    gpu = _text(device, "gpu") or place[1]
    for other, there in gpus.devices.all():
        if other[0] != place[0] or (_text(there, "gpu") or other[1]) != gpu:
            continue
        for claim in gpus.claims.holders(other):
            metadata = claim["metadata"]
            if (metadata["namespace"], metadata["name"]) in without:
                continue
            if other == place:
                sizes = [
                    parse_quantity((one.get("consumedCapacity") or {}).get(MEMORY) or size)
                    for one in results_of(claim)
                    if (one["pool"], one["device"]) == other
                ]
                taken += sum(sizes)
            elif other[1].removesuffix("-shared") == place[1].removesuffix("-shared"):
                busy = "shared" if other[1].endswith("-shared") else "given whole"
            elif _text(there, "computeMode") != _text(device, "computeMode") or not _text(there, "computeMode"):
                busy = f"in use as {_text(there, 'computeMode') or _text(there, 'partitionProfile')}"
    return _DeviceRoom(node=place[0], gpu=gpu, size=size, free=0 if busy else max(size - taken, 0), busy=busy)


def _on_one_node(rooms: Iterator[_DeviceRoom], count: int) -> bool:
    """Shares of one claim are of different GPUs."""
    by_node: dict[str, set[str]] = {}
    for one in rooms:
        by_node.setdefault(one.node, set()).add(one.gpu)
    return any(len(found) >= count for found in by_node.values())


def _describe(devices: list[_DeviceRoom], wanted: int | None, count: int, *, ever: bool) -> str:
    what = "a whole device" if wanted is None else format_bytes(wanted, up=True)
    asks = f"it asks for {what}" if count == 1 else f"it asks for {what} of each of {count} GPUs of one node"
    if not devices:
        return f"{asks}, and no GPU of the cluster has such a device"
    largest = max(one.size for one in devices)
    if not ever:
        return f"{asks}, and no GPU of the cluster is that large: the largest device has {format_bytes(largest)}"
    best: dict[tuple[str, str], _DeviceRoom] = {}
    for one in devices:
        known = best.get((one.node, one.gpu))
        if known is None or one.free > known.free:
            best[one.node, one.gpu] = one
    rows = sorted(best.values(), key=lambda one: (-one.free, one.node, one.gpu))
    shown = [f"{one.node}/{one.gpu} has {format_bytes(one.free)} free{f' ({one.busy})' if one.busy else ''}" for one in rows]
    more = [f"{len(rows) - _SHOWN} others have no more"] if len(rows) > _SHOWN else []
    fits = f"up to {format_bytes(rows[0].free)} would fit now" if rows[0].free else "nothing would fit now"
    return f"{asks}; {', '.join([*shown[:_SHOWN], *more])}; {fits}"


def _text(device: Mapping[str, Any], name: str) -> str:
    return str(((device.get("attributes") or {}).get(name) or {}).get("string") or "")


def _flag(device: Mapping[str, Any], name: str) -> bool:
    return bool(((device.get("attributes") or {}).get(name) or {}).get("bool"))
