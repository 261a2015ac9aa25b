"""GPUs as ResourceSlices publish them, and what claims ask of them, as the placement engine knows both. Pure.

A GPU's cells are the partitions that exist. Those that a claim could cause to be made are left to kube-scheduler.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aimgpu.domain import Device, Layout, Memory, Partition, PartitionKind, Vendor, Whole
from aimgpu.kubernetes.api.quantities import format_quantity, parse_quantity
from aimgpu.kubernetes.cluster.operator.pending_pods import NotUnderstood, read_selectors
from aimgpu.kubernetes.cluster.operator.pod_gpus import results_of
from aimgpu.kubernetes.vocabulary.names import (
    COMPUTE,
    DRIVER,
    MEMORY,
    PARTITION_CLASS,
    SHARED_CLASS,
    TYPE,
    TYPE_SEAT,
    WHOLE_CLASS,
    WHOLE_RESOURCE,
)
from aimgpu.placement import DeviceState
from aimgpu.units import PPM

Object = Mapping[str, Any]
Cell = tuple[str, str]  # pool and device, without the suffix of its shared form
SHARED_SUFFIX = "-shared"
_PERCENT = PPM // 100
_MOST_BYTES = 1 << 50
_MOST_DEVICES = 256  # of one ask: no node has more
_SIZE = re.compile(rf"device\.capacity\['{re.escape(DRIVER)}'\]\.memory\.compareTo\(quantity\('([^']+)'\)\) == 0")


class NoHint(Exception):
    """The pod is left to kube-scheduler, for this reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAsk:
    """What a pod asks of GPUs, one alternative."""

    want: Whole | Memory | PartitionKind
    devices: int = 1
    compute_ppm: int | None = None
    product: str | None = None  # of the slices
    memory: str | None = None  # of the device, exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimView:
    """`asked`: its devices as JSON, by which equal claims are read once.

    `taken`: cells with bytes, None for all of a cell, and percent of its compute.
    """

    asked: str
    allocated: bool
    taken: tuple[tuple[Cell, int | None, int], ...]


@dataclass(slots=True)
class Published:
    """The devices of the cluster, by node."""

    _slices: dict[str, Object] = field(default_factory=dict)
    _named: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # slices by node

    def put(self, name: str, spec: Object | None) -> bool:
        """Whether anything changed. None: the slice is gone."""
        before = self._slices.pop(name, None)
        if before is not None:
            self._named[str(before.get("nodeName") or "")].discard(name)
        if spec is not None:
            self._slices[name] = spec
            self._named[str(spec.get("nodeName") or "")].add(name)
        return before != spec

    def devices_of(self, node: str) -> tuple[DeviceState, ...]:
        """Without those that have a taint: no claim of admission's tolerates one."""
        specs = [self._slices[name] for name in self._named.get(node, ())]
        newest = max((int((spec.get("pool") or {}).get("generation") or 0) for spec in specs), default=0)
        gpus: dict[str, dict[str, Object]] = {}
        for spec in specs:
            if int((spec.get("pool") or {}).get("generation") or 0) == newest:
                for device in spec.get("devices") or ():
                    if _value(device, "current") is not False and _value(device, TYPE) != TYPE_SEAT:
                        cells = gpus.setdefault(str(_value(device, "gpu") or device["name"]), {})
                        name = device["name"].removesuffix(SHARED_SUFFIX)
                        if name not in cells or device.get("allowMultipleAllocations"):
                            cells[name] = device
        return tuple(
            DeviceState(device=_device(node, gpu, cells))
            for gpu, cells in sorted(gpus.items())
            if not any(device.get("taints") for device in cells.values())
        )


def read_claim(claim: Object) -> ClaimView:
    allocation = (claim.get("status") or {}).get("allocation")
    taken = tuple(_read_result(one) for one in results_of(dict(claim)))
    asked = json.dumps((claim.get("spec") or {}).get("devices") or {}, sort_keys=True)
    return ClaimView(asked=asked, allocated=allocation is not None, taken=taken)


def read_asks(asked: str) -> tuple[GpuAsk, ...]:
    """The alternatives of a claim, first choice first. Raises NoHint for what is kube-scheduler's alone."""
    devices = json.loads(asked)
    requests: Sequence[Object] = devices.get("requests") or ()
    if len(requests) != 1:
        raise NoHint("a claim with several requests")
    for constraint in devices.get("constraints") or ():
        if constraint.get("distinctAttribute") != f"{DRIVER}/gpu":
            raise NoHint("a claim with a constraint between devices")
    return tuple(_read_request(one) for one in requests[0].get("firstAvailable") or (requests[0].get("exactly") or {},))


