"""NVIDIA GPUs as devices: what NVML reports, put into the words of the domain."""

import math
import re

from aimgpu.domain import Device, Layout, Partition, SliceProfile, Vendor
from aimgpu.hardware.known_gpus import recognise
from aimgpu.hardware.nvidia.facts import Gpu, MemoryFacts
from aimgpu.hardware.nvidia.instances import (
    MigInstance,
    OfferedProfile,
    placeable,
    read_device_memory,
    read_instances,
    read_offered_profiles,
)
from aimgpu.hardware.nvidia.mig import EMPTY, WHOLE, Placed, full_layouts, layout_name
from aimgpu.units import GIB

_MODEL = re.compile(r"\b([A-Z]{1,2}[0-9]{1,4}[A-Z]{0,2})\b")
_GIGABYTES = re.compile(r"\b([0-9]+)\s?GB\b")


def read_device(gpu: Gpu) -> Device:
    """The device as it is now. Raises NvmlFailure when it is lost."""
    mode, name = gpu.mig_mode(), gpu.name()
    offered = read_offered_profiles(gpu) if mode is not None else ()
    instances = read_instances(gpu, offered) if mode is not None and mode[0] else None
    memory = read_device_memory(gpu, instances)
    units = gpu.multiprocessors() or max((profile.multiprocessors for profile in offered), default=None)
    whole = _whole_layout(gpu.uuid, memory, units)
    current = whole if instances is None else mig_layout(gpu.uuid, instances)
    profiles = placeable(offered)
    listed = (whole, *possible_layouts(gpu.uuid, profiles))
    if mode is not None and not profiles:  # what it can have is reported once MIG is on
        listed = (whole, mig_layout(gpu.uuid, ()))
    known = {layout.name for layout in listed}
    return Device(
        id=gpu.uuid,
        index=gpu.index,
        vendor=Vendor.NVIDIA,
        product=product_name(name, memory.total_bytes),
        market_name=name,
        memory_bytes=memory.usable_bytes,
        reserved_bytes=memory.reserved_bytes,
        compute_units=units,
        layout=current,
        layouts=tuple(current if layout.name == current.name else layout for layout in listed)
        + (() if current.name in known else (current,)),
        profiles=profiles,
    )


def mig_layout(device_id: str, instances: tuple[MigInstance, ...]) -> Layout:
    """The layout that exists. An instance that is cut up further, or has no compute instance, is named and not offered."""
    return Layout(
        name="+".join(_instance_name(instance) for instance in instances) or EMPTY,
        compute_mode=None,
        memory_mode=None,
        partitions=tuple(
            Partition(
                id=partition_id(device_id, instance),
                device_id=device_id,
                index=_instance_index(instance),
                kind=instance.kind,
                memory_bytes=instance.memory.usable_bytes,
                compute_units=instance.multiprocessors,
                start=instance.placed.start if instance.placed else None,
                uuid=instance.uuid,
            )
            for instance in instances
            if instance.memory is not None
        ),
    )


def possible_layouts(device_id: str, profiles: tuple[SliceProfile, ...]) -> tuple[Layout, ...]:
    """Those that are worth listing; others can be asked for by name."""
    by_kind = {profile.kind: profile for profile in profiles}
    return tuple(
        Layout(
            name=layout_name(placed),
            compute_mode=None,
            memory_mode=None,
            partitions=tuple(_possible(device_id, one, by_kind[one.kind]) for one in placed),
        )
        for placed in full_layouts(profiles)
    )


def partition_id(device_id: str, instance: MigInstance) -> str:
    """Made of the start, so that a partition keeps its id when its neighbours change."""
    return f"{device_id}/{instance.kind}-{_instance_index(instance)}"


def product_name(market_name: str | None, total_bytes: int) -> str:
    """Model and size: H200-141 of "NVIDIA H200", RTX-4090-24 of "NVIDIA GeForce RTX 4090"."""
    known = recognise(Vendor.NVIDIA, market_name, total_bytes)
    if known is not None:
        return known.product
    name = market_name or "unknown"
    model, size = _MODEL.search(name), _GIGABYTES.search(name)
    words = model[1] if model else re.sub(r"^(NVIDIA|Tesla|Quadro)\s+", "", name).replace(" ", "-")
    return f"{words}-{size[1] if size else math.ceil(total_bytes / GIB)}"


def unplaceable_reason(offered: tuple[OfferedProfile, ...]) -> str | None:
    """Why no MIG layout is listed for a GPU that has MIG; None when some are."""
    if not offered:
        return "it reports no profile"
    if all(profile.placements is None for profile in offered):
        return "it reports no placement"
    return None


def _whole_layout(device_id: str, memory: MemoryFacts, units: int | None) -> Layout:
    whole = Partition(
        id=f"{device_id}/{WHOLE}-0",
        device_id=device_id,
        index=0,
        kind=WHOLE,
        memory_bytes=memory.usable_bytes,
        compute_units=units,
        uuid=device_id,
    )
    return Layout(name=WHOLE, compute_mode=None, memory_mode=None, partitions=(whole,))


def _possible(device_id: str, placed: Placed, profile: SliceProfile) -> Partition:
    return Partition(
        id=f"{device_id}/{placed.kind}-{placed.start}",
        device_id=device_id,
        index=placed.start,
        kind=placed.kind,
        memory_bytes=profile.memory_bytes,
        compute_units=profile.compute_units,
        start=placed.start,
    )


def _instance_index(instance: MigInstance) -> int:
    return instance.placed.start if instance.placed else instance.id


def _instance_name(instance: MigInstance) -> str:
    name = str(instance.placed) if instance.placed else instance.kind
    return name if instance.usable else f"{name}({instance.compute_instances} compute instances)"
