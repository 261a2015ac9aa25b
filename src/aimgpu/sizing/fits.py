"""Where a footprint fits: a whole device, which partition, what part of one, how many copies, else on how many devices."""

from dataclasses import dataclass, replace

from aimgpu.domain import Device, Layout, Partition
from aimgpu.errors import InvalidInput
from aimgpu.sizing.footprint import estimate_need
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.request import SizingRequest
from aimgpu.units import PPM

_DEVICE_COUNTS = (2, 4, 8, 16, 32)
_SMALLER_PRECISIONS = ("fp8", "int8", "int4")
_SHORTEST_CONTEXT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFit:
    """One kind of partition that holds it; `copies` is how many fit on the device in that layout, one or more a partition."""

    layout: str
    compute_mode: str | None
    memory_mode: str | None
    kind: str
    memory_bytes: int  # of the smallest of this kind
    compute_units: int | None
    partitions: int  # that the layout has
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Where a model fits on one product."""

    product: str
    device_bytes: int
    whole: bool
    fraction_ppm: int | None  # of the whole device; None: it does not fit one
    copies_per_device: int
    partitions: tuple[PartitionFit, ...]  # smallest first
    devices_needed: int | None  # None: not even on the most that were tried
    bytes_per_device: int  # on that many


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A smaller wish, and what it would save."""

    change: str
    total_bytes: int
    saved_bytes: int
    whole: bool


def find_fits(request: SizingRequest, device: Device, *, granted_bytes: int = 0) -> Fits:
    """Whole device, fraction, partitions and copies that hold the request, or the grant where that is larger."""
    total, room = max(estimate_need(request).total_bytes, granted_bytes), device.memory_bytes
    needed = request.tensor_parallel if total <= room else None
    per_device = total
    if needed is None:
        needed, per_device = _spread(request, room)
    return Fits(
        product=device.product,
        device_bytes=room,
        whole=total <= room,
        fraction_ppm=-(-total * PPM // room) if total <= room else None,
        copies_per_device=room // total,
        partitions=_partition_fits(total, device),
        devices_needed=needed,
        bytes_per_device=per_device,
    )


def find_divisions(request: SizingRequest, room: int) -> tuple[tuple[int, int], ...]:
    """(devices, bytes on each) for every number of such devices that the engine can divide the model over."""
    counts = [count for count in _DEVICE_COUNTS if count > request.tensor_parallel and request.can_divide(count)]
    sized = ((count, estimate_need(replace(request, tensor_parallel=count)).total_bytes) for count in counts)
    return tuple((count, each) for count, each in sized if each <= room)


def find_savings(request: SizingRequest, device: Device) -> tuple[Saving, ...]:
    """Half the context, an 8-bit cache, smaller weights: each alone, those that save something.

    A suggestion that the engine would not take, or that has no room for the prompt, is left out.
    """
    total = estimate_need(request).total_bytes
    wishes: list[tuple[str, SizingRequest]] = []
    half = request.context // 2
    if half >= max(_SHORTEST_CONTEXT // 2, request.prompt_tokens or 0):
        wishes.append((f"context {half} instead of {request.context}", replace(request, context_tokens=half)))
    if request.concurrency > 1:
        fewer = request.concurrency // 2
        wishes.append((f"concurrency {fewer} instead of {request.concurrency}", replace(request, concurrency=fewer)))
    kv = "fp8" if request.engine == "vllm" else "q8_0"
    if request.kv_precision is None and request.engine != "transformers" and not request.is_encoder:
        wishes.append((f"a KV cache in {kv}", replace(request, kv_precision=kv)))
    own = find_precision(request.precision or request.model.precision)
    smaller_ones = [name for name in _SMALLER_PRECISIONS if find_precision(name).weight_bytes < own.weight_bytes]
    wishes += [(f"weights in {name}", replace(request, precision=name)) for name in smaller_ones]
    sized = ((change, _total_or_none(wish)) for change, wish in wishes)
    return tuple(
        Saving(change=change, total_bytes=smaller, saved_bytes=total - smaller, whole=smaller <= device.memory_bytes)
        for change, smaller in sized
        if smaller is not None and smaller < total
    )


def _total_or_none(request: SizingRequest) -> int | None:
    """None where the engine cannot be asked for this at all."""
    try:
        return estimate_need(request).total_bytes
    except InvalidInput:
        return None


def _spread(request: SizingRequest, room: int) -> tuple[int | None, int]:
    """The fewest devices on which each holds its part."""
    per_device = 0
    for count in _DEVICE_COUNTS:
        if count > request.tensor_parallel and request.can_divide(count):
            per_device = estimate_need(replace(request, tensor_parallel=count)).total_bytes
            if per_device <= room:
                return count, per_device
    return None, per_device


def _partition_fits(needed: int, device: Device) -> tuple[PartitionFit, ...]:
    """The smallest partition of every kind that holds it, of all layouts that the device can have."""
    best: dict[str, PartitionFit] = {}
    for layout in device.layouts:
        for fit in _fits_in(layout, needed):
            known = best.get(fit.kind)
            if known is None or fit.copies > known.copies:
                best[fit.kind] = fit
    return tuple(sorted(best.values(), key=lambda fit: (fit.memory_bytes, fit.kind)))


def _fits_in(layout: Layout, needed: int) -> list[PartitionFit]:
    copies = sum(partition.memory_bytes // needed for partition in layout.partitions)
    smallest: dict[str, Partition] = {}
    for partition in layout.partitions:
        known = smallest.get(partition.kind, partition)
        smallest[partition.kind] = min(known, partition, key=lambda one: one.memory_bytes)
    return [
        PartitionFit(
            layout=layout.name,
            compute_mode=layout.compute_mode,
            memory_mode=layout.memory_mode,
            kind=kind,
            memory_bytes=partition.memory_bytes,
            compute_units=partition.compute_units,
            partitions=len(layout.partitions),
            copies=copies,
        )
        for kind, partition in smallest.items()
        if partition.memory_bytes >= needed
    ]
