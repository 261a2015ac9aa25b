"""The layout of a device that a name means. Pure."""

from aimgpu.domain.device import Device, Layout, Partition
from aimgpu.domain.slices import Placed, layout_name, parse_layout, place
from aimgpu.errors import UnknownLayout


def find_layout(device: Device, name: str) -> Layout:
    """By full name ("CPX/NPS4"), or by compute mode alone where the memory mode can stay."""
    wanted = name.strip().lower()
    for layout in device.layouts:
        if layout.name.lower() == wanted:
            return layout
    by_mode = [layout for layout in device.layouts if layout.compute_mode and layout.compute_mode.lower() == wanted]
    same_memory = [layout for layout in by_mode if layout.memory_mode == device.layout.memory_mode]
    if len(same_memory) == 1:
        return same_memory[0]
    if by_mode:
        raise UnknownLayout(
            f"{device.id} ({device.product}) cannot have {name!r} under {device.layout.memory_mode}",
            hint=f"With another memory mode, which takes a driver reload: {', '.join(layout.name for layout in by_mode)}.",
        )
    if device.profiles:
        made = _make_layout(device, wanted)
        return next((layout for layout in device.layouts if layout.name == made.name), made)
    known = ", ".join(layout.name for layout in device.layouts[:20])
    raise UnknownLayout(f"{device.id} ({device.product}) cannot have layout {name!r}", hint=f"It can have: {known}.")


def _make_layout(device: Device, wanted: str) -> Layout:
    """MIG: any legal set of profiles, full or not, with media engines or not."""
    profiles = {profile.kind: profile for profile in device.profiles}
    there = [Placed(kind=part.kind, start=part.start) for part in device.layout.partitions if part.start is not None]
    try:
        parts = parse_layout(wanted)
    except UnknownLayout as error:
        known = ", ".join(sorted(profiles))
        raise UnknownLayout(
            f"{device.id} ({device.product}) cannot have layout {wanted!r}",
            hint=f"It can be whole, or any set that fits of: {known}. {error.hint}",
        ) from error
    placed = place(parts, device.profiles, there)
    partitions = tuple(
        Partition(
            id=f"{device.id}/{one.kind}-{one.start}",
            device_id=device.id,
            index=one.start,
            kind=one.kind,
            memory_bytes=profiles[one.kind].memory_bytes,
            compute_units=profiles[one.kind].compute_units,
            start=one.start,
        )
        for one in placed
    )
    return Layout(name=layout_name(placed), compute_mode=None, memory_mode=None, partitions=partitions)
