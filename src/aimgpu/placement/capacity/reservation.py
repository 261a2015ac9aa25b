"""Nodes held for large Asks.

Where instances come and go, whole nodes never come free by themselves: someone small is always there.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction as Ratio

from aimgpu.domain import Whole
from aimgpu.placement.scoring.mix import Mix, devices_ppm
from aimgpu.placement.snapshot import NodeState, Snapshot

FAIR = Ratio(3, 4)  # of the part of all Devices that a class of Asks wants; the rest they may find elsewhere


def reserve_nodes(snapshot: Snapshot, mix: Mix, share: Ratio = FAIR) -> Mapping[str, int]:
    """Nodes to hold, by name, for Asks of at least so many whole Devices; the emptiest and plainest that would do.

    Each class of Asks for several Devices gets its part of the demand, times `share`, in whole nodes.
    """
    wanted: Counter[int] = Counter()
    cpu: dict[int, int] = {}
    for ask, count in mix.counts:
        if isinstance(ask.want, Whole) and ask.want.count > 1 and not ask.products:
            size = ask.want.count
            wanted[size] += count * size
            cpu[size] = max(cpu.get(size, 0), ask.cpu_millis)
    largest = max((state.device.memory_bytes for _, state in snapshot.devices()), default=1)
    total = Ratio(sum(devices_ppm(ask, largest) * count for ask, count in mix.counts), 1_000_000)
    devices = sum(len(node.devices) for node in snapshot.nodes)
    held: dict[str, int] = {}
    for size in sorted(wanted, reverse=True):
        budget = int(share * wanted[size] * devices / total)
        for node in sorted(snapshot.nodes, key=_plainness):
            fitting = len(node.devices) // size
            if node.name in held or not fitting or not _feeds(node, cpu[size] * fitting):
                continue
            if budget < fitting * size:
                break
            budget -= fitting * size
            held[node.name] = size
    return held


def _plainness(node: NodeState) -> tuple[int, int, int, str]:
    tenants = sum(len(state.grants) for state in node.devices)
    return tenants, len(node.devices), node.cpu_millis or 0, node.name


def _feeds(node: NodeState, cpu_millis: int) -> bool:
    return node.cpu_millis is None or node.cpu_millis >= cpu_millis
