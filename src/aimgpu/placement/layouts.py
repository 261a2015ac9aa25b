"""A device under another layout: what that touches, and the state it would be in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from aimgpu.domain import Device, Layout, Level, Partition
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """Devices and the layouts they would get together; a memory mode takes the whole hive and a driver reload along."""

    layouts: Mapping[str, Layout]  # by device id
    reload_driver: bool

    def touched(self, states: Iterable[DeviceState]) -> frozenset[str]:
        """Instances that cannot stay where they are."""
        return frozenset(
            grant.instance_id
            for state in states
            if state.device.id in self.layouts
            for grant in state.grants
            if grant.partition_id not in kept_partitions(state.device, self.layouts[state.device.id])
        )


def relayout_of(node: NodeState, device: Device, layout: Layout) -> Relayout | None:
    """What giving this device that layout takes; None where foreign processes or the hive stand in the way."""
    reload_driver = layout.memory_mode != device.layout.memory_mode
    layouts = {device.id: layout}
    if reload_driver and device.hive is not None:
        for state in node.devices:
            if state.device.hive == device.hive and state.device.id != device.id:
                other = _in_memory_mode(state.device, layout)
                if other is None:
                    return None
                layouts[state.device.id] = other
    if any(state.device.id in layouts and any(state.foreign_bytes.values()) for state in node.devices):
        return None
    return Relayout(layouts=layouts, reload_driver=reload_driver)


def kept_partitions(device: Device, layout: Layout) -> frozenset[str]:
    """Partitions that live through the change: MIG instances that both layouts have at the same place. AMD modes keep none."""
    if layout.name == device.layout.name:
        return frozenset(partition.id for partition in device.layout.partitions)
    before = {partition.id: partition for partition in device.layout.partitions if partition.start is not None}
    return frozenset(
        partition.id
        for partition in layout.partitions
        if partition.id in before and _same_place(before[partition.id], partition)
    )


def laid_out(state: DeviceState, layout: Layout) -> DeviceState:
    """The state under that layout, with the grants on partitions that it keeps and the levels to expect."""
    kept = kept_partitions(state.device, layout)
    ids = [partition.id for partition in layout.partitions]
    shared = _expected(state.shared_levels, ids, frozenset())
    split = frozenset({Level.HARDWARE}) if len(ids) > 1 and not state.device.simulated else frozenset[Level]()
    return replace(
        state,
        device=replace(state.device, layout=layout),
        grants=tuple(grant for grant in state.grants if grant.partition_id in kept),
        shared_levels=shared,
        exclusive_levels=_expected(state.exclusive_levels, ids, split),
    )


def with_relayout(snapshot: Snapshot, node_name: str, relayout: Relayout) -> Snapshot:
    """The snapshot after the change; instances that it touched must be gone already."""
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                laid_out(state, relayout.layouts[state.device.id]) if state.device.id in relayout.layouts else state
                for state in node.devices
            ),
        )
        if node.name == node_name
        else node
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=nodes)


def _same_place(one: Partition, other: Partition) -> bool:
    return (one.kind, one.start, one.memory_bytes) == (other.kind, other.start, other.memory_bytes)


def _in_memory_mode(device: Device, wanted: Layout) -> Layout | None:
    """The layout that a hive's other device would get: its own compute mode if that goes with the memory mode."""
    fitting = [layout for layout in device.layouts if layout.memory_mode == wanted.memory_mode]
    order = {device.layout.compute_mode: 0, wanted.compute_mode: 1}
    return min(fitting, key=lambda layout: (order.get(layout.compute_mode, 2), layout.name), default=None)


def _expected(
    levels: Mapping[str, frozenset[Level]], ids: Iterable[str], extra: frozenset[Level]
) -> dict[str, frozenset[Level]]:
    """Listed levels stand; partitions that are not there yet offer what every present one does, and what a split adds."""
    listed = list(levels.values())
    common = frozenset[Level].intersection(*listed) if listed else frozenset[Level]()
    weaker = frozenset(level for level in common if level is not Level.HARDWARE)
    return {**levels, **{each: weaker | extra for each in ids if each not in levels}}
