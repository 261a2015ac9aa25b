"""The world as one value: nodes, devices, what is granted on them and what was measured."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from aimgpu.domain import Ask, Device, Grant, Level, Partition, Placement

UNKNOWN_PARTITION = ""  # key of `foreign_bytes` for use that the device does not report apart by partition


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A device, what is granted on it, and what processes that are not ours were measured to hold.

    `shared_levels` and `exclusive_levels` say, by partition id, which levels a grant there could have; a partition that is
    not listed offers `none` alone.
    """

    device: Device
    grants: tuple[Grant, ...] = ()
    foreign_bytes: Mapping[str, int] = field(default_factory=dict)  # by partition id; counts as taken
    foreign_kind: str = "processes"  # what holds them, in words
    shared_levels: Mapping[str, frozenset[Level]] = field(default_factory=dict)
    exclusive_levels: Mapping[str, frozenset[Level]] = field(default_factory=dict)

    def foreign_on(self, partition: Partition) -> int:
        """Foreign bytes that count here; what cannot be distinguished counts on every partition."""
        return self.foreign_bytes.get(partition.id, 0) + self.foreign_bytes.get(UNKNOWN_PARTITION, 0)

    def best_level(self, partition_id: str, *, exclusive: bool) -> Level:
        levels = (self.exclusive_levels if exclusive else self.shared_levels).get(partition_id)
        return _best(levels) if levels else Level.NONE


@lru_cache(maxsize=64)
def _best(levels: frozenset[Level]) -> Level:
    """Of the few sets of levels that there are."""
    return max(levels, key=lambda level: level.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One machine. CPU and host memory count only where they are known."""

    name: str
    devices: tuple[DeviceState, ...]
    cpu_millis: int | None = None
    host_memory_bytes: int | None = None
    used_cpu_millis: int = 0
    used_host_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a decision may look at. A value: nothing in it changes once it is made.

    `running` holds the ask behind each instance, if known. An instance whose ask is not known is never moved and never
    stopped for another.
    """

    nodes: tuple[NodeState, ...]
    running: Mapping[str, Ask] = field(default_factory=dict)  # by instance id
    recent_preemptions: int = 0  # in the last hour

    def devices(self) -> Iterator[tuple[NodeState, DeviceState]]:
        """Every device with its node, in an order that does not depend on how they were listed."""
        for node in sorted(self.nodes, key=lambda node: node.name):
            for state in sorted(node.devices, key=lambda state: state.device.id):
                yield node, state

    def with_placement(self, ask: Ask, placement: Placement) -> "Snapshot":
        """The snapshot in which the placement has been carried out."""
        return self.with_placements([(ask, placement)])

    def with_placements(self, placed: Iterable[tuple[Ask, Placement]]) -> "Snapshot":
        """The snapshot in which all of them have been carried out, in their order."""
        by_node: dict[str, list[tuple[Ask, Placement]]] = {}
        running = dict(self.running)
        for ask, placement in placed:
            running[ask.name] = ask
            if placement.slots:
                by_node.setdefault(placement.slots[0].node, []).append((ask, placement))
        nodes = tuple(_charged(node, by_node[node.name]) if node.name in by_node else node for node in self.nodes)
        return replace(self, nodes=nodes, running=running)

    def without_instance(self, instance_id: str) -> "Snapshot":
        """The snapshot in which this instance has been released."""
        ask = self.running.get(instance_id)
        nodes = tuple(_released(node, instance_id, ask) for node in self.nodes)
        running = {name: kept for name, kept in self.running.items() if name != instance_id}
        return replace(self, nodes=nodes, running=running)


def _charged(node: NodeState, placed: list[tuple[Ask, Placement]]) -> NodeState:
    new: dict[str, list[Grant]] = {}
    states = {state.device.id: state for state in node.devices}
    for ask, placement in placed:
        for index, slot in enumerate(placement.slots):
            level = states[slot.device_id].best_level(slot.partition_id, exclusive=slot.exclusive)
            grant = slot.granted(f"{ask.name}#{index}", ask.name, ask.deployment or ask.name, ask.priority, level)
            new.setdefault(slot.device_id, []).append(grant)
    devices = [
        replace(state, grants=(*state.grants, *new[state.device.id])) if state.device.id in new else state
        for state in node.devices
    ]
    return replace(
        node,
        devices=tuple(devices),
        used_cpu_millis=node.used_cpu_millis + sum(ask.cpu_millis for ask, _ in placed),
        used_host_memory_bytes=node.used_host_memory_bytes + sum(ask.host_memory_bytes for ask, _ in placed),
    )


def _released(node: NodeState, instance_id: str, ask: Ask | None) -> NodeState:
    if not any(grant.instance_id == instance_id for state in node.devices for grant in state.grants):
        return node
    devices = tuple(
        replace(state, grants=tuple(grant for grant in state.grants if grant.instance_id != instance_id))
        for state in node.devices
    )
    return replace(
        node,
        devices=devices,
        used_cpu_millis=node.used_cpu_millis - (ask.cpu_millis if ask else 0),
        used_host_memory_bytes=node.used_host_memory_bytes - (ask.host_memory_bytes if ask else 0),
    )
