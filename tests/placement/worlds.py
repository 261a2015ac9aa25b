"""Small worlds to place into."""

from dataclasses import replace

from aimgpu.domain import Ask, Device, Grant, IsolationRequirement, Layout, Level, Memory, Partition, Priority, Vendor
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.units import GIB

MI300X_BYTES = 206141652992
_MODES = {"spx": ("NPS1", 1), "dpx": ("NPS1", 2), "qpx": ("NPS1", 4), "cpx": ("NPS1", 8)}


def layout_of(device_id: str, kind: str, total: int = MI300X_BYTES) -> Layout:
    memory_mode, count = _MODES[kind]
    parts = tuple(
        Partition(
            id=f"{device_id}/{kind}-{index}",
            device_id=device_id,
            index=index,
            kind=kind,
            memory_bytes=total // count,
            compute_units=304 // count,
        )
        for index in range(count)
    )
    return Layout(name=f"{kind.upper()}/{memory_mode}", compute_mode=kind.upper(), memory_mode=memory_mode, partitions=parts)


def mi300x(device_id: str, kind: str = "spx", *, index: int = 0, part: str = "MI300X", total: int = MI300X_BYTES) -> Device:
    layouts = tuple(layout_of(device_id, mode, total) for mode in _MODES)
    return Device(
        id=device_id,
        index=index,
        vendor=Vendor.AMD,
        product=part,
        market_name=None,
        memory_bytes=total,
        compute_units=304,
        layout=next(layout for layout in layouts if layout.compute_mode == kind.upper()),
        layouts=layouts,
    )


def state_of(device: Device, *grants: Grant, foreign: dict[str, int] | None = None) -> DeviceState:
    ids = [partition.id for layout in device.layouts for partition in layout.partitions]
    alone = frozenset({Level.HARDWARE, Level.RUNTIME, Level.ADVISORY, Level.NONE})
    shared = frozenset({Level.RUNTIME, Level.ADVISORY, Level.NONE})
    return DeviceState(
        device=device,
        grants=grants,
        foreign_bytes=foreign or {},
        shared_levels=dict.fromkeys(ids, shared),
        exclusive_levels=dict.fromkeys(ids, alone),
    )


def grant_on(  # noqa: PLR0913 - one argument a field that tests vary
    device: Device, memory_bytes: int, *, name: str = "old", index: int = 0, exclusive: bool = False, ppm: int | None = None
) -> Grant:
    return Grant(
        id=f"{name}#0",
        instance_id=name,
        deployment=name,
        node="n0",
        device_id=device.id,
        partition_id=device.layout.partitions[index].id,
        memory_bytes=memory_bytes,
        compute_ppm=ppm,
        priority=Priority.MEDIUM,
        level=Level.RUNTIME,
        exclusive=exclusive,
    )


def world(*states: DeviceState, name: str = "n0") -> Snapshot:
    return Snapshot(nodes=(NodeState(name=name, devices=states),))


def ask(name: str = "chat", gib: int = 10, **changes: object) -> Ask:
    made = Ask(name=name, want=Memory(memory_bytes=gib * GIB), isolation=IsolationRequirement.NONE)
    return replace(made, **changes)  # type: ignore[arg-type]
