"""The GPUs section: each device with its partitions, and on each partition one share per instance."""

from collections.abc import Iterator, Mapping, Sequence

from aimgpu.control.observation import Observation
from aimgpu.domain import Device, DeviceUsage, Footprint, Grant, Instance, InstanceState, Partition
from aimgpu.placement import DeviceState
from aimgpu.placement.fit import device_free_bytes, free_bytes
from aimgpu.sizing.surplus import spend_surplus
from aimgpu.web.sources import Json

_MOST_LAYOUTS = 40


def describe_gpus(seen: Observation, footprints: Mapping[str, Footprint]) -> list[Json]:
    """`footprints`: by deployment, where its model could be sized."""
    return [_gpu(device, seen, footprints) for device in sorted(seen.devices, key=lambda device: device.index)]


def _gpu(device: Device, seen: Observation, footprints: Mapping[str, Footprint]) -> Json:
    usage = seen.usage.get(device.id)
    held = [(instance, grant) for instance in seen.instances for grant in instance.grants if grant.device_id == device.id]
    granted = sum(grant.memory_bytes for _, grant in held)
    foreign = seen.foreign_bytes.get(device.id, {})
    state = DeviceState(device=device, grants=tuple(grant for _, grant in held), foreign_bytes=foreign)
    return {
        "id": device.id,
        "index": device.index,
        "name": (device.market_name or device.product) + (device.kind_note if device.software else ""),
        "product": device.product,
        "vendor": device.vendor.value,
        "simulated": device.simulated,
        "software": device.software,
        "layout": device.layout.name,
        "compute_units": device.compute_units,
        "memory_bytes": device.memory_bytes,
        "reserved_bytes": device.reserved_bytes,
        "granted_bytes": granted,
        "foreign_bytes": sum(foreign.values()),
        "free_bytes": device_free_bytes(state),
        "measured_bytes": usage.used_bytes if usage else None,
        "utilization_percent": usage.utilization_percent if usage else None,
        "layouts": _layouts(device),
        "flexible": bool(device.profiles),
        "error": seen.error_of(device.id),
        "others": list(_others(usage, seen)),
        "partitions": [_partition(part, state, held, seen, footprints) for part in device.layout.partitions],
    }


def _layouts(device: Device) -> list[Json]:
    found = [
        {
            "name": layout.name,
            "partitions": len(layout.partitions),
            "memory_bytes": min((part.memory_bytes for part in layout.partitions), default=0),
            "reload": layout.memory_mode != device.layout.memory_mode,
        }
        for layout in device.layouts[:_MOST_LAYOUTS]
    ]
    names = {one["name"] for one in found}
    if device.layout.name not in names:
        found.insert(0, {"name": device.layout.name, "partitions": len(device.layout.partitions), "reload": False})
    return found


def _others(usage: DeviceUsage | None, seen: Observation) -> Iterator[Json]:
    for process in usage.processes if usage else ():
        if process.pid not in seen.owners:
            yield {"pid": process.pid, "name": process.name, "memory_bytes": process.memory_bytes}


def _partition(
    part: Partition,
    state: DeviceState,
    held: Sequence[tuple[Instance, Grant]],
    seen: Observation,
    footprints: Mapping[str, Footprint],
) -> Json:
    usage = seen.usage.get(state.device.id)
    here = [(instance, grant) for instance, grant in held if grant.partition_id == part.id]
    return {
        "id": part.id,
        "kind": part.kind,
        "index": part.index,
        "memory_bytes": part.memory_bytes,
        "compute_units": part.compute_units,
        "granted_bytes": sum(grant.memory_bytes for _, grant in here),
        "foreign_bytes": state.foreign_on(part),
        "free_bytes": max(0, free_bytes(state, part)),
        "measured_bytes": usage.used_bytes_by_partition.get(part.id) if usage else None,
        "shares": [_share(instance, grant, seen, footprints.get(instance.deployment)) for instance, grant in here],
    }


def _share(instance: Instance, grant: Grant, seen: Observation, footprint: Footprint | None) -> Json:
    asleep = instance.state is InstanceState.SLEEPING
    if footprint is not None and instance.sized_bytes is not None:
        footprint = spend_surplus(footprint, grant.memory_bytes)
    terms = [] if footprint is None or asleep else list(_terms(footprint, grant.memory_bytes))
    return {
        "instance": instance.id,
        "model": instance.deployment,
        "state": instance.state.value,
        "memory_bytes": grant.memory_bytes,
        "measured_bytes": seen.measured_bytes(instance.id),
        "compute_ppm": grant.compute_ppm,
        "exclusive": grant.exclusive,
        "priority": grant.priority.value,
        "level": grant.level.value,
        "mechanism": grant.mechanism,
        "terms": terms,
    }


def _terms(footprint: Footprint, granted: int) -> Iterator[Json]:
    """Weights, KV cache and the rest as they are expected within the share; what is left of it is reserve."""
    left = granted
    for name in ("weights", "kv_cache"):
        size = min(left, sum(term.memory_bytes for term in footprint.terms if term.name == name))
        left -= size
        yield {"name": name, "memory_bytes": size}
    rest = sum(term.memory_bytes for term in footprint.terms if term.name not in ("weights", "kv_cache"))
    yield {"name": "overhead", "memory_bytes": min(left, rest)}
    yield {"name": "reserve", "memory_bytes": max(0, left - rest)}
