"""Partitions that are alike to every need are one class, so that whether a need wants them is decided per class."""

from dataclasses import dataclass
from fractions import Fraction as Ratio

from aimgpu.domain import Level, Partition
from aimgpu.domain.compute import partition_part, partition_ppm
from aimgpu.placement.need import Need
from aimgpu.placement.snapshot import DeviceState


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionClass:
    vendor: str
    product: str
    kind: str
    cell_bytes: int  # of the partition
    device_bytes: int
    whole: bool  # the device is one partition
    shared_level: Level
    exclusive_level: Level
    compute_part: Ratio | None  # of the device's compute; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a need would be met on a partition of some class, if it has the room."""

    memory_bytes: int
    compute_ppm: int | None  # of the partition
    exclusive: bool
    fallback: bool  # shared was wanted; the demanded level is available only alone


def partition_class_of(state: DeviceState, partition: Partition) -> PartitionClass:
    device = state.device
    return PartitionClass(
        vendor=device.vendor.value,
        product=device.product.casefold(),
        kind=partition.kind.lower(),
        cell_bytes=partition.memory_bytes,
        device_bytes=device.memory_bytes,
        whole=len(device.layout.partitions) == 1,
        shared_level=state.best_level(partition.id, exclusive=False),
        exclusive_level=state.best_level(partition.id, exclusive=True),
        compute_part=partition_part(device, partition),
    )


def terms_for(need: Need, partition_class: PartitionClass) -> Terms | None:
    """None where no partition of this class will ever do."""
    if not _identity_wanted(need, partition_class):
        return None
    shared = not need.exclusive and partition_class.shared_level.rank >= need.least_level.rank
    if not shared and partition_class.exclusive_level.rank < need.least_level.rank:
        return None
    compute_ppm = None if need.ask.compute_ppm is None else partition_ppm(need.ask.compute_ppm, partition_class.compute_part)
    if compute_ppm is None and need.ask.compute_ppm is not None:
        return None
    if shared:
        wanted = need.bytes_on(partition_class.device_bytes)
        fits = wanted <= partition_class.cell_bytes and (need.ask.footprint_bytes or 0) <= wanted
        return Terms(memory_bytes=wanted, compute_ppm=compute_ppm, exclusive=False, fallback=False) if fits else None
    least = max(need.ask.footprint_bytes or 0, 0 if need.whole else need.bytes_on(partition_class.device_bytes))
    if least > partition_class.cell_bytes:
        return None
    return Terms(memory_bytes=partition_class.cell_bytes, compute_ppm=compute_ppm, exclusive=True, fallback=not need.exclusive)


def _identity_wanted(need: Need, partition_class: PartitionClass) -> bool:
    ask = need.ask
    return (
        (ask.vendor is None or ask.vendor.lower() == partition_class.vendor)
        and (ask.refused_vendor is None or ask.refused_vendor.lower() != partition_class.vendor)
        and (not need.products or partition_class.product in need.products)
        and partition_class.product not in need.refused_products
        and (need.kind is None or need.kind == partition_class.kind)
        and (partition_class.whole or not need.whole)
    )