def read_limit(resource: str, count: int) -> GpuAsk | None:
    """Of an extended resource that a claim of kube-scheduler's answers; None: it is none of ours."""
    return GpuAsk(want=Whole(count=min(count, _MOST_DEVICES))) if resource == WHOLE_RESOURCE else None


def product_names(ask: GpuAsk, known: Collection[str]) -> frozenset[str]:
    """Of the engine, which knows a GPU's size by its name; empty: any."""
    if ask.product is None and ask.memory is None:
        return frozenset()
    found = {
        name for name in known if ask.product in (None, name.partition("|")[0]) and ask.memory in (None, name.partition("|")[2])
    }
    return frozenset(found or {"none"})


def _read_request(request: Object) -> GpuAsk:
    name, count = request.get("deviceClassName"), min(int(request.get("count") or 1), _MOST_DEVICES)
    if request.get("adminAccess") or request.get("allocationMode") == "All" or request.get("tolerations"):
        raise NoHint("a claim for administrators, for all devices, or one that tolerates taints of devices")
    attributes, memory = _read_selectors(request.get("selectors") or ())
    amounts = (request.get("capacity") or {}).get("requests") or {}
    product, mode = attributes.get("productName"), attributes.get("computeMode")
    compute = parse_quantity(amounts[COMPUTE]) * _PERCENT if COMPUTE in amounts else 0
    if set(amounts) - {MEMORY, COMPUTE} or "memoryMode" in attributes:
        raise NoHint("a claim that names a capacity or a memory mode")
    if name == WHOLE_CLASS and mode in (None, "SPX") and not amounts:
        return GpuAsk(want=Whole(count=count), product=product, memory=memory)
    if name == PARTITION_CLASS and mode is not None and not amounts:
        return GpuAsk(want=PartitionKind(kind=mode.lower()), devices=count, product=product, memory=memory)
    if name == SHARED_CLASS and mode is None and MEMORY in amounts:
        want = Memory(memory_bytes=parse_quantity(amounts[MEMORY]))
        if not (0 < want.memory_bytes < _MOST_BYTES and 0 <= compute <= PPM):
            raise NoHint("a claim of more than there can be, or of nothing")
        return GpuAsk(want=want, devices=count, compute_ppm=compute or None, product=product, memory=memory)
    raise NoHint(f"a claim of class {name} in a form that is not evaluated")


def _read_selectors(selectors: Iterable[Object]) -> tuple[dict[str, str], str | None]:
    memory, others = None, list[Object]()
    for selector in selectors:
        size = _SIZE.fullmatch(str((selector.get("cel") or {}).get("expression") or "").strip())
        if size is None:
            others.append(selector)
        else:
            memory = format_quantity(parse_quantity(size[1]))
    try:
        return read_selectors(others), memory
    except NotUnderstood as error:
        raise NoHint("a selector of devices that is not one of admission's") from error


def _device(node: str, gpu: str, cells: Mapping[str, Object]) -> Device:
    device_id = f"{node}/{gpu}"
    partitions = [
        Partition(
            id=f"{node}/{name}",
            device_id=device_id,
            index=index,
            kind=str(_value(device, "partitionProfile") or "whole").lower(),
            memory_bytes=max(parse_quantity(((device.get("capacity") or {}).get(MEMORY) or {}).get("value") or 1), 1),
        )
        for index, (name, device) in enumerate(sorted(cells.items()))
    ]
    first = next(iter(cells.values()))
    if len(partitions) == 1 and _value(first, "partitioned"):  # of a GPU that is not whole
        partitions.append(Partition(id=f"{device_id}/rest", device_id=device_id, index=1, kind="rest", memory_bytes=1))
    sizes = {format_quantity(part.memory_bytes) for part in partitions[: len(cells)]}
    layout = Layout(name="published", compute_mode=None, memory_mode=None, partitions=tuple(partitions))
    return Device(
        id=device_id,
        index=0,
        vendor=Vendor.NVIDIA if _value(first, "vendor") == Vendor.NVIDIA.value else Vendor.AMD,
        product=f"{_value(first, 'productName') or ''}|{sizes.pop() if len(sizes) == 1 else ''}",
        market_name=None,
        memory_bytes=layout.memory_bytes,
        compute_units=None,
        layout=layout,
        layouts=(layout,),
    )


def _read_result(one: Object) -> tuple[Cell, int | None, int]:
    cell = (str(one["pool"]), str(one["device"]).removesuffix(SHARED_SUFFIX))
    return cell, _consumed(one, MEMORY), _consumed(one, COMPUTE) or 0


def _consumed(result: Object, name: str) -> int | None:
    amount = (result.get("consumedCapacity") or {}).get(name)
    return None if amount is None else parse_quantity(amount)


def _value(device: Object, name: str) -> Any:  # noqa: ANN401 - an attribute has one of four types
    return next(iter(((device.get("attributes") or {}).get(name) or {}).values()), None)
