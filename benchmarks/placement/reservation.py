"""Nodes held for large asks.

Where instances come and go, whole nodes never come free by themselves: someone small is always there. In the same way a device
that comes free is taken by a share before a whole device is asked for, as shares fit in more places.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction as Ratio

from aimgpu.domain import Whole
from aimgpu.placement.scoring.mix import Mix, devices_ppm
from aimgpu.placement.snapshot import NodeState, Snapshot

# Of the part of all devices that a class of asks wants; the rest they may find elsewhere.
SEVERAL = Ratio(15, 16)  # Asks for more than one whole device
ONE = Ratio(4, 5)  # Asks for one whole device, against shares


@dataclass(slots=True)
class _Class:
    """Asks for the same number of whole devices: all devices that they want, and how often each CPU is asked for."""

    wanted: int = 0
    cpu: dict[int, int] = field(default_factory=dict)

    def add(self, devices: int, cpu_millis: int, count: int) -> None:
        self.wanted += devices * count
        self.cpu[cpu_millis] = self.cpu.get(cpu_millis, 0) + count

    @property
    def mean_cpu(self) -> int:
        return sum(millis * count for millis, count in self.cpu.items()) // sum(self.cpu.values())


def reserve_nodes(snapshot: Snapshot, mix: Mix, *, several: Ratio = SEVERAL, one: Ratio = ONE) -> Mapping[str, int]:
    """Nodes to hold, by name, for asks of at least that number of whole devices.

    Each class of asks for whole devices gets its part of the demand, times `several` or `one`, in whole nodes. Classes of
    several devices come first and take the emptiest and plainest nodes that feed the ask with the most CPU, then those for
    the next. For single devices the largest nodes are held, where other classes fit as well, and only against shares.
    """
    classes = _classes(mix)
    largest = max((state.device.memory_bytes for _, state in snapshot.devices()), default=1)
    total = Ratio(sum(devices_ppm(ask, largest) * count for ask, count in mix.counts), 1_000_000)
    devices = sum(len(node.devices) for node in snapshot.nodes)
    held: dict[str, int] = {}
    for size in sorted(classes, reverse=True):
        if size == 1 and not any(not isinstance(ask.want, Whole) and ask.devices for ask, _ in mix.counts):
            continue
        share = several if size > 1 else one
        budget = int(share * classes[size].wanted * devices / total)
        _hold(held, snapshot.nodes, size, classes[size], budget)
    return held


def _classes(mix: Mix) -> dict[int, _Class]:
    found: dict[int, _Class] = {}
    for ask, count in mix.counts:
        if isinstance(ask.want, Whole) and not ask.products:
            found.setdefault(ask.want.count, _Class()).add(ask.want.count, ask.cpu_millis, count)
    return found


def _hold(held: dict[str, int], nodes: tuple[NodeState, ...], size: int, asks: _Class, budget: int) -> None:
    ordered = sorted(nodes, key=_plainness if size > 1 else _largeness)
    for cpu in sorted(asks.cpu, reverse=True) if size > 1 else [asks.mean_cpu]:
        for node in ordered:
            fitting = len(node.devices) // size
            if node.name in held or not fitting or not _feeds(node, cpu * fitting):
                continue
            if budget < fitting * size:
                return
            budget -= fitting * size
            held[node.name] = size


def _plainness(node: NodeState) -> tuple[int, int, int, str]:
    return _tenants(node), len(node.devices), node.cpu_millis or 0, node.name


def _largeness(node: NodeState) -> tuple[int, int, int, str]:
    return _tenants(node), -len(node.devices), node.cpu_millis or 0, node.name


def _tenants(node: NodeState) -> int:
    return sum(len(state.grants) for state in node.devices)


def _feeds(node: NodeState, cpu_millis: int) -> bool:
    return node.cpu_millis is None or node.cpu_millis >= cpu_millis
